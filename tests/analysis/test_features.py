"""`get_raw_features` and `profile_featuremap` beyond the guide's script."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.features import StatisticsStream
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.utils.quant_profiler import get_raw_features, profile_featuremap
from horizon_plugin_pytorch.watch import OperatorCall
from tests.watch.models import ROUTES, data, stages

X = data()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    monkeypatch.chdir(tmp_path)


class Named(nn.Module):
    """Takes tensors by keyword, in lists, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.relu, self.same = nn.Bilinear(2, 2, 2), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.relu(self.bilinear(x, input2=y))
        return torch.cat([self.same(x), y], dim=1)


def rows_of(features: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(feature["shown_name"], feature["attr"]) for feature in features]


def test_names_of_tensors() -> None:
    net = Named()
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    features = get_raw_features(net, (x, y))
    assert rows_of(features) == [
        *[("bilinear", attr) for attr in ("input-0", "input-input2", "output", "weight", "bias")],
        *[(name, attr) for name in ("relu", "same") for attr in ("input", "output")],
        *[("[cat]", attr) for attr in ("input-0-0", "input-0-1", "output")],
    ]
    data = {row: feature["data"] for row, feature in zip(rows_of(features), features, strict=True)}
    torch.testing.assert_close(data["relu", "input"], net.bilinear(x, y))  # as it was before the module wrote to it
    torch.testing.assert_close(data["relu", "output"], net.bilinear(x, y).relu())
    assert torch.equal(data["bilinear", "input-input2"], y)
    assert all(feature["scale"] is None and feature["ch_axis"] == -1 for feature in features)
    assert rows_of(get_raw_features(net, (x, y), skip_identity=True, prefixes=("relu", "same"))) == [
        ("relu", "input"), ("relu", "output")
    ]  # fmt: skip
    named = get_raw_features(net, (x, y), types=(nn.ReLU,), use_class_name=True)
    assert [feature["module_type"] for feature in named] == ["ReLU", "ReLU"]


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_stage(route: str) -> None:
    for stage, model in stages(route):
        before = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        training = [module.training for module in model.modules()]
        features = get_raw_features(model, X)
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if name in before), stage
        assert training == [module.training for module in model.modules()]
        found = dict(zip(rows_of(features), features, strict=True))
        quant, weight = found["quant", "output"], found["stem", "weight"]
        assert found["quant", "input"]["dtype"] == "torch.float32"
        assert ("shared(1)", "output") in found and ("product[mul]" in {n for n, _ in found} or route != "eager")
        if stage == "float":
            assert quant["scale"] is None
        else:
            assert quant["dtype"] == "qint8" and quant["scale"].numel() == 1
            assert weight["dtype"] == "qint8" and weight["ch_axis"] == 0 and weight["scale"].numel() == 4
        if stage == "converted":
            integers = {(f["shown_name"], f["attr"]): f["data"] for f in get_raw_features(model, X, preserve_int=True)}
            assert integers["quant", "output"].dtype == torch.int8 == integers["stem", "weight"].dtype
            torch.testing.assert_close(integers["quant", "output"] * quant["scale"], quant["data"])
        profile_featuremap(features)


def test_numbers_that_are_none(capsys: pytest.CaptureFixture) -> None:
    x = torch.tensor([[1.0, float("nan"), float("inf")]])
    rows = profile_featuremap(get_raw_features(nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), x), file_name="mine.txt")
    out = capsys.readouterr().out
    assert "NaN" in out and out.strip() in Path("mine.txt").read_text()
    assert [(row.name, row.attr, row.nans, row.infs) for row in rows if row.nans or row.infs] == [
        ("0", "input", 1, 1), ("0", "output", 1, 1), ("1", "input", 1, 1), ("1", "output", 1, 0)
    ]  # fmt: skip
    assert Path("mine.html").exists()
    profile_featuremap(get_raw_features(nn.ReLU(), torch.ones(2)))
    assert capsys.readouterr().out == "" and "NaN" not in Path("statistic.txt").read_text()


def test_one_number_has_no_variance() -> None:
    row = profile_featuremap(get_raw_features(nn.ReLU(), torch.ones(1)))[0]
    assert row.min == row.max == row.mean == 1 and row.cells[7] == "nan"


def test_names_are_shown_and_not_run() -> None:
    net = nn.Sequential()
    net.add_module("<script>alert(1)</script>", nn.ReLU())
    profile_featuremap(get_raw_features(net, torch.randn(4)))
    page = Path("statistic.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "http" not in page


def test_scales_of_channels() -> None:
    feature = {
        "module_name": "conv", "attr": "weight", "data": torch.ones(2, 3), "scale": torch.tensor([0.5, 0.25]),
        "ch_axis": 0, "ff_method": None,
    }  # fmt: skip
    assert profile_featuremap([feature])[0].scale == ""
    assert profile_featuremap([feature], print_per_channel_scale=True)[0].scale == "0.5000000, 0.2500000"


def test_the_only_tensor_is_the_input_whatever_is_given_by_keyword() -> None:
    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sum(x, dim=1)

    assert rows_of(get_raw_features(Summed(), torch.ones(2, 2))) == [("[sum]", "input"), ("[sum]", "output")]


def test_bad_input() -> None:
    with pytest.raises(CheckError, match="get_raw_features: the model failed at `0`"):
        get_raw_features(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 3))
    with pytest.raises(TypeError, match="get_raw_features: prefixes is a tuple of names"):
        get_raw_features(nn.ReLU(), torch.ones(1), prefixes="conv")
    with pytest.raises(TypeError, match="takes the list of dictionaries"):
        profile_featuremap({"data": torch.ones(1)})  # type: ignore[arg-type]
    Path("file").write_text("")
    with pytest.raises(CheckError, match="could not write statistic.txt"):
        profile_featuremap([], out_dir="file/folder")


def test_a_stream_holds_what_the_copies_hold(tmp_path: Path) -> None:
    """Inputs that a call overwrites are shown as they were, and no tensor lives for it."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sigmoid()), torch.randn(3, 4)
    rows = profile_featuremap(get_raw_features(net, x), out_dir=tmp_path)
    written = (tmp_path / "statistic.txt").read_text()
    alive: list[weakref.ref] = []
    with StatisticsStream(net, show={"file_name": "streamed"}, out_dir=tmp_path) as stream:

        def tell(call: OperatorCall) -> None:
            stream(call)
            alive.append(weakref.ref(call.outputs[0]))

        WatchedRun(net, x, None, "test").watch(tell)
        assert [ref() for ref in alive] == [None] * 3
    assert (tmp_path / "streamed.txt").read_text() == written
    assert rows[4].attr == "input" and rows[4].min < 0 == rows[5].min


def test_a_tensor_that_is_written_to_between_two_calls() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.relu(x)
            y[0] = 7  # by a function that gives no tensor of its own
            return self.relu(y)

    found = {(f["shown_name"], f["attr"]): f["data"].tolist() for f in get_raw_features(Doubled(), torch.ones(2))}
    assert found["relu", "output"] == [1, 1] and found["relu(1)", "input"] == [7, 1]
