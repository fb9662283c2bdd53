"""A sample of the generated models; ``make soak`` takes ten thousand."""

from __future__ import annotations

from typing import Any

import pytest

from horizon_plugin_pytorch.march import March, set_march
from tests.clients.journey import outcome
from tests.clients.model import write

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_models_as_clients_write_them_reach_the_same_integers_on_every_route(first: int, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    for seed in range(first, first + 5):
        kind, text, trace = outcome(seed, tmp_path)
        is_documented = "has the name of something that every model of torch.fx has" in text
        assert kind == "ok" or is_documented, f"seed {seed}: {text}\n{trace}\n{write(seed).text}"
