"""Models and inputs as they are typed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from horizon_plugin_profiler.command_line.inputs import batches_of, inputs_of
from horizon_plugin_profiler.command_line.outcomes import UsageError, UserCodeError
from horizon_plugin_profiler.command_line.targets import load_checkpoint, models_of


def test_models_by_function_pair_class_and_instance(folder: Path) -> None:
    assert [type(m).__name__ for m in models_of("nets.py:make")] == ["QuantWrapper"]
    assert len(models_of("nets.py:pair")) == 2
    assert type(models_of("nets.py:Wrong")[0]).__name__ == "Wrong"
    assert models_of("nets.py:instance")[0] is models_of("nets.py:instance")[0]
    (folder / "package").mkdir()
    (folder / "package" / "models.py").write_text("from torch import nn\nclass Zoo:\n    net = nn.ReLU()\n")
    assert isinstance(models_of("package.models:Zoo.net")[0], nn.ReLU)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("make", "names no model: give it as module:function"),
        ("no_such_thing:make", "There is no module `no_such_thing`"),
        ("missing.py:make", "There is no file `missing.py`"),
        ("nets.py:mak", "has no `mak`; it has .*make"),
        ("nets.py:number", "is a int: give a model"),
        ("torch:get_num_threads", r"gives \(int\): it must give a model"),
        ("..x:make", "`..x` is no module"),
    ],
)
def test_wrong_names_are_told(folder: Path, target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        models_of(target)


def test_errors_of_the_users_code_keep_their_cause(folder: Path) -> None:
    with pytest.raises(UserCodeError, match="raised ValueError: no weights here") as found:
        models_of("nets.py:broken")
    assert isinstance(found.value.__cause__, ValueError)
    (folder / "half.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(UserCodeError, match="cannot be imported.*not_installed_anywhere"):
        models_of("half.py:make")
    (folder / "leaving.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserCodeError, match="SystemExit"):
        models_of("leaving.py:make")


def test_inputs_by_shape_type_and_limits() -> None:
    x = inputs_of(["2x3"])
    assert x.shape == (2, 3) and x.dtype == torch.float32
    assert torch.equal(x, inputs_of(["2x3"])) and not torch.equal(x, inputs_of(["2x3"], seed=1))
    ids, mask = inputs_of(["50:int64:10:12", "4:bool"])
    assert set(ids.tolist()) == {10, 11} and mask.dtype == torch.bool
    image = inputs_of(["100:float16:-1:0"])
    assert image.dtype == torch.float16 and image.min() >= -1 and image.max() <= 0
    assert set(inputs_of(["image=1x3", "scale=1"])) == {"image", "scale"}


def test_inputs_by_file(folder: Path) -> None:
    np.save("x.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    np.savez("xs.npz", image=np.ones(2), scale=np.zeros(3))
    torch.save((torch.ones(1), {"b": torch.zeros(2)}), "x.pt")
    assert torch.equal(inputs_of(["x.npy"]), torch.arange(6.0).reshape(2, 3))
    assert set(inputs_of(["xs.npz"])) == {"image", "scale"}
    assert len(inputs_of(["x.pt"])) == 2
    assert set(inputs_of(["image=x.npy", "scale=1"])) == {"image", "scale"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("3x", "cannot be read: give a shape"),
        ("1x3:float33", "'float33' is no type"),
        ("1x3:nn", "'nn' is no type"),
        ("1x3:int64:0", "cannot be read"),
        ("1x3:float32:2:1", "lower limit"),
        ("1x3:float32:a:b", "are no numbers"),
        ("missing.npy", "missing.npy cannot be read: No such file"),
        ("missing.pt", "missing.pt cannot be read: No such file"),
        ("text.npy", "text.npy cannot be read as tensors"),
        ("empty.npy", "empty.npy cannot be read as tensors"),
        ("cut.npz", "cut.npz cannot be read as tensors"),
        ("objects.npy", "objects.npy cannot be read as tensors"),
        ("objects.pt", "objects.pt cannot be read as tensors.*could run code"),
    ],
)
def test_wrong_inputs_are_told(folder: Path, spec: str, message: str) -> None:
    Path("text.npy").write_text("no numbers")
    Path("empty.npy").write_bytes(b"")
    np.savez("whole.npz", x=np.ones(2))
    Path("cut.npz").write_bytes(Path("whole.npz").read_bytes()[:-30])
    np.save("objects.npy", np.array([Path("a")]), allow_pickle=True)
    torch.save(Path("a"), "objects.pt")
    with pytest.raises(UsageError, match=message):
        inputs_of([spec])


def test_inputs_are_cut_into_batches() -> None:
    inputs = {"image": torch.arange(5), "scale": torch.ones(5, 2)}
    assert [(len(x["image"]), len(x["scale"])) for x in batches_of(inputs, 2)] == [(2, 2), (2, 2), (1, 1)]
    assert batches_of(inputs, None) == [inputs]
    for wrong, size in ((inputs, 0), ((torch.ones(2), torch.ones(3)), 1), (torch.tensor(1.0), 1)):
        with pytest.raises(UsageError, match="--batch"):
            batches_of(wrong, size)


def test_inputs_have_names_or_an_order() -> None:
    with pytest.raises(UsageError, match="name all of them"):
        inputs_of(["1x3", "b=1"])


def test_checkpoints_of_common_forms_fit_or_are_told(folder: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for state in (one.state_dict(), {"state_dict": one.state_dict(), "epoch": 3}, {"model": one.state_dict()}):
        nn.init.zeros_(other.weight)
        torch.save(state, "checkpoint.pt")
        load_checkpoint(other, "checkpoint.pt")
        assert torch.equal(one.weight, other.weight)
    with pytest.raises(UsageError, match=r"does not fit the model(.|\n)*size mismatch"):
        load_checkpoint(nn.Linear(3, 3), "checkpoint.pt")
    torch.save(torch.ones(1), "tensor.pt")
    with pytest.raises(UsageError, match="holds a Tensor: give a file of a state dict"):
        load_checkpoint(one, "tensor.pt")
