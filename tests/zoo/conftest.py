"""The zoo needs packages of its own (`pip install .[zoo]`): without them its tests are skipped, and not collected."""

from __future__ import annotations

from importlib.util import find_spec

# `--doctest-modules` would import these for their examples, of which they have none.
collect_ignore = [
    file
    for file, package in (
        ("architectures.py", "transformers"),
        ("wrappers.py", "transformers"),
        ("torch_modules.py", "expecttest"),
    )
    if find_spec(package) is None
]
