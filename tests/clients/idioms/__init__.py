"""The idioms: each adds a few lines to a class, and often a value to those that are alive."""

from __future__ import annotations

from tests.clients.idioms import code, functions, layers, networks, python
from tests.clients.idioms.form import IDIOMS

__all__ = ["IDIOMS", "code"]

for _form in (*functions.FORMS, *layers.FORMS, *networks.FORMS, *python.FORMS):
    _form.register()
