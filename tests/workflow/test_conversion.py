"""`convert` and `convert_fx`: both take every prepared model, and each of their arguments acts or is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import qat, quantized
from horizon_plugin_pytorch.quantization import (
    PrepareMethod,
    QuantWrapper,
    calibrate,
    convert,
    convert_fx,
    fuse_fx,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.fx.graph_module import QuantizedGraphModule
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.quantization.quantization_mappings import (
    get_qat_module_mappings,
    get_quantized_module_mappings,
)

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
ROUTES = [*PrepareMethod, "prepare_qat_fx", "prepare_qat"]


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def prepared(route: Any) -> nn.Module:
    torch.manual_seed(0)
    net = QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))).eval()
    net.mark = "kept"
    if isinstance(route, PrepareMethod):
        model = prepare(net, (X,), default_calibration_qconfig_setter, method=route, out_dir=None)
    elif route == "prepare_qat_fx":
        model = prepare_qat_fx(net, {"": get_default_qconfig()})
    else:
        net.qconfig = get_default_qconfig()
        model = prepare_qat(net)
    calibrate(model, [X], progress=False)
    return model


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("verb", [convert, convert_fx])
@pytest.mark.parametrize("route", ROUTES, ids=str)
@torch.no_grad()
def test_both_verbs_take_every_prepared_model(route: Any, verb: Any, inplace: bool) -> None:
    model = prepared(route)
    expected, before = model(X), type(model.quant)
    result = verb(model, inplace=inplace)
    assert torch.equal(result(X), expected)
    assert not any(isinstance(m, qat.module.QATModule) for m in result.modules())
    assert result.mark == "kept"
    if not inplace:
        assert type(model.quant) is before and torch.equal(model(X), expected)
    elif verb is convert:
        assert result is model


@pytest.mark.parametrize("verb", [convert, convert_fx])
@pytest.mark.parametrize("route", ["prepare_qat_fx", PrepareMethod.SYMBOLIC], ids=str)
def test_a_traced_model_becomes_a_quantized_graph_module(route: Any, verb: Any) -> None:
    assert isinstance(verb(prepared(route)), QuantizedGraphModule)


@pytest.mark.parametrize(
    ("args", "kwargs", "is_in_place", "keeps_qconfig"),
    [
        ((), {}, False, False),
        ((False,), {}, False, False),
        ((True,), {}, True, False),
        ((None,), {}, False, False),
        (({"preserved_attributes": ["mark"]},), {}, False, False),
        (({},), {}, False, False),
        ((None, False), {}, False, True),
        (({"preserved_attributes": ["mark"]}, False), {}, False, True),
        (({"preserved_attributes": ["mark"]}, True), {}, False, False),
        ((False, {"preserved_attributes": ["mark"]}, False), {}, False, True),
        ((True, None, False), {}, True, True),
        ((), {"convert_custom_config_dict": {"preserved_attributes": ["mark"]}, "_remove_qconfig": False}, False, True),
        (({"preserved_attributes": ["mark"]},), {"_remove_qconfig": False}, False, True),
    ],
)
@pytest.mark.parametrize("route", ["prepare_qat_fx", PrepareMethod.JIT_STRIP], ids=str)
def test_both_documented_orders_of_arguments(
    route: Any, args: tuple, kwargs: dict, is_in_place: bool, keeps_qconfig: bool
) -> None:
    model = prepared(route)
    before = type(model.quant)
    result = convert_fx(model, *args, **kwargs)
    assert (type(model.quant) is not before) is is_in_place
    assert any("qconfig" in m.__dict__ for m in result.modules()) is keeps_qconfig
    assert result.mark == "kept"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("yes",), {}),
        ((1,), {}),
        ((False, True), {}),
        ((False, ["mark"]), {}),
        ((["mark"],), {}),
        (({}, 0), {}),
        (({},), {"convert_custom_config_dict": {}}),
        ((), {"_remove_qconfig": "no"}),
        ((), {"fast_mode": 2}),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(args: tuple, kwargs: dict) -> None:
    model = prepared("prepare_qat_fx")
    with pytest.raises(TypeError, match="convert_fx"):
        convert_fx(model, *args, **kwargs)


@pytest.mark.parametrize("verb", [convert, convert_fx])
def test_what_is_not_prepared_is_refused(verb: Any) -> None:
    with pytest.raises(TypeError, match="float model"):
        verb(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="already converted"):
        verb(verb(prepared(PrepareMethod.JIT_STRIP)))
    with pytest.raises(TypeError, match="got a Tensor"):
        verb(X)


@pytest.mark.parametrize("verb", [convert, convert_fx])
def test_fast_mode_warns(verb: Any) -> None:
    with pytest.warns(UserWarning, match="fast_mode"):
        verb(prepared("prepare_qat_fx"), fast_mode=True)


def test_a_custom_configuration_says_what_it_cannot_do() -> None:
    model = prepared("prepare_qat_fx")
    with pytest.warns(UserWarning, match="'absent' to preserve"):
        convert_fx(model, {"preserved_attributes": ["absent", "mark"]})
    with pytest.warns(UserWarning, match="ignored: 'preserved_attribute'"):
        convert_fx(model, {"preserved_attribute": ["mark"]})
    with pytest.warns(UserWarning, match="ignored: 'other'"):
        fuse_fx(nn.Sequential(nn.Linear(2, 2)), {"other": 1})
    with pytest.warns(UserWarning, match="ignored: 'other'"):
        prepare_qat_fx(QuantWrapper(nn.Linear(2, 2)), {"": get_default_qconfig()}, {"other": 1})


def test_a_mapping_that_is_not_the_tables_warns() -> None:
    net = QuantWrapper(nn.Linear(2, 2)).eval()
    net.qconfig = get_default_qconfig()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = prepare_qat(net, mapping=get_qat_module_mappings())
    calibrate(model, [torch.randn(2, 2)], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, mapping=get_quantized_module_mappings())
    with pytest.warns(UserWarning, match="differs from the table in.*Linear"):
        prepare_qat(net, mapping={nn.Linear: qat.Conv2d})
    with pytest.warns(UserWarning, match="differs from the table in.*Linear"):
        convert(model, mapping={qat.Linear: quantized.Conv2d})
    only_linear = {nn.Linear: qat.Linear}  # torch would leave the stubs as they are
    with pytest.warns(UserWarning, match="differs from the table in QuantStub, DeQuantStub;"):
        prepare_qat(net, mapping=only_linear)
    with pytest.raises(TypeError, match="mapping is a dictionary"):
        prepare_qat(net, mapping=True)


def test_the_mapping_is_the_operator_tables_and_changing_it_changes_nothing() -> None:
    mapping = get_qat_module_mappings()
    assert mapping[nn.Conv2d] is qat.Conv2d and mapping[nn.Linear] is qat.Linear and len(mapping) > 100
    mapping.clear()
    assert get_qat_module_mappings()[nn.Conv2d] is qat.Conv2d


class _Shared(nn.Module):
    """A model with a second name of a module, so that own scales and shared weights are in its state dict once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = QuantWrapper(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_the_state_dict_of_a_converted_model_is_that_of_both_verbs() -> None:
    model = prepare_qat_fx(_Shared().eval(), {"": get_default_qconfig()})
    calibrate(model, [X], progress=False)
    assert list(convert(model).state_dict()) == list(convert_fx(model).state_dict())
