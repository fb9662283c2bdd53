"""The page in a real browser."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator

from . import samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network() -> Document:
    return samples.residual_network((1, 2))


def nine_digits(value: float | None) -> float:
    assert value is not None
    return float(f"{value:.9g}")


def test_overview_says_what_is_wrong_and_what_to_try(open_page: Any) -> None:
    network = samples.residual_network((1, 2), coarse=("layer2.1.conv2",))
    opened = open_page(samples.with_metric(network, 76.13, 70.02))
    page = opened.page
    assert page.locator(".verdict").get_attribute("data-grade") == "bad"
    assert opened.values(".verdict .metric")[:2] == [76.13, 70.02]
    card = page.locator("article[data-rule='range-exceeds-calibration']").first
    assert "9.8" in card.inner_text() and "int16" in card.locator("pre").inner_text()
    worst = page.locator("h2:has-text('Where the error comes from') ~ div tbody tr").first
    assert worst.locator("a").inner_text() == "layer2.1.conv2"
    opened.screenshot("overview")
    card.locator("a").first.click()
    assert page.locator("#detail-name").inner_text() == "layer2.1.conv2"


def test_the_operator_in_view_has_the_numbers_of_the_document(open_page: Any, network: Document) -> None:
    operator = next(o for o in network.operators if o.name == "layer2.0.conv1")
    opened = open_page(network, "#op=layer2.0.conv1")
    for fact in ("similarity", "sqnr", "same_input_error", "saturation", "scale"):
        assert opened.values(f"#detail [data-fact='{fact}']") == [nine_digits(getattr(operator, fact))], fact
    assert opened.values("#detail [data-fact='grid']") == [nine_digits(end) for end in operator.grid or ()]
    assert opened.values("#detail [data-fact='atol']") == [nine_digits(operator.atol), nine_digits(operator.error)]
    assert operator.reason in opened.page.locator("#detail [data-fact='format']").inner_text()
    assert operator.first is not None and operator.second is not None
    shown = opened.values("#detail table:nth-of-type(1) tbody")
    kinds = ("low", "high", "mean", "var")
    assert shown == [nine_digits(getattr(v, kind)) for kind in kinds for v in (operator.first, operator.second)]
    assert "layer2.0.conv1.weight" in opened.page.locator("#detail").inner_text()
    opened.screenshot("operator")


def test_search_sort_and_filter(open_page: Any, network: Document) -> None:
    opened = open_page(network, "#view=operators")
    page = opened.page
    assert opened.names() == [operator.name for operator in network.operators][: len(opened.names())]
    page.locator("#search").fill("LAYER2 .conv2")
    assert opened.names() == [o.name for o in network.operators if "layer2" in o.name and ".conv2" in o.name]
    page.locator("#search").fill("no such thing")
    assert opened.names() == [] and page.locator(".scroller .empty").is_visible()
    page.locator("#search").fill("")
    page.locator("button[data-column='similarity']").click()
    by_similarity = sorted(network.operators, key=lambda o: o.similarity or 0)
    assert opened.names()[:3] == [operator.name for operator in by_similarity[:3]]
    page.locator("button[data-column='similarity']").click()
    assert opened.names()[0] == by_similarity[-1].name
    assert page.locator("th[aria-sort='descending']").count() == 1
    page.locator("#filter-format").select_option("torch.float32")
    assert opened.names() == ["dequant"]


@pytest.mark.parametrize("address", ["#op=layer2.1%5Badd%5D", "#view=graph&op=layer2.1%5Badd%5D"])
def test_a_link_leads_to_an_operator(open_page: Any, network: Document, address: str) -> None:
    opened = open_page(network, address)
    assert opened.page.locator("#detail-name").inner_text() == "layer2.1[add]"


def test_a_link_to_what_is_not_there_says_so(open_page: Any, network: Document) -> None:
    opened = open_page(network, "#op=gone")
    assert "gone" in opened.page.locator("#detail").inner_text()


def test_names_are_shown_and_do_not_run(open_page: Any) -> None:
    document = samples.hostile()
    opened = open_page(document)
    page = opened.page
    assert samples.SCRIPT in page.locator("body").inner_text() and page.title().startswith(samples.SCRIPT)
    for view in ("operators", "graph", "weights", "structure"):
        page.locator(f"nav a[href*='view={view}'], nav a[href^='#op']").first.click()
        page.goto(page.url.split("#")[0] + f"#view={view}")
        page.wait_for_timeout(50)
    for operator in document.operators:
        page.evaluate("name => { location.hash = '#op=' + encodeURIComponent(name) }", operator.name)
        page.wait_for_function(
            "name => document.getElementById('detail-name')?.textContent === name", arg=operator.name
        )
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    opened.screenshot("hostile")


def test_thousands_of_operators_make_few_elements(open_page: Any) -> None:
    names = [f"block{at // 100}.stage{at // 10 % 10}.conv{at % 10}" for at in range(5000)]
    operators = tuple(
        Operator(at, name, name, "Conv2d", inputs=(at - 1,) if at else (), format="qint8",
                 similarity=1 - at / 1e6, sqnr=60 - at / 200)
        for at, name in enumerate(names)
    )  # fmt: skip
    opened = open_page(Document("large", "FvsQ", "float", "qat", operators=operators), "#view=operators")
    page = opened.page
    count = "document.querySelectorAll('*').length"
    assert page.evaluate(count) < 2500
    page.locator(".scroller").evaluate("element => { element.scrollTop = element.scrollHeight }")
    page.wait_for_selector("tr[data-key='block49.stage9.conv9']")
    assert page.evaluate(count) < 2500
    page.locator(".scroller").focus()
    opened.press("End")
    assert page.locator("#detail-name").inner_text() == "block49.stage9.conv9"
    for view in ("overview", "graph"):
        page.evaluate("view => { location.hash = '#view=' + view }", view)
        page.wait_for_selector(f"nav a[aria-current][href*='{view if view != 'overview' else '#'}']")
        assert page.evaluate(count) < 2500
    page.locator("#graph-open").click()
    opened.screenshot("thousands")


def test_an_incomplete_document_says_so(open_page: Any, network: Document) -> None:
    assert open_page(network).page.locator("#incomplete").count() == 0
    opened = open_page(dataclasses.replace(network, is_complete=False, operators=(), weights=(), advice=()))
    assert opened.page.locator("#incomplete").is_visible()
    assert opened.page.locator(".verdict").get_attribute("data-grade") == "unknown"
    for view in ("operators", "graph", "weights", "structure"):
        opened.page.evaluate("view => { location.hash = '#view=' + view }", view)
        opened.page.wait_for_timeout(30)


def test_runs_side_by_side_have_the_same_operator_in_view(open_page: Any, network: Document) -> None:
    other = dataclasses.replace(samples.residual_network((1, 2), seed=3, coarse=("layer1.0.conv1",)), title="other")
    opened = open_page([network, other], "#op=layer1.0.conv1")
    runs = opened.page.locator("#detail section.run")
    assert runs.count() == 2
    for at, document in enumerate((network, other)):
        operator = next(o for o in document.operators if o.name == "layer1.0.conv1")
        assert opened.values(f"#detail section[data-run='{at}'] [data-fact='sqnr']") == [nine_digits(operator.sqnr)]
    opened.page.locator("button[data-column='change']").click()
    a, b = ({o.name: o.sqnr or 0 for o in d.operators} for d in (network, other))
    assert opened.names()[0] == min(a, key=lambda name: b[name] - a[name])
    opened.screenshot("runs")


def test_values_that_are_not_finite_are_named(open_page: Any) -> None:
    operators = (
        Operator(0, "a", "a", "Conv2d", similarity=math.nan, sqnr=-math.inf),
        Operator(1, "b", "b", "Conv2d", inputs=(0,), similarity=1.0, sqnr=math.inf),
    )
    opened = open_page(Document("net", "FvsQ", "float", "qat", operators=operators), "#view=operators")
    text = opened.page.locator(".virtual tbody").inner_text()
    assert "NaN" in text and "∞" in text
