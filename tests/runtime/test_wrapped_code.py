"""Code that tracing does not enter is quantized like any other: its modules, its functions, whatever Python it is."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import (
    QuantizationWarning,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    calibrate,
    convert_fx,
    fuse_fx,
    load_calib_state_dict,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import as_numbers, assert_one_arithmetic, qconfig
from tests.runtime.wrapped_models import CODE, Code, Head, Parts, Single, X, near, train
from tests.tiers import in_soak


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CODE)
def test_wrapped_code_goes_all_the_way(name: str, tmp_path: Any) -> None:
    net = Single(CODE[name]).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(X)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    near(net, qat)
    train(qat)
    assert_one_arithmetic(qat, (X,), tmp_path, [(X * 0.5,)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE)
def test_a_checkpoint_fits_a_model_that_has_not_run(name: str) -> None:
    net = Single(CODE[name]).eval()
    first = prepare_qat_fx(net, {"": qconfig()})
    calibrate(first, [X], progress=False)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second = prepare_qat_fx(net, {"": qconfig()})
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        assert str(second.load_state_dict(state)) == "<All keys matched successfully>"
        assert second.state_dict().keys() == state.keys()
        third = prepare_qat_fx(net, {"": qconfig()})
        assert not load_calib_state_dict(third, state)
    converted = convert_fx(second)  # before it has ever run
    wanted = first(X)
    assert torch.equal(converted.eval()(X), wanted)
    for model in (second, third):
        model.eval()
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        assert torch.equal(model(X), wanted)
        assert model.state_dict().keys() == state.keys()
        assert torch.equal(convert_fx(model)(X), wanted)


@pytest.mark.parametrize("name", ["modules", "conv, bn and relu", "parameter", "module of the user's", "in place"])
def test_a_copy_is_a_model_of_its_own(name: str) -> None:
    qat = prepare_qat_fx(Single(CODE[name]).eval(), {"": qconfig()})
    calibrate(qat, [X], progress=False)
    wanted = qat(X)
    twin = copy.deepcopy(qat)
    assert torch.equal(twin(X), wanted)
    train(twin)
    assert torch.equal(qat(X), wanted)  # nothing of the copy's is the original's


@wrap()
def gate(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    return torch.sigmoid(x) * y * scale


@wrap
def run_layer(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + x


clipped = wrap(lambda x: x.clamp(-1, 1) * 2)


@wrap()
def nested(x: Tensor) -> Tensor:
    return gate(x, clipped(x)) + clipped(x * 0.5)


@wrap()
class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ff = nn.Linear(8, 8), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.ff.add(self.fc(x), x) * 0.5

    def boxes(self, x: Tensor) -> Tensor:
        return self.fc(x).exp()


class Whole(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(), Head()])
        self.decoder = Decoder()

    @wrap()
    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x * 2

    @wrap()
    def named(self, x: Tensor) -> dict[str, Any]:
        return {"sum": x + 1, "list": [x * 3, x.abs()], "size": x.shape[1]}

    @wrap()
    def real(self, x: Tensor) -> Tensor:
        return torch.special.erf(self.inner_dequant(self.conv(x)))

    @wrap()
    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.inner_dequant(x))

    @wrap()
    def sizes(self, x: Tensor) -> tuple[int, int]:
        return x.shape[2], x.shape[3]

    @wrap()
    def network(self, x: Tensor) -> Tensor:
        return self.inner_dequant(F.relu(self.conv(self.inner_quant(x)) + 1))

    @wrap()
    def entrance(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(self.inner_quant(x)))

    @wrap()
    def with_level(self, parts: Any, x: Tensor, flag: bool = True) -> Tensor:
        return x + parts[0] * parts[1] if flag else x


class Called(Whole):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.body = code

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def joined(s: Any, x: Tensor) -> Any:
    a, b = s.pair(s.quant(x))
    return s.dequant(F.relu(a + b)), s.dequant(torch.cat([a, b], 1))


def by_name(s: Any, x: Tensor) -> Any:
    out = s.named(s.quant(x))
    return s.dequant(out["sum"]), s.dequant(out["list"][0] + out["list"][1]), s.dequant(out["sum"].mean(1))


def by_size(s: Any, x: Tensor) -> Any:
    x = s.quant(x)
    h, w = s.sizes(x)[0], s.sizes(x)[1]
    return s.dequant(x.reshape(2, 4, h * w) + 1)


CALLS: dict[str, Code] = {
    "a function": lambda s, x: s.dequant(gate(s.quant(x), s.conv(s.quant(x)), scale=0.5)),
    "a lambda": lambda s, x: s.dequant(clipped(s.quant(x)) + s.quant(x)),
    "a function of a function": lambda s, x: s.dequant(nested(s.quant(x))),
    "a function that takes a module": lambda s, x: s.dequant(run_layer(s.fc, s.quant(x))),
    "a class": lambda s, x: s.dequant(s.decoder(s.quant(x))),
    "another method of a class": lambda s, x: s.dequant(s.decoder.boxes(s.quant(x))),
    "a method of a part": lambda s, x: s.dequant(s.heads[1](s.heads[0](s.quant(x)))),
    "a part called twice": lambda s, x: s.dequant(s.heads[0](s.heads[0](s.quant(x)))),
    "a function called twice": lambda s, x: s.dequant(clipped(clipped(s.quant(x)) * 0.3)),
    "two results": joined,
    "a dictionary": by_name,
    "sizes": by_size,
    "real numbers": lambda s, x: s.real(s.quant(x)) * 2 - 1,
    "a float module after a stub inside": lambda s, x: s.scores(s.conv(s.quant(x))),
    "stubs inside": lambda s, x: s.network(x) * 2,
    "a QuantStub inside": lambda s, x: s.dequant(s.conv(s.entrance(x)) + 1),
    "parts of a parameter": lambda s, x: s.dequant(s.with_level(torch.split(s.level, 1), s.quant(x))),
    "a module that traced code calls": lambda s, x: s.dequant(s.conv(s.pair(s.quant(x))[0])),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_fused"), [
    *((name, number % 3 == 0) for number, name in enumerate(CALLS)),
    *in_soak(*((name, number % 3 != 0) for number, name in enumerate(CALLS))),
])  # fmt: skip
def test_code_is_called_in_every_way(name: str, is_fused: bool, tmp_path: Any) -> None:
    net = Called(CALLS[name]).eval()
    qat = prepare_qat_fx(fuse_fx(net) if is_fused else net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    train(qat)
    state = qat.state_dict()
    assert_one_arithmetic(qat, (X,), tmp_path, [(X * 0.5,)], has_float_code=True)
    fresh = prepare_qat_fx(fuse_fx(net) if is_fused else net, {"": qconfig()})
    fresh.load_state_dict(state)
    fresh.eval()
    set_fake_quantize(fresh, FakeQuantState.VALIDATION)
    for a, b in zip(as_numbers(qat(X)), as_numbers(fresh(X)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_every_call_in_the_graph_has_scales_of_its_own() -> None:
    qat = prepare_qat_fx(Called(CALLS["a function called twice"]).eval(), {"": qconfig()})
    calibrate(qat, [X], progress=False)
    scales = {n: float(m.scale) for n, m in qat.named_modules() if isinstance(m, FakeQuantize) and "lambda" in n}
    assert len(scales) == 2 and len(set(scales.values())) == 2
