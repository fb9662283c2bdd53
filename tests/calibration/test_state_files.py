"""A state file goes on only from the same model, weights, settings and data; what is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.calibration.fingerprint import digest
from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, get_default_qconfig, prepare, prepare_qat_fx
from tests.calibration.test_calibrate import Stop


@pytest.fixture(autouse=True)
def march() -> None:
    set_march(March.NASH_E)


class Net(nn.Module):
    def __init__(self, function: Callable = torch.relu) -> None:
        super().__init__()
        self.conv, self.bn, self.last, self.function = (
            nn.Conv2d(2, 4, 1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 1),
            function,
        )
        self.register_buffer("gain", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.bn(self.conv(x)) * self.gain))


def net(
    edit: Callable[[nn.Module], Any] | None = None, method: str = "fx", function: Any = torch.relu, **qconfig
) -> Any:
    torch.manual_seed(0)
    model = QuantWrapper(Net(function)).eval()
    with torch.no_grad():
        if edit is not None:
            edit(model.module)
    config = {"": get_default_qconfig(**qconfig)}
    if method == "fx":
        return prepare_qat_fx(model, config)
    return prepare(model, (torch.rand(1, 2, 4, 4),), qconfig_dict=config, method=method, out_dir=None)


def data(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 4, 4, generator=generator) * (i + 1) for i in range(count)]


def stopping(batches: Iterable[Any]) -> Iterable[Any]:
    yield from batches
    raise Stop


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    with pytest.raises(Stop):
        calibrate(net(), stopping(data()[:4]), state_file=path, patience=0, progress=False)
    return path


def refused(model: Any, batches: Any, file: Path, words: str) -> None:
    """The file is refused with these words; model and file are as before."""
    model.train()
    content, before = file.read_bytes(), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CalibrationError, match=words):
        calibrate(model, batches, state_file=file, patience=0, progress=False)
    assert file.read_bytes() == content and all(m.training for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


EDITS = {
    "a scaled weight": (lambda m: m.conv.weight.mul_(4), "module.conv.weight"),
    "one value": (lambda m: m.last.weight.view(-1)[3].add_(1e-6), "module.last.weight"),
    "a bias": (lambda m: m.last.bias.add_(1), "module.last.bias"),
    "statistics of a norm": (lambda m: m.bn.running_mean.add_(1), "module.conv.bias"),  # into which it is folded
    "a buffer": (lambda m: m.gain.mul_(2), "module.gain"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_other_weights_are_refused(edit, file) -> None:
    change, name = EDITS[edit]
    refused(net(change), data(), file, f"is of other weights: `{name}` has changed since.*Remove it to begin anew")


AVERAGING = {"averaging_constant": 0.0}
OTHERS = {
    "an observer": (lambda: net(activation_observer="mse"), "at `quant`, where the model has MSEObserver"),
    "a format": (lambda: net(activation_qkwargs={"dtype": "qint16"}), "where the model has.*quant_max=32767"),
    "averaging": (lambda: net(activation_qkwargs=AVERAGING), "averaging_constant=0.01.*averaging_constant=0.0"),
    "a weight observer": (lambda: net(weight_observer="mse"), "conv.weight_fake_quant`, where the model has MSE"),
    "a function": (lambda: net(function=torch.sigmoid), "is of another model"),
    "one more function": (lambda: net(function=lambda x: torch.relu(x).neg()), "is of another model"),
    "a method": (lambda: net(method="jit-strip"), "is of another model"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_other_settings_are_refused(other, file) -> None:
    make, words = OTHERS[other]
    refused(make(), data(), file, words)


def test_another_march_is_refused(file) -> None:
    set_march(March.BAYES)
    refused(net(), data(), file, "another model: the march was nash-e, and is bayes")


DATA = {
    "reversed": (lambda d: d[::-1], "batch 0"),
    "shuffled later": (lambda d: [d[0], d[2], d[1], *d[3:]], "batch 1"),
    "one value": (lambda d: [*d[:3], d[3] + torch.eye(4) * 1e-6, *d[4:]], "batch 3"),
    "a smaller batch": (lambda d: [x[:1] for x in d], "batch 0"),
    "another type": (lambda d: [x.double() for x in d], "batch 0"),
    "in a tuple": (lambda d: [(x, 0) for x in d], "batch 0"),
}


@pytest.mark.parametrize("other", DATA)
def test_other_data_are_refused(other, file) -> None:
    change, batch = DATA[other]
    refused(
        net(), change(data()), file, f"has seen other data: {batch} is not the one of that run.*Or remove it to begin"
    )
    refused(net(), iter(change(data())), file, batch)
    refused(net(), data()[:2], file, "has seen 4 batches, and the data have 2")


def test_data_that_fail_while_they_are_skipped_change_nothing(file) -> None:
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(Stop):
        calibrate(model, stopping(data()[:2]), state_file=file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["fx", "jit-strip"])
def test_the_same_goes_on_in_any_layout_of_memory(method, tmp_path) -> None:
    file, want = tmp_path / "state", calibrate(net(method=method), data(), patience=0).scales
    with pytest.raises(Stop):
        calibrate(net(method=method), stopping(data()[:4]), state_file=file, patience=0)
    same = [x.to(memory_format=torch.channels_last) for x in data()]
    found = calibrate(net(method=method), same, state_file=file, patience=0)
    assert found.steps == 6 and not file.exists()
    for name, scale in want.items():
        torch.testing.assert_close(found.scales[name], scale, rtol=1e-6, atol=0)


def test_data_that_the_forward_changes_are_known_by_what_they_were(tmp_path) -> None:
    def forward(model: nn.Module, batch: dict) -> None:
        model(batch.pop("image"))
        batch["seen"] = True

    file = tmp_path / "state"
    with pytest.raises(Stop):
        calibrate(net(), stopping({"image": x} for x in data()[:4]), forward=forward, state_file=file, patience=0)
    assert calibrate(net(), [{"image": x} for x in data()], forward=forward, state_file=file, patience=0).steps == 6


def test_a_file_of_other_processes_is_refused(file) -> None:
    state = torch.load(file, weights_only=True)
    state["batches"] = [[*batch, 5] for batch in state["batches"]]
    torch.save(state, file)
    refused(net(), data(), file, "was written by 2 processes, each with its data, and now there are 1")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_part_of_a_file_is_refused(share, file) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(net(), data(), file, "is not a state that calibrate wrote.*Remove it")


@pytest.mark.parametrize("damage", [{"batches": [1, 2, 3, 4]}, {"batches": [[1]]}, {"model": None}, {"version": 3}])
def test_a_damaged_file_is_refused(damage, file) -> None:
    torch.save({**torch.load(file, weights_only=True), **damage}, file)
    refused(net(), data(), file, "is damaged|is of version 3")


def test_statistics_that_do_not_fit_are_refused_without_a_trace(file) -> None:
    state = torch.load(file, weights_only=True)
    last = list(state["observers"])[-1]
    state["observers"][last]["min_val"].fill_(float("nan"))
    torch.save(state, file)
    model = net()
    calibrate(model, [x / 10 for x in data()], progress=False)  # it has ranges of its own, which stay
    refused(model, data(), file, "does not fit the observer of")


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class Thing:
    def __init__(self, x: Any) -> None:
        self.x, self.own = x, self


A, B = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 1
PAIRS: list[tuple[Any, Any]] = [
    (A, B), (A, A.t()), (A, A.reshape(3, 2)), (A, A.to(torch.bfloat16)), (A.to(torch.bfloat16), B.to(torch.bfloat16)),
    ([A, B], [B, A]), ([A, B], (A, B)), ({"a": A}, {"b": A}), ({"a": A}, {"a": B}), (A.numpy(), B.numpy()),
    (Sample(A, 1), Sample(A, 2)), (Sample(A, 1), Sample(B, 1)), (Thing(A), Thing(B)), ("a", "b"), (1, 1.0), (None, 0),
    (np.float32(1), np.float32(2)), (np.array(["a", None], object), np.array(["b", None], object)),
    (A.to_sparse(), B.to_sparse()), (A > 2, A > 3), (torch.tensor(1), torch.tensor(2)), (b"a", b"b"),
    (torch.empty(0, 3), torch.empty(3, 0)), (A * 1j, B * 1j), (["ab"], ["a", "b"]), ([[1], 2], [[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_digests_tell_batches_apart(index) -> None:
    one, other = PAIRS[index]
    assert 0 < digest(one) == digest(one) != digest(other)


def test_a_digest_is_of_values() -> None:
    assert digest(A.t()) == digest(A.t().contiguous()) == digest(A.t().clone().requires_grad_())
    assert digest(Thing(A)) == digest(Thing(A.clone()))
