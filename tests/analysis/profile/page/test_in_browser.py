"""The page in a real browser."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.analysis.profile.collect import collect
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, Operator
from horizon_plugin_pytorch.analysis.similarity_function import THRESHOLDS
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.analysis.profile.page import samples

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


def test_advice_is_in_the_order_of_the_document(open_page: Any) -> None:
    """What explains most comes first there, whatever its severity; and thresholds are the tools' own."""
    network = samples.residual_network((1, 2), coarse=("layer2.1.conv2",))
    document = dataclasses.replace(network, advice=network.advice[::-1], threshold=None, similarity_function="KL")
    page = open_page(document).page
    shown = [card.get_attribute("data-rule") for card in page.locator(".advice article").all()]
    assert shown == [advice.rule for advice in document.advice] and len(set(shown)) == 2
    assert f"(KL {THRESHOLDS['KL']:g})" in page.locator(".verdict").inner_text()


def test_the_operator_in_view_has_the_numbers_of_the_document(open_page: Any, network: Document) -> None:
    operator = next(o for o in network.operators if o.name == "layer2.0.conv1")
    opened = open_page(network, "#op=layer2.0.conv1")
    for fact in ("similarity", "sqnr", "same_input_error", "saturation", "scale"):
        assert opened.values(f"#detail [data-fact='{fact}']") == [nine_digits(getattr(operator, fact))], fact
    assert opened.values("#detail [data-fact='grid']") == [nine_digits(end) for end in operator.grid or ()]
    assert opened.values("#detail [data-fact='atol']") == [nine_digits(operator.atol), nine_digits(operator.error)]
    assert operator.reason in opened.page.locator("#detail [data-fact='format']").inner_text()
    assert operator.first is not None and operator.second is not None
    shown = opened.values("#detail .run > div:nth-child(3) tbody")
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


def test_an_operator_is_found_by_the_module_that_advice_and_configurations_name(
    open_page: Any, network: Document
) -> None:
    """A fused operator is shown by its last member, `bn(I)`, and its module is another one."""
    shown = tuple(
        dataclasses.replace(o, name="layer2.1.bn2(I)") if o.name == "layer2.1.conv2" else o for o in network.operators
    )
    opened = open_page(dataclasses.replace(network, operators=shown), "#view=graph&op=layer2.1.conv2")
    opened.page.locator("#detail-name", has_text="layer2.1.bn2(I)").wait_for()
    assert "bn2" in opened.page.url and "view=graph" in opened.page.url
    opened.go("operators")
    opened.page.locator("#search").fill("layer2.1.conv2")
    assert opened.names() == ["layer2.1.bn2(I)"]


def test_a_link_to_what_is_not_there_says_so(open_page: Any, network: Document) -> None:
    opened = open_page(network, "#op=gone")
    assert "gone" in opened.page.locator("#detail").inner_text()


def test_names_are_shown_and_do_not_run(open_page: Any) -> None:
    document = samples.hostile()
    opened = open_page(document)
    page = opened.page
    assert samples.SCRIPT in page.locator("body").inner_text() and page.title().startswith(samples.SCRIPT)
    for view in ("operators", "graph", "weights", "structure"):
        opened.go(view)
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
        opened.go(view)
        assert page.evaluate(count) < 2500
    page.locator("#graph-open").click()
    opened.screenshot("thousands")


def test_an_incomplete_document_says_so(open_page: Any, network: Document) -> None:
    assert open_page(network).page.locator("#incomplete").count() == 0
    opened = open_page(dataclasses.replace(network, is_complete=False, operators=(), weights=(), advice=()))
    assert opened.page.locator("#incomplete").is_visible()
    assert opened.page.locator(".verdict").get_attribute("data-grade") == "unknown"
    for view in ("operators", "graph", "weights", "structure"):
        opened.go(view)


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
        Operator(0, "a", "a", "Conv2d", similarity=1.0, sqnr=math.inf),
        Operator(1, "b", "b", "Conv2d", inputs=(0,), similarity=math.nan, sqnr=math.nan),
        Operator(2, "c", "c", "Conv2d", inputs=(1,), similarity=math.nan, sqnr=math.nan),
    )
    opened = open_page(Document("net", "FvsQ", "float", "qat", operators=operators))
    assert opened.page.locator("h2:has-text('Where the error comes from') ~ div tbody a").all_inner_texts() == ["b"]
    opened.go("operators")
    text = opened.page.locator(".virtual tbody").inner_text()
    assert "NaN" in text and "∞" in text


def wait_for_detail(page: Any, operator: str) -> None:
    """The panel follows the address, which follows a key: a moment later."""
    page.wait_for_function("name => document.getElementById('detail-name')?.textContent === name", arg=operator)


def test_everything_by_keyboard(open_page: Any, network: Document) -> None:
    names = [operator.name for operator in network.operators]
    opened = open_page(network)
    page = opened.page
    name = page.locator("#detail-name")
    opened.press("/")
    page.wait_for_function("() => document.activeElement.id === 'search'")
    page.keyboard.type("layer2.1.")
    opened.press("ArrowDown", "ArrowDown")
    found = [each for each in names if "layer2.1." in each]
    wait_for_detail(page, found[1])
    steps = page.evaluate("history.length")
    opened.press("ArrowDown", "ArrowUp")
    assert page.evaluate("history.length") == steps  # the way back does not lead through every row
    opened.press("Escape")
    page.wait_for_selector("#detail", state="hidden")
    opened.press("End", "]")
    wait_for_detail(page, found[-1])  # there is nothing after the last one
    opened.press("[")
    wait_for_detail(page, found[-2])
    opened.press("1")
    curve = page.locator(".curve svg[role='slider']")
    curve.focus()
    opened.press("Home", "ArrowRight", "ArrowRight")
    assert names[2] in (curve.get_attribute("aria-valuetext") or "")
    opened.press("Enter")
    wait_for_detail(page, names[2])
    opened.press("?")
    assert page.locator("dialog").is_visible()
    opened.press("Escape")
    assert not page.locator("dialog").is_visible() and name.is_visible()


def test_the_graph_by_keyboard_and_by_pointer(open_page: Any, network: Document) -> None:
    operator = next(o for o in network.operators if o.name == "layer2.1.conv2")
    opened = open_page(network, "#view=graph&op=layer2.1.conv2")
    page = opened.page
    canvas = page.locator("canvas")
    page.wait_for_timeout(100)  # a frame is drawn
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # a link leads to the middle
    tip = page.locator("#graph-tip").inner_text().splitlines()
    assert tip[0] == operator.name
    assert f"Cosine: {operator.similarity:.6f}" in tip and f"SQNR: {operator.sqnr:.2f} dB" in tip
    canvas.focus()
    opened.press("ArrowDown")
    status = page.locator("#graph-status")
    assert (status.text_content() or "").startswith("layer2.1.conv3")
    opened.press("Enter")
    wait_for_detail(page, "layer2.1.conv3")
    page.locator("#graph-close").click()
    canvas.focus()
    opened.press("ArrowDown")  # nothing is marked that can be seen: the first one is
    assert (status.text_content() or "").startswith("quant")
    for _ in range(3):
        opened.press("ArrowDown")
    assert (status.text_content() or "").startswith("layer1")
    opened.press("Enter")
    assert "Click to close" in (status.text_content() or "")
    opened.press("+", "-", "0")
    page.locator("#graph-colours").select_option("format")
    assert "int8" in page.locator(".toolbar .legend").inner_text()
    opened.screenshot("graph")


@pytest.mark.parametrize(("locale", "shown", "other"), [("en-US", "Overview", "中文"), ("zh-CN", "总览", "English")])
def test_the_language_is_that_of_the_browser_and_can_be_switched(
    open_page: Any, network: Document, locale: str, shown: str, other: str
) -> None:
    opened = open_page(network, locale=locale)
    page = opened.page
    first = page.locator("nav a").first
    assert first.inner_text() == shown and page.locator("html").get_attribute("lang") == locale.replace("-US", "")
    assert page.locator("#language").inner_text() == other
    page.locator("#language").click()
    assert first.inner_text() != shown and page.locator("html").get_attribute("lang") != locale.replace("-US", "")
    page.reload()
    assert first.inner_text() != shown


def test_the_rules_speak_both_languages(open_page: Any) -> None:
    network = samples.residual_network((1, 2), coarse=("layer2.1.conv2",))
    card = open_page(network, locale="zh-CN").page.locator("article[data-rule='range-exceeds-calibration']").first
    assert "数值超出校准范围" in card.inner_text() and "9.8" in card.inner_text()


def test_names_in_advice_are_code_and_chinese_has_its_own_commas(open_page: Any) -> None:
    network = samples.residual_network((1, 2))
    arguments = (("count", "1"), ("total", "4"), ("module", "a,b"))
    advice = Advice("never-calibrated", "error", "conv", (), "", "", arguments=arguments)
    card = open_page(dataclasses.replace(network, advice=(advice,)), locale="zh-CN").page.locator("article .evidence")
    assert card.inner_text() == "4 个伪量化节点中有 1 个从未见过数据\uff0c例如 a,b\uff1a其 scale 仍是初始值 1。"
    assert card.locator("code").inner_text() == "a,b"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_switched(open_page: Any, network: Document, scheme: str) -> None:
    page = open_page(network, scheme=scheme).page
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
    )
    before = page.evaluate(brightness)
    assert (before > 600) == (scheme == "light")
    page.locator("#theme").click()
    assert (page.evaluate(brightness) > 600) != (scheme == "light")


@pytest.mark.parametrize(("scheme", "runs"), [("light", 1), ("dark", 2)])
def test_nothing_stands_in_the_way_of_assistive_technology(open_page: Any, scheme: str, runs: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    # Few rows: each colour of each text is measured.
    documents = [samples.residual_network((1,), seed=seed) for seed in range(runs)]
    opened = open_page(documents, scheme=scheme, width=1200, height=500)
    found = []
    for view in ("overview", "operators", "graph", "weights", "structure"):
        opened.go(view, "layer1.0.conv2")
        answer = Axe().run(opened.page).response
        assert len(answer["passes"]) > 10
        found += [(view, v["id"], node["html"][:200]) for v in answer["violations"] for node in v["nodes"]]
    assert found == []


def test_a_narrow_window_shows_the_operator_alone(open_page: Any, network: Document) -> None:
    opened = open_page(network, "#op=fc", width=420)
    page = opened.page
    assert page.locator("#detail").is_visible() and not page.locator("main").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.screenshot("narrow")
    page.locator("#close-detail").click()
    page.locator("main").wait_for()  # the address is followed a moment later
    assert page.locator("main").is_visible()


def test_outputs_that_look_alike_are_not_enough(open_page: Any) -> None:
    operators = (
        Operator(0, "fc", "fc", "Linear", similarity=0.6, sqnr=2.0),
        Operator(1, "sigmoid", "sigmoid", "Sigmoid", inputs=(0,), similarity=0.9999, sqnr=40.0),
    )
    page = open_page(Document("net", "FvsQ", "float", "qat", operators=operators)).page
    assert page.locator(".verdict").get_attribute("data-grade") == "watch"


def test_runs_of_other_inputs_are_not_comparable(open_page: Any, network: Document) -> None:
    one, other = (dataclasses.replace(network, inputs=digest) for digest in ("1", "2"))
    assert open_page([one, other]).page.locator("#other-inputs").is_visible()
    assert open_page([one, one]).page.locator("#other-inputs").count() == 0


def test_the_task_decides_what_is_acceptable(open_page: Any) -> None:
    network = dataclasses.replace(samples.residual_network((1, 1), coarse=()), advice=())
    page = open_page(network).page
    grade = page.locator(".verdict")
    assert grade.get_attribute("data-grade") == "good"
    page.locator("#task").select_option("super-resolution")
    assert grade.get_attribute("data-grade") == "bad"
    page = open_page(dataclasses.replace(network, task="super-resolution")).page
    assert page.locator(".verdict").get_attribute("data-grade") == "bad"


def test_a_real_run(open_page: Any) -> None:
    net = QuantWrapper(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))).eval()
    x = torch.randn(2, 3, 8, 8)
    qat = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()}).eval()
    qat(x)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    document = collect(net, qat, [x, x])
    opened = open_page(document, "#view=operators")
    assert opened.names() == [operator.name for operator in document.operators]
    for operator in document.operators:
        opened.go("graph", operator.name)
        for fact in ("similarity", "sqnr", "scale", "saturation"):
            shown, value = opened.values(f"#detail [data-fact='{fact}']"), getattr(operator, fact)
            assert shown == ([] if value is None else [nine_digits(value)]), (operator.name, fact)
    opened.screenshot("real")
