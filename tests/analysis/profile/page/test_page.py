"""The page without a browser: its size, its texts, what it is made of, and the layout of the graph."""

from __future__ import annotations

import base64
import gzip
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from horizon_plugin_pytorch.analysis.profile import page as page_module
from horizon_plugin_pytorch.analysis.profile.document import Document, Operator
from horizon_plugin_pytorch.analysis.profile.layout import Box, layout_of
from horizon_plugin_pytorch.analysis.profile.page import LANGUAGES, page_of
from tests.analysis.profile.page import samples

ASSETS = Path(page_module.__file__).with_name("assets")
SCRIPTS = sorted(ASSETS.glob("*.js"))


def data_of(page: str) -> dict:
    packed = re.search(r'id="data">([^<]*)<', page)
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


@pytest.mark.slow
def test_size() -> None:
    # As many operators as ResNet50 has before it is fused, with more weights.
    network = samples.residual_network((6, 8, 12, 6))
    assert len(network.operators) >= 170
    assert len(page_of([network])) < 1_000_000


def test_many_operators_have_fewer_bins_with_all_their_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    network = samples.residual_network((1, 1))
    monkeypatch.setattr(page_module, "_ALL_BINS", 3000)
    found = data_of(page_of([network]))["documents"][0]["operators"]
    for operator, shown in zip(network.operators, found, strict=True):
        assert operator.first and operator.first.histogram
        assert len(shown["first"]["histogram"]["counts"]) == 64
        assert sum(shown["first"]["histogram"]["counts"]) == sum(operator.first.histogram.counts)
        assert shown["first"]["histogram"]["high"] == pytest.approx(operator.first.histogram.high)


def test_runs_of_one_model_share_a_layout() -> None:
    one, same, other = (
        samples.residual_network((1,)),
        samples.residual_network((1,), seed=2),
        samples.residual_network((2,)),
    )
    data = data_of(page_of([one, same, other]))
    assert data["layout_of"] == [0, 0, 1] and len(data["layouts"]) == 2


def test_advice_speaks_all_languages_as_far_as_its_numbers_are_known() -> None:
    network = samples.residual_network((1,), coarse=("layer1.0.conv1",))
    full, bare = data_of(page_of([network]))["documents"][0]["advice"]
    assert "9.8" in full["said"]["zh"]["evidence"] and full["said"]["zh"]["title"] == "数值超出校准范围"
    assert bare["said"]["zh"]["title"] == "模型输出可以使用高精度"
    assert bare["said"]["zh"]["evidence"] == network.advice[1].evidence  # without its numbers: as it was written


def test_no_document() -> None:
    with pytest.raises(ValueError, match="at least one"):
        page_of([])


def test_nothing_is_left_open_or_fetched() -> None:
    page = page_of([Document("{{data}} {{gone}}", "", "", "")])
    assert "default-src 'none'" in page and "{{script" not in page
    assert re.findall(r"https?://[^\s\"'`]+", page.replace("http://www.w3.org/2000/svg", "")) == []


def test_scripts_never_parse_text_as_html() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )


def test_all_that_the_page_is_made_of_is_in_the_package() -> None:
    settings = tomllib.loads((ASSETS.parents[3] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["horizon_plugin_pytorch.analysis.profile"]
    left_out = [file.name for file in ASSETS.iterdir() if not any(fnmatch(f"assets/{file.name}", p) for p in patterns)]
    assert left_out == ["known.d.ts"]  # for editors only


def texts(language: str) -> dict[str, str]:
    return json.loads((ASSETS / f"texts.{language}.json").read_text())


def test_languages_have_the_same_texts() -> None:
    english, chinese = (texts(language) for language in LANGUAGES)
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key


def test_texts_are_those_that_scripts_ask_for() -> None:
    code = "\n".join(script.read_text() for script in SCRIPTS)
    known = set(texts("en"))
    assert set(re.findall(r'\bt\("([\w-]+)"', code)) <= known
    families = ("verdict-", "outputs-", "severity-", "key-", "task-")
    unused = {key for key in known if f'"{key}"' not in code and not key.startswith(families)}
    assert unused == set()


def rows_of(box: Box) -> dict[str, int]:
    return {f"{member.kind}{member.target}": member.row for member in box.members if member.kind != "bend"}


def test_layout_of_a_residual_block() -> None:
    boxes = layout_of(samples.residual_network((2,)).operators)
    assert [box.path for box in boxes] == ["", "layer1", "layer1.0", "layer1.1"]
    block = boxes[3]
    rows = [member.row for member in block.members if member.kind in ("in", "operator", "out")]
    assert sorted(rows) == list(range(7))  # in, three convolutions, add, relu, out
    skip = max(block.routes, key=len)
    assert [block.members[at].kind for at in skip] == ["in", "bend", "bend", "bend", "operator"]
    places = [(member.row, member.place) for member in block.members]
    assert len(set(places)) == len(places)


def test_layout_of_modules_that_take_turns() -> None:
    # a.0 -> b -> a.1 -> b.1: each module gives to the other, so one of the two connections runs upwards.
    operators = [
        Operator(0, "a.x", "a.x", "Conv2d"),
        Operator(1, "b.x", "b.x", "Conv2d", inputs=(0,)),
        Operator(2, "a.y", "a.y", "Conv2d", inputs=(1,)),
        Operator(3, "b.y", "b.y", "Conv2d", inputs=(2, 0)),
    ]
    model = layout_of(operators)[0]
    assert rows_of(model) == {"box1": 0, "box2": 1}
    assert sorted(model.routes) == [(0, 1), (1, 0)]


def test_layout_of_boxes_of_one() -> None:
    operators = [
        Operator(0, "model.body.add[add]", "model.body.add", "add"),
        Operator(1, "model.body.conv", "model.body.conv", "Conv2d", inputs=(0,)),
        Operator(2, "model.body.conv(1)", "model.body.conv", "Conv2d", inputs=(1,)),
    ]
    boxes = layout_of(operators)
    assert [(box.path, box.label) for box in boxes] == [("", ""), ("model.body", "model.body")]
    assert rows_of(boxes[1]) == {"operator0": 0, "operator1": 1, "operator2": 2}


@pytest.mark.parametrize("inputs", [(), (7,), (0,)])
def test_layout_with_inputs_that_are_not_there(inputs: tuple[int, ...]) -> None:
    (model,) = layout_of([Operator(0, "a", "a", "ReLU", inputs=inputs)])
    assert [member.kind for member in model.members] == ["operator"] and model.routes == ()


@pytest.mark.slow
def test_a_flat_model_with_long_connections_stays_small() -> None:
    operators = [Operator(at, f"op{at}", f"op{at}", "add", inputs=(at - 1, 0) if at else ()) for at in range(2000)]
    (model,) = layout_of(operators)
    assert len(model.members) < 20_000
    assert layout_of([]) == (Box("", "", (), ()),)
