"""Programs through `torch.export`: saved, loaded elsewhere, the same integers; what is missing is named."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.program.exported import exported_program, load_exported, save_exported
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, QuantWrapper, convert, convert_fx
from tests.models import make
from tests.operators.cases import CASES
from tests.routes import as_numbers, calibrate, mismatches, prepared, prepared_on
from tests.tiers import in_soak

X, OTHER = torch.randn(2, 1, 3, 8, 8)
RUN = """
import sys, torch
from horizon_plugin_pytorch.program.exported import load_exported
x, wanted = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(load_exported(sys.argv[1]).module()(x)[0], wanted)
print("equal")
"""
RUN_TORCHS = """
import sys, torch
import horizon_plugin_pytorch
data = torch.load(sys.argv[2], weights_only=True)
for name, (inputs, wanted) in data.items():
    found = torch.utils._pytree.tree_leaves(torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()(*inputs))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), name
print("equal")
"""
SAMPLE = ("conv", "softmax", "lstm", "grid-sample", "rle-of-classes")
LOAD_WITHOUT_IMPORT = "import sys, torch; torch.export.load(sys.argv[1])"


@pytest.fixture(scope="module")
def qat() -> nn.Module:
    set_march(March.BAYES)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Softmax(1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    return prepared(QuantWrapper(net).eval(), (X,))


@pytest.mark.processes
def test_a_file_runs_in_a_new_process(qat: nn.Module, tmp_path: Path) -> None:
    quantized = convert_fx(qat)
    exported = exported_program(record_program(quantized, X))
    assert "horizon.conv.default" in str(exported.graph)
    assert torch.equal(exported.module()(OTHER)[0], quantized(OTHER))
    save_exported(exported, tmp_path / "model.pt2")
    torch.save((OTHER, quantized(OTHER)), tmp_path / "data.pt")
    files = [str(tmp_path / name) for name in ("model.pt2", "data.pt")]
    done = subprocess.run([sys.executable, "-c", RUN, *files], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_a_missing_registration_is_named() -> None:
    library = torch.library.Library("test_absent", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.test_absent.twice(x)

    file = io.BytesIO()
    save_exported(exported_program(record_program(Twice(), X)), file)
    library._destroy()
    with pytest.raises(ExportError, match="calls `test_absent::twice`, which is not registered"):
        load_exported(io.BytesIO(file.getvalue()))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing")
    torch.save({}, tmp_path / "state")
    for name in ("text", "state"):
        with pytest.raises(ExportError, match=rf"{name}` is no file of `torch\.export\.save`"):
            load_exported(tmp_path / name)


def _converted(route: str, model: nn.Module, inputs: tuple[Any, ...], dtype: str = "qint8") -> nn.Module:
    qat = calibrate(prepared_on(route, model, inputs, dtype), inputs)
    return convert_fx(qat) if isinstance(qat, fx.GraphModule) else convert(qat)


def _other(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(map(torch.randn_like, inputs))


@pytest.mark.slow
@pytest.mark.processes
def test_torch_exports_models_saves_and_loads_them_in_a_new_process(tmp_path: Path) -> None:
    set_march(March.BAYES)
    data = {}
    for name, dtype, route in [
        ("mobilenet", "qint8", "traced"),
        ("mobilenet", "qint16", "JIT_STRIP"),
        ("vit", "qint8", "JIT_STRIP"),
        ("vit", "qint16", "traced"),
        ("detector", "qint8", "traced"),
    ]:
        model, inputs = make(name)
        quantized = _converted(route, model, inputs, dtype)
        exported = torch.export.export(quantized, inputs)
        assert any("horizon.conv" in str(node.target) for node in exported.graph.nodes)
        others = _other(inputs)
        wanted = as_numbers(quantized(*others))
        assert mismatches(as_numbers(exported.module()(*others)), wanted) == 0
        torch.export.save(exported, tmp_path / f"{name}-{dtype}.pt2")
        data[f"{name}-{dtype}"] = others, wanted
    torch.save(data, tmp_path / "data.pt")
    files = [str(tmp_path), str(tmp_path / "data.pt")]
    done = subprocess.run([sys.executable, "-c", RUN_TORCHS, *files], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.processes
def test_without_the_package_torch_names_the_operator(qat: nn.Module, tmp_path: Path) -> None:
    """The message that docs/export.md quotes."""
    torch.export.save(torch.export.export(convert_fx(qat), (X,)), tmp_path / "model.pt2")
    command = [sys.executable, "-c", LOAD_WITHOUT_IMPORT, str(tmp_path / "model.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "We failed to resolve torch.ops.horizon.quantize.default to an operator" in done.stderr
    assert "We ran into an error when deserializing the saved file" in done.stderr.splitlines()[-1]
    page = " ".join(Path("docs/export.md").read_text().split())
    assert "We failed to resolve torch.ops.horizon.quantize.default to an operator" in page
    assert "We ran into an error when deserializing the saved file" in page


class Nested(nn.Module):
    """Inputs and outputs in structures, a default, and an output that keeps its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.quant, self.dequant = nn.Conv2d(3, 3, 1), QuantStub(), DeQuantStub()
        self.other, self.add = QuantStub(), FloatFunctional()

    def forward(self, views: dict[str, Any], sizes: tuple[int, int] = (8, 8), bias: Tensor | None = None) -> Any:
        x = self.conv(self.quant(views["left"]))
        y = self.add.add(x, self.other(views["others"][0]))
        out = {"sum": [self.dequant(y)], "area": sizes[0] * sizes[1], "none": None, "integers": y}
        return out if bias is None else {**out, "biased": self.dequant(y) + bias}


@pytest.mark.parametrize("route", ["eager", "JIT_STRIP"])
def test_structures_keywords_and_defaults_stay(route: str) -> None:
    set_march(March.BAYES)
    torch.manual_seed(0)
    views = {"left": X, "others": [OTHER]}
    bias = torch.randn(8)
    quantized = _converted(route, Nested().eval(), (views, (8, 8), bias))
    exported = torch.export.export(quantized, (views,), {"bias": bias})
    again = {"left": OTHER, "others": [X]}
    found, wanted = exported.module()(again, bias=bias), quantized(again, bias=bias)
    assert list(found) == list(wanted) and found["area"] == 64 and found["none"] is None
    assert torch.equal(found["sum"][0], wanted["sum"][0]) and torch.equal(found["biased"], wanted["biased"])
    assert type(found["integers"]) is Tensor and torch.equal(found["integers"], wanted["integers"].int_repr())
    assert "horizon.conv" in str(exported.run_decompositions().graph)


def test_a_converted_model_inside_of_another_is_exported(qat: nn.Module) -> None:
    class Deployed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convert_fx(qat)

        def forward(self, image: Tensor) -> Tensor:
            return self.net(image / 2).softmax(1)

    model = Deployed()
    assert torch.equal(torch.export.export(model, (X,), strict=True).module()(OTHER), model(OTHER))


def test_other_models_are_torchs() -> None:
    exported = torch.export.export(nn.ReLU(), (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert torch.equal(exported.module()(OTHER), OTHER.relu())


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X,), {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}, "`dynamic_shapes` is not for a converted model"),
        ((X,), {"preserve_module_call_signature": ("conv",)}, "`preserve_module_call_signature` is not for"),
        (X, {}, "`args` is a tuple of what"),
    ],
)
def test_what_a_program_cannot_have_is_refused(qat: nn.Module, args: Any, options: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        torch.export.export(convert_fx(qat), args, **options)


def test_shapes_that_name_no_axis_are_taken(qat: nn.Module) -> None:
    quantized = convert_fx(qat)
    exported = torch.export.export(quantized, (X,), dynamic_shapes=(None,))
    assert torch.equal(exported.module()(OTHER), quantized(OTHER))


def test_torchs_onnx_is_sent_to_ours(qat: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ExportError, match="Write it with `export_quantized_onnx`"):
        torch.export.export(convert_fx(qat), (X,))


def test_a_prepared_model_is_to_be_converted_first(qat: nn.Module) -> None:
    with pytest.raises(ExportError, match="Convert a prepared model first"):
        torch.export.export(qat, (X,))


def test_torchs_own_function_says_what_to_call(qat: nn.Module) -> None:
    with pytest.raises(ExportError, match="after `import horizon_plugin_pytorch`"):
        torch.export.export.__wrapped__(convert_fx(qat), (X,))


@pytest.mark.parametrize("name", [*SAMPLE, *in_soak(*(case.name for case in CASES if case.name not in SAMPLE))])
def test_every_operator_is_exported(name: str) -> None:
    number = next(number for number, case in enumerate(CASES) if case.name == name)
    case = CASES[number]
    set_march(case.march)
    quantized = convert_fx(prepared(case.model(), case.inputs(), case.formats[number % len(case.formats)]))
    exported = torch.export.export(quantized, case.inputs())
    others = case.inputs(seed=2)
    assert mismatches(as_numbers(exported.module()(*others)), as_numbers(quantized(*others))) == 0
