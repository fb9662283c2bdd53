"""How many values `nonzero` and `rle` give depends on numbers: files hold for any count, or are refused."""

from __future__ import annotations

import io
from collections.abc import Callable

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.nn import MultiScaleRoIAlign
from horizon_plugin_pytorch.nn.functional import rle
from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx


class Positions(nn.Module):
    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after((x > 0).nonzero(), x)


ANY_COUNT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "themselves": lambda i, x: i,
    "mean": lambda i, x: i.float().mean(0),
    "last": lambda i, x: i[-2:].flip(0),
    "more": lambda i, x: torch.cat([i, i + 1]) ** 2,
    "one column": lambda i, x: i[:, 1].cumsum(0),
}
ONE_COUNT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided": lambda i, x: i.float().sum(0) / i.shape[0],
    "only counted": lambda i, x: x.sum() / i.numel(),
    "like": lambda i, x: torch.zeros_like(i),
    "variance": lambda i, x: i.float().var(0),
    "reshaped": lambda i, x: i.reshape(-1),
    "numbered": lambda i, x: i[:, 0] + torch.arange(i.shape[0]),
}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 5, generator=generator) + offset for offset in (0.0, 0.7, -0.2)]


@pytest.mark.parametrize("after", ANY_COUNT)
def test_a_file_holds_for_any_count(after: str) -> None:
    model, given = Positions(ANY_COUNT[after]), batches()
    assert len({len((x > 0).nonzero()) for x in given}) == 3
    file = export_to_onnx(model, given[0], io.BytesIO(), input_names=["x"], opset_version=13)
    session = ort.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    for x in given:
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model(x))


@pytest.mark.parametrize("after", ONE_COUNT)
def test_a_count_of_the_example_is_refused_with_its_line(after: str) -> None:
    line = "" if after == "like" else r"test_open_sizes.py:\d+.*"  # a constant has none
    with pytest.raises(ExportError, match=line + "how many values there are depends on the numbers"):
        export_to_onnx(Positions(ONE_COUNT[after]), batches()[0], io.BytesIO(), opset_version=13)


def test_runs_of_equal_numbers() -> None:
    class Runs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rle((x > 0).long()[None])[0].tile(1, 2)

    with pytest.raises(ExportError, match="how many values there are"):
        export_to_onnx(Runs(), batches()[0], io.BytesIO(), opset_version=13)


def test_a_model_that_knows_the_count_is_warned_of() -> None:
    """Those that are positive and those that are not are all of them, which the model's code may rely on."""

    def both(i: Tensor, x: Tensor) -> Tensor:
        return torch.cat([i[:, 0], (x <= 0).nonzero()[:, 0]]).float() + x.flatten()

    with pytest.warns(QuantizationWarning, match="does not run with another count"):
        export_to_onnx(Positions(both), batches()[0], io.BytesIO(), opset_version=13)


class Rois(nn.Module):
    """Boxes [K, 5], or of two images each, on maps of two strides."""

    def __init__(self, is_listed: bool) -> None:
        super().__init__()
        self.align, self.is_listed = MultiScaleRoIAlign(2, [4, 8], 2), is_listed

    def forward(self, fine: Tensor, coarse: Tensor, boxes: Tensor) -> Tensor:
        given = [boxes[:2, 1:], boxes[2:, 1:]] if self.is_listed else boxes
        return self.align([fine, coarse], given)


@pytest.mark.parametrize("is_listed", [True, False])
def test_boxes_may_be_of_other_images_and_levels_than_those_of_the_example(is_listed: bool) -> None:
    torch.manual_seed(0)
    maps = [torch.randn(2, 3, 32, 32), torch.randn(2, 3, 16, 16)]
    small, large = [4.0, 8.0, 24.0, 30.0], [0.0, 0.0, 124.0, 126.0]
    boxes = torch.tensor([[0, *small], [0, *large], [1, *small], [1, *small]])
    other = torch.tensor([[1, *large], [1, *small], [0, *large], [0, *large]])
    net = Rois(is_listed).eval()
    file = io.BytesIO()
    export_to_onnx(net, (*maps, boxes), file)
    session = ort.InferenceSession(file.getvalue())
    for given in (boxes, other):
        feed = dict(zip((x.name for x in session.get_inputs()), (x.numpy() for x in (*maps, given)), strict=True))
        torch.testing.assert_close(torch.from_numpy(session.run(None, feed)[0]), net(*maps, given))
