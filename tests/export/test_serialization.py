"""TorchScript files with the version of this package."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import horizon_plugin_pytorch
from horizon_plugin_pytorch import jit
from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.export import script_files as serialization
from horizon_plugin_pytorch.quantization import convert_fx
from horizon_plugin_pytorch.utils.serialization import get_version_from_scriptmodule, save_with_version
from tests.models import make
from tests.routes import prepared

X = torch.ones(1, 2)


def script() -> torch.jit.ScriptModule:
    return torch.jit.trace(nn.Linear(2, 2), X)


SCRIPT = script()


def test_the_version_is_in_the_module_and_in_the_file(tmp_path: Path) -> None:
    module, path = script(), tmp_path / "sub" / "model.pt"
    assert get_version_from_scriptmodule(module) is None
    save_with_version(module, path, _extra_files={"note": "mine"})
    extra = {"note": "", "horizon_plugin_pytorch_version": ""}
    loaded = torch.jit.load(path, _extra_files=extra)
    assert extra == {"note": b"mine", "horizon_plugin_pytorch_version": horizon_plugin_pytorch.__version__.encode()}
    assert get_version_from_scriptmodule(loaded) == horizon_plugin_pytorch.__version__
    assert torch.equal(loaded(X), module(X))
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


def test_a_file_that_is_saved_again_has_the_version_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    files = io.BytesIO(), io.BytesIO()
    save_with_version(script(), files[0])
    files[0].seek(0)
    monkeypatch.setattr(serialization, "__version__", "9.9")
    save_with_version(torch.jit.load(files[0]), files[1])
    files[1].seek(0)
    assert get_version_from_scriptmodule(torch.jit.load(files[1])) == "9.9"


def test_load_gives_the_extra_files_and_warns_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit.save(SCRIPT, path, {"note": "mine"})
        extra = {"note": ""}
        loaded = jit.load(path, torch.device("cpu"), extra)
    assert extra == {"note": b"mine"} and torch.equal(loaded(X), SCRIPT(X))
    with open(path, "rb") as file:
        assert torch.equal(jit.load(file)(X), SCRIPT(X))


def test_torchs_own_deprecation_warnings_stay_outside(tmp_path: Path) -> None:
    jit.save(SCRIPT, tmp_path / "model.pt")
    with pytest.warns(Warning, match="deprecated"):
        torch.jit.load(tmp_path / "model.pt")


def test_another_version_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.save(SCRIPT, tmp_path / "model.pt")
    monkeypatch.setattr(serialization, "__version__", "9.9")
    version = horizon_plugin_pytorch.__version__
    with pytest.warns(QuantizationWarning, match=rf"model\.pt` was written by version {version}; this is version 9\.9"):
        jit.load(tmp_path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(script(), tmp_path / "plain.pt")
    with pytest.warns(QuantizationWarning, match="without a version"):
        jit.load(tmp_path / "plain.pt")


def test_files_that_are_no_scripts_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no script")
    torch.save({"a": X}, tmp_path / "state")
    for name, message in (("text", "is no TorchScript file, which"), ("state", "one of `torch.save`")):
        with pytest.raises(ExportError, match=f"{name}` .*{message}"):
            jit.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        jit.load(tmp_path / "nothing")


def test_a_missing_operator_is_named(tmp_path: Path) -> None:
    library = torch.library.Library("test_missing", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    jit.save(_traced_twice(), tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    library._destroy()
    with pytest.raises(ExportError, match="the operator `test_missing::twice`, which is not registered"):
        jit.load(io.BytesIO(data))


def _traced_twice() -> torch.jit.ScriptModule:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.test_missing.twice(x)

    return torch.jit.trace(Twice(), X)


class Devices(nn.Module):
    """The guide's example, with parameters besides, and a constant if there is one."""

    def __init__(self, constant: torch.Tensor | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.constant = [constant]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(x.shape, device=x.device) + torch.zeros_like(x) + self.inner(x)
        return y if self.constant[0] is None else y + self.constant[0]


def test_devices_of_the_graph_are_replaced() -> None:
    x = torch.rand(2, 3)
    traced = torch.jit.trace(Devices(), x)
    before = str(traced.inlined_graph)
    moved = jit.to_device(traced, "meta")
    assert str(traced.inlined_graph) == before and 'value="cpu"' in before
    text = str(moved.inlined_graph)
    assert text.count('Device = prim::Constant[value="meta"]') and "cpu" not in text
    assert moved(x.to("meta")).is_meta
    file = io.BytesIO()
    jit.save(jit.to_device(traced, torch.device("cpu")), file)
    file.seek(0)
    assert torch.equal(jit.load(file)(x), traced(x))


def test_constants_and_parameters_move_with_the_graph() -> None:
    x = torch.rand(2, 3)
    traced = torch.jit.trace(Devices(torch.arange(3.0)), x)
    moved = jit.to_device(traced, "meta")
    assert all(parameter.is_meta for parameter in moved.parameters())
    assert moved(x.to("meta")).is_meta
    assert torch.equal(jit.to_device(traced, "cpu")(x), traced(x))


def _steps(script: torch.jit.ScriptModule) -> list[str]:
    """The operators of a graph in their order, without where their tensors come from."""
    return [kind for kind in re.findall(r" = ([\w:]+)", str(script.inlined_graph)) if "Attr" not in kind and
            kind != "prim::Constant"]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [("mobilenet", "qint8"), ("vit", "qint16")])
def test_a_quantized_model_moves_to_meta(name: str, dtype: str) -> None:
    """Constants of equal shape too, which torch would compare; the graph keeps its operators."""
    model, inputs = make(name)
    quantized = convert_fx(prepared(model, inputs, dtype))
    traced = torch.jit.trace(quantized, inputs)
    moved = jit.to_device(traced, "meta")
    found = moved(*(x.to("meta") for x in inputs))
    assert found.is_meta and found.shape == quantized(*inputs).shape
    assert _steps(moved) == _steps(traced) and "horizon::conv" in _steps(moved)
    assert 'Device = prim::Constant[value="cpu"]' not in str(moved.inlined_graph)
    assert torch.equal(traced(*inputs), quantized(*inputs))
    again = jit.to_device(moved, "meta")
    assert str(again.inlined_graph).count("GetAttr") == str(moved.inlined_graph).count("GetAttr")
    with pytest.raises(ExportError, match="are on `meta` and have no numbers, so that none can be moved to `cpu`"):
        jit.to_device(moved, "cpu")


def test_to_the_cpu_and_back_the_text_stays() -> None:
    model, inputs = make("mobilenet")
    traced = torch.jit.trace(convert_fx(prepared(model, inputs)), inputs)
    once = jit.to_device(traced, "cpu")
    assert str(jit.to_device(once, "cpu").graph) == str(once.graph)
    assert torch.equal(once(*inputs), traced(*inputs))


def test_only_devices_change_in_the_text_for_another_device() -> None:
    """As far as it can be seen without CUDA: the rewriting itself."""
    traced = jit.to_device(torch.jit.trace(Devices(), torch.rand(2, 3)), "cpu")
    graph, before = traced.forward.graph, str(traced.forward.graph)
    for device in ("cuda:0", "cpu"):
        serialization._replace_devices(graph, torch.device(device))
        assert str(graph) == before.replace('value="cpu"', f'value="{device}"')


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(TypeError, match="to_device takes a TorchScript module"):
        jit.to_device(nn.ReLU(), "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="save_with_version takes a TorchScript module.*got Linear"):
        save_with_version(nn.Linear(2, 2), io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="get_version_from_scriptmodule takes"):
        get_version_from_scriptmodule("model.pt")  # type: ignore[arg-type]
