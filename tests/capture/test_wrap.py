"""`utils.fx_helper.wrap` in each of its spellings: one node in the graph, the same results, copies and files."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.fx.fx_helper import wrap as internal_wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert_fx,
    fuse_fx,
    prepare,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import assert_one_arithmetic, calibrate, qconfig

X = torch.randn(2, 3, 4, 4)


def _branch(x: Tensor) -> Tensor:
    return x if bool(x.sum() > 0) else -x


@wrap()
def decorated(x: Tensor) -> Tensor:
    """Says something."""
    return _branch(x)


@wrap(skip_compile=True)
def decorated_with_argument(x: Tensor) -> Tensor:
    return _branch(x)


@wrap
def decorated_plainly(x: Tensor) -> Tensor:
    return _branch(x)


def named(x: Tensor) -> Tensor:
    return _branch(x)


wrap("named")
wrap("hypot")


def called(x: Tensor) -> Tensor:
    return _branch(x)


called = wrap(called)


@wrap()
def of_a_list(xs: list[Tensor], scale: float = 1.0) -> Tensor:
    return _branch(torch.cat(xs)) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(3, 3, 1), DeQuantStub()

    def features(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.quant(x)))


class WithFunctions(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return [f(y) for f in (decorated, decorated_with_argument, decorated_plainly, named, called)]


class WithNestedArguments(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return of_a_list([y, y], scale=2.0)


class WithMethods(Net):
    gain = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    @wrap()
    def finish(self, x: Tensor, sign: int = 1) -> Tensor:
        return _branch(x) * self.gain * sign + float(self.head.shift)

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return self.finish(y), self.finish(y, sign=-1), self.head(y)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(5.0))

    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return _branch(x) + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(x)


@wrap()
class Decoder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _branch(x)

    def boxes(self, x: Tensor) -> Tensor:
        return _branch(x) + 1


class WithClass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        return self.decoder(y), self.decoder.boxes(y)


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.BAYES)


@pytest.mark.parametrize("model_class", [WithFunctions, WithNestedArguments, WithMethods, WithClass])
def test_wrapped_code_runs_at_every_stage(model_class: type) -> None:
    model = model_class().eval()
    names = set(dict(model.named_modules()))
    qat = calibrate(prepare_qat_fx(fuse_fx(model), {"": qconfig()}), (X,))
    quantized = convert_fx(qat)
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    restored = torch.load(file, weights_only=False)
    wanted, found = _flat(model(X)), _flat(quantized(X))
    assert all(torch.allclose(a, b, atol=0.2) for a, b in zip(wanted, found, strict=True))
    for same in (qat, copy.deepcopy(quantized), restored):
        assert all(torch.equal(a, b) for a, b in zip(_flat(same(X)), found, strict=True))
    assert set(dict(model.named_modules())) == names  # the user's model is as it was


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_a_method_sees_its_own_model_after_a_copy() -> None:
    quantized = convert_fx(calibrate(prepare_qat_fx(WithMethods().eval(), {"": qconfig()}), (X,)))
    other = copy.deepcopy(quantized)
    other.head.shift.fill_(100.0)
    assert float((other(X)[2] - quantized(X)[2]).mean()) == pytest.approx(95.0)


def test_a_wrapped_function_keeps_its_face_and_works_on_its_own() -> None:
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Says something."
    assert torch.equal(decorated(-X.abs()), X.abs())
    assert hypot(3, 4) == 5.0 and hypot.__horizon_leaf__
    assert internal_wrap is wrap


def test_what_cannot_be_wrapped_is_refused() -> None:
    with pytest.raises(NameError, match='wrap."not_there".*below the definition'):
        wrap("not_there")
    for wrong in (3, int, X):
        with pytest.raises(TypeError, match="wrap takes a function, a method, a subclass of torch.nn.Module"):
            wrap(wrong)


@wrap()
class MarkedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(4, 4, 1), nn.Parameter(torch.full((4, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x) * self.gain) + x


@pytest.mark.slow
@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT, PrepareMethod.JIT_STRIP])
def test_a_class_that_tracing_does_not_enter_is_quantized_by_running_too(method: PrepareMethod, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    net = QuantWrapper(nn.Sequential(MarkedBlock(), nn.Conv2d(4, 4, 1), nn.ReLU())).eval()
    qat = calibrate(prepare(net, (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (x,))
    assert_one_arithmetic(qat, (x,), tmp_path)
    with torch.no_grad():
        assert float((qat(x) - net(x)).norm() / net(x).norm()) < 0.05


@dataclass
class Level:
    feature: Tensor
    rest: dict[str, Any]
    stride: int
    gain: float
    t: Tensor  # as a method of tensors is called


class GivesFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1)
        self.head = nn.Conv2d(4, 4, 1)

    @wrap()
    def level(self, x: Tensor) -> Level:
        y = self.conv(x)
        return Level(y, {"mean": [y.mean(1, keepdim=True)]}, 2, 0.5, y)

    def forward(self, x: Tensor) -> Tensor:
        level = self.level(self.quant(x))
        y = torch.sigmoid(level.feature) * level.rest["mean"][0] + self.head(level.t)
        return self.dequant(F.max_pool2d(y, level.stride) * level.gain)


def test_fields_of_what_wrapped_code_gives_are_quantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = GivesFields().eval()
    qat = calibrate(prepare_qat_fx(net, {"": qconfig("qint16")}), (X,))
    assert (qat(X) - net(X)).norm() < 0.02 * net(X).norm()  # the weights of two layers are int8
    assert_one_arithmetic(qat, (X,), tmp_path)
