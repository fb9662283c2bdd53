"""TorchScript files with the version of this package."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import horizon_plugin_pytorch
from horizon_plugin_pytorch.export import script_files as serialization
from horizon_plugin_pytorch.utils.serialization import get_version_from_scriptmodule, save_with_version

X = torch.ones(1, 2)


def script() -> torch.jit.ScriptModule:
    return torch.jit.trace(nn.Linear(2, 2), X)


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


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(TypeError, match="save_with_version takes a TorchScript module.*got Linear"):
        save_with_version(nn.Linear(2, 2), io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="get_version_from_scriptmodule takes"):
        get_version_from_scriptmodule("model.pt")  # type: ignore[arg-type]
