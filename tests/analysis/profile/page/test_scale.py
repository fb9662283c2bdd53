"""The page of real and of large networks: how big it is, and what a browser's main thread has to do for it."""

from __future__ import annotations

import copy
import warnings
from statistics import median
from typing import Any
from urllib.parse import quote

import pytest
import torch

from benchmarks.models import ResNet50
from horizon_plugin_pytorch.analysis.profile.collect import collect
from horizon_plugin_pytorch.analysis.profile.document import Document
from horizon_plugin_pytorch.analysis.profile.page import page_of
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import calibrate, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
from tests.analysis.profile.page import samples

pytestmark = pytest.mark.soak
LARGEST_PAGE = 1.5e6


class Work:
    """Processor time of the page's main thread, in seconds: a busy machine does not change it much."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def _seconds(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def of(self, script: str) -> float:
        """What a script costs, until the second frame after it."""
        before = self._seconds()
        self._page.evaluate(
            "async script => { await (0, eval)(script);"
            " await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); }",
            script,
        )
        return self._seconds() - before


@pytest.fixture(scope="module")
def resnet() -> Document:
    """Of a real run: float and calibrated, the classes and blocks of ResNet50."""
    set_march(March.NASH_E)
    torch.manual_seed(0)
    net = ResNet50().eval()
    batches = [torch.randn(1, 3, 64, 64) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qat = prepare(copy.deepcopy(net), (batches[0],), QconfigSetter(get_qconfig(), save_dir=None), out_dir=None)
        calibrate(qat, batches, progress=False)
        return collect(net, qat, batches)


def test_a_real_resnet50(open_page: Any, resnet: Document) -> None:
    size = len(page_of([resnet]).encode())
    assert len(resnet.operators) == 59 and len(resnet.weights) > 30 and size < LARGEST_PAGE  # all is fused
    one, other = (resnet.operators[at].name for at in (30, 50))
    opened = open_page(resnet)
    page = opened.page
    drawn = page.evaluate("performance.getEntriesByType('paint').at(-1).startTime")
    opened.screenshot("resnet50-overview")
    work = Work(page)
    opened.go("graph", one)
    page.locator("#graph-open").click()
    opened.screenshot("resnet50-graph")
    opened.go("operators", one)
    opened.screenshot("resnet50-operators")
    cost = work.of(f"location.hash = '#view=operators&op={quote(other)}'")
    print(f"{size / 1e3:.0f} kB, drawn after {drawn:.0f} ms, another operator {1000 * cost:.0f} ms")
    assert page.locator("#detail-name").inner_text() == other and cost < 0.5


def test_five_thousand_operators_with_all_that_they_have(open_page: Any) -> None:
    """Histograms, weights, advice: nothing that a user does takes the main thread longer than a glance."""
    document = samples.residual_network((150, 300, 350, 190), bins=32)
    assert len(document.operators) > 4900
    opened = open_page(document)
    work = Work(opened.page)
    last = document.operators[-10].name
    costs = {
        "table": work.of("location.hash = '#view=operators'"),
        "scroll": median(
            work.of(f"document.querySelector('.scroller').scrollTop = {10_000 * place}") for place in range(1, 8)
        ),
        "operator": work.of(f"location.hash = '#view=operators&op={last}'"),
        "sort": work.of("document.querySelector('button[data-column=sqnr]').click()"),
        "graph": work.of("location.hash = '#view=graph'"),
        "open all": work.of("document.querySelector('#graph-open').click()"),
        "overview": work.of("location.hash = '#view=overview'"),
    }
    opened.screenshot("five-thousand")
    print({name: f"{1000 * cost:.0f} ms" for name, cost in costs.items()})
    assert max(costs.values()) < 0.5 and costs["scroll"] < 0.2
