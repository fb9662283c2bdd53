"""`show_cuda_memory_consumption`: what it measures on CPU, where allocations are known to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horizon_plugin_pytorch.analysis.memory import MemoryRow
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, convert_fx
from horizon_plugin_pytorch.utils.quant_profiler import show_cuda_memory_consumption
from tests.models import AddBlock
from tests.routes import calibrate, prepared_on

CPU = torch.device("cpu")
X = torch.ones(2, 3, 6, 6)


class Taking(nn.Module):
    """Gives `given` bytes and needs `scratch` more for a moment."""

    def __init__(self, given: int, scratch: int) -> None:
        super().__init__()
        self.given, self.scratch = given, scratch

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(self.scratch, dtype=torch.uint8)
        return torch.empty(self.given, dtype=torch.uint8)


class Scaling(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.block, self.norm, self.head = AddBlock(), nn.BatchNorm2d(3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.head(self.block(self.norm(x), x) * x))


def measured(model: nn.Module, inputs: Any, folder: Path, **kwargs: Any) -> list[MemoryRow]:
    return show_cuda_memory_consumption(model, inputs, CPU, out_dir=folder, **kwargs)


def row_of(rows: list[MemoryRow], name: str, phase: str = "forward") -> MemoryRow:
    (found,) = [row for row in rows if (row.name, row.phase) == (name, phase)]
    return found


def test_what_a_module_allocates_is_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    net = nn.Sequential(nn.Identity(), Taking(10_000, 70_000))
    rows = measured(net, torch.ones(10), tmp_path, check_leaf_module=lambda m: isinstance(m, (Taking, nn.Identity)))
    assert [(row.name, row.type, row.phase) for row in rows] == [
        ("0", "Identity", "forward"),
        ("1", "Taking", "forward"),
    ]
    taking = row_of(rows, "1")
    assert taking.before == 40  # the input
    assert taking.change == 10_000
    assert taking.peak == 40 + 70_000
    said = capsys.readouterr().out
    assert "`1` (forward)" in said and "no backward" in said


def test_gradients_are_measured(tmp_path: Path) -> None:
    net = nn.Sequential(Scaling(1000), nn.ReLU(inplace=True), Scaling(1000))
    rows = measured(net, torch.ones(1000), tmp_path)
    assert rows[0].before == 3 * 4000  # the input and two factors
    assert row_of(rows, "0[mul]").change == 4000
    assert row_of(rows, "1").change == 0
    assert [row.name for row in rows if row.phase == "backward" and row.type != "autograd"] == ["2[mul]", "1", "0[mul]"]
    assert row_of(rows, "2[mul]", "backward").change == 8000  # the gradients of its input and its factor
    assert row_of(rows, "1", "backward").change == 4000
    assert row_of(rows, "0[mul]", "backward").change == 4000  # of its factor only
    assert all(row.peak >= max(row.before, row.after) for row in rows)


@pytest.mark.parametrize("route", ["float", "traced", "eager", "JIT", "JIT_STRIP"])
def test_every_stage_is_measured_and_nothing_is_changed(route: str, tmp_path: Path) -> None:
    net = Net()
    if route != "float":
        net = calibrate(prepared_on(route, net, (X,)), (X,)) if route != "eager" else _eager()
    net.train()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    kept = next(net.parameters())
    kept.grad = torch.full_like(kept, 7)
    rows = measured(net, (X,), tmp_path)
    assert row_of(rows, "head").change >= X.numel() // 6 * 2 * 4
    backward = [row.name for row in rows if row.phase == "backward"]
    assert "head" in backward and any(name.startswith("block.") for name in backward)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert torch.equal(kept.grad, torch.full_like(kept, 7))
    assert all(p.grad is None for p in net.parameters() if p is not kept)
    if route in ("traced", "JIT_STRIP"):
        converted = (convert_fx if route == "traced" else convert)(net.eval())
        assert {row.phase for row in measured(converted, (X,), tmp_path)} == {"forward"}


def _eager() -> nn.Module:
    class Eager(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.head(self.block(self.norm(x), x)))

    return calibrate(prepared_on("eager", Eager(), (X,)), (X,))


def test_a_checkpoint_computes_again_and_says_so(tmp_path: Path) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x).tanh(), use_reentrant=False)

    rows = measured(Saving(), torch.ones(4, 8), tmp_path)
    assert [row.phase for row in rows if row.name == "second"] == ["forward", "backward", "recomputed", "backward"]
    assert [row.name for row in rows[-2:]] == ["[tanh]", "first"]


def test_a_module_that_is_called_twice_has_two_rows(tmp_path: Path) -> None:
    act = nn.Sigmoid()
    rows = measured(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act), torch.ones(1, 4), tmp_path)
    assert [row.name for row in rows if row.type == "Sigmoid"] == ["1", "1(1)", "1(1)", "1"]


def test_the_page_is_offline_and_shows_names_as_text(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("<script>alert(1)<|script>", nn.Linear(2, 2))
    rows = measured(net, torch.ones(1, 2), tmp_path, file_name="bert")
    page = (tmp_path / "bert.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "http" not in page
    assert f"{rows[0].peak / 1024:.2f} KiB" in page


def test_several_outputs_need_to_be_told_what_to_do(tmp_path: Path) -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"a": y, "b": y + 1}

    net = Two(2, 2)
    with pytest.raises(CheckError, match="gives 2 tensors.*custom_backward"):
        measured(net, torch.ones(1, 2), tmp_path)
    rows = measured(net, torch.ones(1, 2), tmp_path, custom_backward=lambda out: out["b"].sum().backward())
    assert rows[-1].phase == "backward"


def test_modules_of_torch_that_are_made_of_operators_show_these(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = {row.name for row in measured(nn.TransformerEncoder(layer, 2), torch.ones(1, 2, 8), tmp_path)}
    assert {"layers.0.self_attn", "layers.1.linear2", "layers.1.norm1"} <= names


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="the model is compiled"):
        measured(torch.compile(nn.ReLU()), torch.ones(1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CheckError, match=r"at `1`: RuntimeError: mat1 and mat2"):
        measured(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), torch.ones(1, 2), tmp_path)
    with pytest.raises(CheckError, match="is no device"):
        show_cuda_memory_consumption(nn.ReLU(), torch.ones(1), "gpu")  # type: ignore[arg-type]
    with pytest.raises(CheckError, match="on meta cannot be measured"):
        show_cuda_memory_consumption(nn.ReLU(), torch.ones(1), torch.device("meta"))
    with torch.profiler.profile(profile_memory=True), pytest.raises(CheckError, match="end that profile first"):
        measured(nn.ReLU(), torch.ones(1), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(CheckError, match=r"cuda is not available.*torch.device\('cpu'\)"):
        show_cuda_memory_consumption(nn.ReLU(), torch.ones(1), torch.device("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_measured_by_its_allocator(tmp_path: Path) -> None:
    net = nn.Sequential(Scaling(1 << 18), nn.Sigmoid())
    rows = show_cuda_memory_consumption(net, torch.ones(1 << 18), torch.device("cuda"), out_dir=tmp_path)
    assert row_of(rows, "1").change == 1 << 20
    assert rows[-1].phase == "backward"
