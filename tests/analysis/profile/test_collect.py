"""The document of two models: what each operator does in both, streamed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.profile.advice import rules
from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence
from horizon_plugin_pytorch.analysis.profile.collect import Collector, collect
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, read_document
from horizon_plugin_pytorch.analysis.profile.running_values import RunningHistogram, RunningValues
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantWrapper, set_fake_quantize
from horizon_plugin_pytorch.utils.quant_profiler import featuremap_similarity
from tests.routes import calibrate, prepared, prepared_on
from tests.watch.models import data, stages


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    set_march(March.NASH_E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(stages("jit-strip"))


@pytest.mark.parametrize(("first", "second"), [("float", "qat"), ("calibration", "qat"), ("qat", "converted")])
def test_rows_of_the_tool(models: dict[str, nn.Module], first: str, second: str, tmp_path: str) -> None:
    """The document has the numbers that `featuremap_similarity` gives; it comes back from JSON as it is."""
    pair = models[first], models[second]
    rows = featuremap_similarity(*pair, data(), out_dir=tmp_path)
    found = collect(*pair, [data()])
    assert found.is_complete and found.batches == 1
    given = [[o.index, o.name, o.similarity, o.atol, o.error, o.same_input_error] for o in found.operators]
    assert given == [[row[0], row[1], row[3], row[5], row[6], row[7]] for row in rows]
    assert read_document(found.to_json()) == found
    last = found.operators[-1]
    assert last.inputs and all(source < o.index for o in found.operators for source in o.inputs)
    assert {o.path for o in found.operators if not o.inputs} == {"quant"}
    assert found.weights and all(w.operator is not None for w in found.weights)
    assert found.called and found.march == "nash-e"
    conv = next(o for o in found.operators if o.path == "stem")
    assert conv.format == "qint8" and conv.scale and conv.grid == (-128 * conv.scale, 127 * conv.scale)
    assert "int8" in conv.reason and conv.line.startswith("models.py:")
    assert sum(conv.second.histogram.counts) == math.prod(conv.shape)  # type: ignore[union-attr]


def test_batches_count_together(models: dict[str, nn.Module]) -> None:
    """Two batches give what one batch of both gives."""
    pair = models["float"], models["validation"]
    batches = [data(1), data(2) * 3]
    one, both = collect(*pair, [torch.cat(batches)]), collect(*pair, iter(batches))
    assert both.batches == 2 and len(both.operators) == len(one.operators) and one.inputs != both.inputs
    for x, y in zip(one.operators, both.operators, strict=True):
        assert x.similarity == pytest.approx(y.similarity) and x.sqnr == pytest.approx(y.sqnr, abs=1e-3)
        assert x.atol == pytest.approx(y.atol) and x.saturation == y.saturation and x.at_end == y.at_end
        assert x.first is not None and y.first is not None and x.first.mean == pytest.approx(y.first.mean, abs=1e-5)
        assert (x.first.low, x.first.high) == (y.first.low, y.first.high) and len(y.first.ranges) == 2
        assert x.first.var == pytest.approx(y.first.var, rel=1e-4)


def test_saturation() -> None:
    """The share of values that the grid does not reach."""
    x = torch.linspace(-2, 2, 101).reshape(1, 101)
    net = QuantWrapper(nn.ReLU())
    qat = prepared(net, (x / 2,))
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    stub = collect(net, qat, [x]).operators[0]
    assert stub.name == "quant" and stub.grid is not None
    beyond = float(((x > stub.grid[1] + 0.5 * stub.scale) | (x < stub.grid[0] - 0.5 * stub.scale)).float().mean())  # type: ignore[operator]
    assert stub.saturation == pytest.approx(beyond) and 0.4 < beyond < 0.6
    assert stub.saturation <= stub.at_end  # type: ignore[operator]


def test_an_interrupt_leaves_a_document(models: dict[str, nn.Module]) -> None:
    """What was compared until then is written, and says that it is not all."""
    written: list[Document] = []

    def interrupted() -> Iterator[Tensor]:
        yield data()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(models["float"], models["qat"], interrupted(), write=written.append)
    assert not written[-1].is_complete and written[-1].batches == 1 and len(written[-1].operators) > 5
    assert read_document(written[-1].to_json()) == written[-1]


def test_no_batch(models: dict[str, nn.Module]) -> None:
    with pytest.raises(CheckError, match="there is no batch"):
        collect(models["float"], models["qat"], [])


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) if x.abs().max() > 1 else self.small(x)


def test_a_batch_that_takes_another_branch() -> None:
    """The error speaks of batches, and of what to do with them; what was found before is written."""
    written: list[Document] = []
    net, x = _Branch(), torch.ones(2, 4)
    with pytest.raises(CheckError, match=r"was `small` .* is `large` now.*leave this batch out") as error:
        collect(net, copy.deepcopy(net), [x, 2 * x], write=written.append)
    assert "pair" not in str(error.value).replace("paired", "") and written[-1].batches == 1


def test_a_task_that_nobody_knows(models: dict[str, nn.Module]) -> None:
    """Before anything runs."""
    with pytest.raises(QuantizationConfigError, match="no task 'cooking'; there are classification"):
        collect(models["float"], models["qat"], [data()], task="cooking", write=pytest.fail)


def test_a_rule_that_fails(models: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and the other rules speak."""

    def broken(evidence: Evidence) -> list[Advice]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(rules, "RULES", (broken, *rules.RULES))
    with pytest.warns(QuantizationWarning, match="the rule `broken` failed.*ZeroDivisionError: by zero"):
        found = collect(models["float"], models["calibration"], [data()])
    assert "`broken`" in found.notes[-1]
    assert "left-in-calibration" in {advice.rule for advice in found.advice}


def test_bins_that_grow() -> None:
    """No number is lost when bins become wider, to either side; a grid falls into bins evenly."""
    torch.manual_seed(0)
    parts = [torch.randn(1000) * size + at for size, at in ((1, 0), (30, 5), (0.1, -400), (1e3, 0))]
    counts = RunningHistogram(16)
    for part in parts:
        counts.update(part, float(part.min()), float(part.max()), None)
    found = counts.result()
    assert found is not None and sum(found.counts) == 4000
    everything = torch.cat(parts)
    assert found.low <= everything.min() and found.high >= everything.max()
    edges = torch.linspace(found.low, found.high, 17)
    wanted = torch.histogram(everything, edges).hist
    assert torch.allclose(wanted, torch.tensor(found.counts).float(), atol=2)
    grid = RunningHistogram(16)
    grid.update(torch.arange(-128, 128) * 0.1, -12.8, 12.7, 0.1)
    assert grid.result().counts == (16,) * 16  # type: ignore[union-attr]


def test_large_counts() -> None:
    """More equal numbers than float32 can count one by one."""
    counts = RunningHistogram(2)
    counts.update(torch.zeros(1 << 25), 0.0, 0.0, None)
    assert sum(counts.result().counts) == 1 << 25  # type: ignore[union-attr]


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.full((2, 2), math.nan), torch.tensor([[True, False]])])
def test_odd_tensors(x: Tensor) -> None:
    seen = RunningValues(8)
    seen.update(x)
    found = seen.values()
    assert found.nan == (4 if x.is_floating_point() and x.numel() else 0)
    assert (found.low is None) == (x.dtype != torch.bool)


def test_rows_follow(models: dict[str, nn.Module]) -> None:
    """The rows of the similarity are those of the document."""
    collector = Collector(models["float"], models["qat"], [data()], SimilarityFunction("MSE", "test"), None, "test")
    collector.run()
    assert [row.index for row in collector.rows] == [o.index for o in collector.document.operators]
    assert collector.document.similarity_function == "MSE"


def test_a_quantized_model_of_another_checkpoint(models: dict[str, nn.Module]) -> None:
    """Weights that differ by more than rounding are told; those of one model are not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "model_profiler")
        assert not collect(models["qat"], models["converted"], [data()], mode="QvsQ").notes
    other = copy.deepcopy(models["qat"])
    with torch.no_grad():
        other.fc.weight.mul_(1.1)
    with pytest.warns(QuantizationWarning, match=r"fc\.weight differ by more than rounding"):
        found = collect(other, models["converted"], [data()], mode="QvsQ")
    assert "fc.weight" in found.notes[-1]


class _Drifting(nn.Module):
    """Gets other numbers each time that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = QuantWrapper(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + next(_COUNT))


_COUNT = itertools.count()


def test_models_that_see_other_numbers() -> None:
    x = torch.linspace(0, 10, 8)
    net = _Drifting()
    qat = calibrate(prepared_on("JIT", net, (x,)), (x,))
    with pytest.warns(QuantizationWarning, match=r"`?net\.quant`? got other numbers in the two models"):
        collect(net, qat, [x])


class _Levels(nn.Module):
    """Returns what another layer takes, too, and computes something that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.unused = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.fine(x)
        self.unused(fine)
        return {"fine": fine, "coarse": self.coarse(fine).flatten(1)}


def test_outputs_are_what_the_model_returns() -> None:
    net, x = _Levels().eval(), torch.randn(1, 3, 4, 4)
    found = collect(net, copy.deepcopy(net), [x])
    assert [operator.name for operator in found.outputs] == ["fine", "[reshape]"]
    assert [operator.name for operator in dataclasses.replace(found, returned=()).outputs] == ["unused", "[reshape]"]
