"""Bags of embeddings in float files: sums and means of runs of rows, empty runs among them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx
from tests.routes import run_onnx

INDICES, OFFSETS = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 5])


@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode: str, has_last: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.EmbeddingBag(10, 3, mode=mode, include_last_offset=has_last).eval()
    offsets = torch.cat([OFFSETS, torch.tensor([8])]) if has_last else OFFSETS
    export_to_onnx(net, (INDICES, offsets), str(tmp_path / "bags.onnx"))
    (found,) = run_onnx(onnx.load(tmp_path / "bags.onnx"), [INDICES, offsets])
    torch.testing.assert_close(found, net(INDICES, offsets))


def test_a_bag_of_largest_rows_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"mode='sum' and 'mean'.*leave pre- and post-processing out"):
        export_to_onnx(nn.EmbeddingBag(10, 3, mode="max").eval(), (INDICES, OFFSETS), str(tmp_path / "bags.onnx"))
