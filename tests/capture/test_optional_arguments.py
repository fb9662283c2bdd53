"""Arguments that choose code (None, flags, modes, containers): float's answer, or a refusal that names the argument."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError, UnknownCallError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    convert_fx,
    fuse_fx,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
)

X, MASK = torch.linspace(-1, 1, 32).view(2, 4, 2, 2), torch.linspace(0, 1, 32).view(2, 4, 2, 2)


class Mode(enum.Enum):
    NEAR = 1
    FAR = 2


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.quant_mask, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.conv, self.aux = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.heads = nn.ModuleDict({"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)})

    def body(self, x: Tensor) -> Tensor:
        return self.conv(self.quant(x))


class IsNone(Base):
    def forward(self, x, mask=None):
        y = self.body(x)
        if mask is None:
            return self.dequant(self.aux(y))
        return self.dequant(y * self.quant_mask(mask))


class IsNotNone(Base):
    def forward(self, x, mask=None):
        y = self.body(x)
        if mask is not None:
            y = y * self.quant_mask(mask)
        return self.dequant(y)


class EqualsNone(Base):
    def forward(self, x, mask=None):
        y = self.body(x)
        return self.dequant(self.aux(y) if mask == None else y * self.quant_mask(mask))  # noqa: E711


class Truth(Base):
    def forward(self, x, mask=None):
        y = self.body(x)
        if not isinstance(mask, Tensor):
            y = self.aux(y)
        return self.dequant(y)


class Inner(Base):
    def forward(self, y, mask=None):
        return self.aux(y) if mask is None else y * self.quant_mask(mask)


class InSubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x, mask=None):
        return self.dequant(self.inner(self.body(x), mask=mask))


class SubmoduleWithout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x, mask=None):
        return self.dequant(self.inner(self.inner(self.body(x))))


class KeywordOnly(Base):
    def forward(self, x, *, mask=None):
        y = self.body(x)
        return self.dequant(self.aux(y) if mask is None else y * self.quant_mask(mask))


class Flag(Base):
    def forward(self, x, with_aux=False):
        y = self.body(x)
        if with_aux:
            y = self.aux(y)
        return self.dequant(y)


class Named(Base):
    def forward(self, x, task="a"):
        y = self.heads[task](self.body(x))
        return self.dequant(F.relu(y) if task == "b" else y)


class Enumerated(Base):
    def forward(self, x, mode=Mode.NEAR):
        y = self.body(x)
        return self.dequant(self.aux(y) if mode is Mode.FAR else y)


class Counted(Base):
    def forward(self, x, steps=1):
        y = self.body(x)
        for _ in range(steps):
            y = self.aux(y)
        return self.dequant(y)


class Compared(Base):
    def forward(self, x, level=0.5):
        y = self.body(x)
        return self.dequant(self.aux(y) if level > 0.5 else y)


class Scaled(Base):
    """The number takes part, and chooses nothing."""

    def forward(self, x, factor=0.5):
        return self.dequant(self.body(x * factor))


class VarArgs(Base):
    def forward(self, x, *more):
        y = self.body(x)
        if len(more) > 0:
            y = y * self.quant_mask(more[0])
        return self.dequant(y)


class VarKeywords(Base):
    def forward(self, x, **more):
        y, mask = self.body(x), more.get("mask")
        return self.dequant(y if mask is None else y * self.quant_mask(mask))


class VarKeywordsIn(Base):
    def forward(self, x, **more):
        y = self.body(x)
        return self.dequant(y * self.quant_mask(more["mask"]) if "mask" in more else y)


class TensorOrList(Base):
    def forward(self, x):
        if isinstance(x, (list, tuple)):
            x = x[0] + x[1]
        elif torch.is_tensor(x):
            x = x * 2
        return self.dequant(self.body(x))


class KindOfResult(Base):
    def forward(self, x):
        y = self.body(x)
        ys = [y] if isinstance(y, Tensor) else y
        return self.dequant(self.aux(ys[0]))


class ListInput(Base):
    def forward(self, xs):
        y = self.body(xs[0])
        for x in xs[1:]:
            y = self.aux(y) + self.body(x)
        return self.dequant(y)


class DictInput(Base):
    def forward(self, batch):
        y, mask = self.body(batch["image"]), batch.get("mask")
        if "twice" in batch:
            y = self.aux(y)
        return self.dequant(y if mask is None else y * self.quant_mask(mask))


class DictWithNone(Base):
    def forward(self, batch):
        y = self.body(batch["image"])
        return self.dequant(y if batch["mask"] is None else y * self.quant_mask(batch["mask"]))


class TwoTogether(Base):
    def forward(self, x, mask=None, shift=None):
        y = self.body(x)
        if mask is None and shift is None:
            return self.dequant(self.aux(y))
        return self.dequant(y)


class NoDefault(Base):
    def forward(self, x, mask):
        y = self.body(x)
        return self.dequant(y if mask is None else y * self.quant_mask(mask))


class Annotated(Base):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.dequant(self.masked(self.body(x), mask))

    def masked(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return y if mask is None else y * self.quant_mask(mask)


Call = tuple[tuple, dict[str, Any]]
GIVEN, LEFT_OUT, NAMED = ((X, MASK), {}), ((X,), {}), ((X,), {"mask": MASK})
OPTIONAL = [GIVEN, LEFT_OUT, NAMED, ((X, None), {})]
FORMS: dict[type[Base], list[Call]] = {
    IsNone: OPTIONAL,
    IsNotNone: OPTIONAL,
    EqualsNone: OPTIONAL,
    Truth: OPTIONAL,
    InSubmodule: OPTIONAL,
    SubmoduleWithout: OPTIONAL,
    KeywordOnly: [LEFT_OUT, NAMED],
    Flag: [LEFT_OUT, ((X, True), {}), ((X,), {"with_aux": False})],
    Named: [LEFT_OUT, ((X, "b"), {}), ((X,), {"task": "a"})],
    Enumerated: [LEFT_OUT, ((X, Mode.FAR), {})],
    Counted: [LEFT_OUT, ((X, 3), {}), ((X, 0), {})],
    Compared: [LEFT_OUT, ((X, 0.75), {})],
    Scaled: [LEFT_OUT, ((X, 0.75), {})],
    VarArgs: [LEFT_OUT, GIVEN],
    VarKeywords: [LEFT_OUT, NAMED],
    VarKeywordsIn: [LEFT_OUT, NAMED],
    TensorOrList: [LEFT_OUT, (([X, MASK],), {}), (((X, MASK),), {})],
    KindOfResult: [LEFT_OUT],
    ListInput: [(([X],), {}), (([X, MASK],), {}), (([X, MASK, X],), {})],
    DictInput: [
        (({"image": X},), {}),
        (({"image": X, "mask": MASK},), {}),
        (({"image": X, "twice": 1},), {}),
        (({"image": X, "other": 1},), {}),
    ],
    DictWithNone: [(({"image": X, "mask": None},), {}), (({"image": X, "mask": MASK},), {})],
    TwoTogether: [LEFT_OUT, GIVEN, ((X, MASK, X), {})],
    NoDefault: [GIVEN, ((X, None), {})],
    Annotated: [GIVEN, ((X, None), {})],
}
UNKNOWN = (ListInput, DictInput)  # they cannot be traced without example inputs
CASES = [(form, example) for form, calls in FORMS.items() for example in range(-1, len(calls))]


def _prepared(net: nn.Module, method: str, example: Call | None) -> nn.Module:
    """Prepared, and calibrated with the calls that it takes."""
    args, kwargs = (None, None) if example is None else example
    return prepare(
        net, args, None, method, example_kw_inputs=kwargs, qconfig_dict={"": get_default_qconfig()}, out_dir=None
    )


def _answers(model: nn.Module, net: nn.Module, call: Call) -> bool:
    """Is the answer float's? False for a refusal that says what to do."""
    model = copy.deepcopy(model)  # which observes this call only
    try:
        with torch.no_grad():
            model(*call[0], **call[1])  # observes
            found = model(*call[0], **call[1])
    except UnknownCallError as error:
        refusal = str(error)
    else:
        wanted = net(*call[0], **call[1])
        assert (found - wanted).norm() < 0.1 * wanted.norm() + 1e-6
        return True
    assert "JIT_STRIP" in refusal or "example" in refusal
    return False


@pytest.mark.in_turns("method", "form", of=2)
@pytest.mark.parametrize("method", ["symbolic", "jit", "jit-strip"])
@pytest.mark.parametrize(("form", "index"), CASES, ids=[f"{form.__name__}-{i}" for form, i in CASES])
def test_every_call_has_floats_answer_or_is_refused(form: type[Base], index: int, method: str) -> None:
    set_march(March.NASH_M)
    net, calls = form().eval(), FORMS[form]
    if index < 0:
        if method != "symbolic":
            return
        if form in UNKNOWN:
            with pytest.raises(TraceError, match="example_inputs"):
                _prepared(net, method, None)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _prepared(net, method, None)
        assert [_answers(model, net, call) for call in calls].count(True) >= 1
        return
    model = _prepared(net, method, calls[index])
    assert _answers(model, net, calls[index])  # the example itself always runs
    for call in calls:
        _answers(model, net, call)


@pytest.mark.parametrize("form", [IsNone, IsNotNone, InSubmodule, KeywordOnly, TwoTogether, NoDefault, Annotated])
def test_without_example_inputs_a_warning_names_argument_and_line(form: type[Base]) -> None:
    set_march(March.NASH_M)
    with pytest.warns(QuantizationWarning, match=r"`mask`.*test_optional_arguments.py:\d+.*example_inputs"):
        model = prepare_qat_fx(form().eval(), {"": get_default_qconfig()})
    with pytest.raises(UnknownCallError, match="`mask` given, and is called with it left out.*example_inputs"):
        model(X, None) if form in (NoDefault, Annotated) else model(X)


class TakenAsItIs(Base):
    def forward(self, x, mask=None):
        return self.dequant(self.body(x + mask))


class Required(Base):
    def forward(self, x, mask=None):
        assert mask is not None, "a mask"
        return self.dequant(self.body(x + mask))


class Remembers(Base):
    """What it does depends on how often it ran, and not on the mask."""

    grid = None

    def forward(self, x, mask=None):
        if self.grid is None:
            self.grid = torch.ones(1)
        return self.dequant(self.body(x + self.grid))


@pytest.mark.parametrize("form", [TakenAsItIs, Required, Remembers, Scaled, Flag, Named, KindOfResult])
def test_no_warning_where_nothing_depends_on_it(form: type[Base]) -> None:
    set_march(March.NASH_M)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        model = prepare_qat_fx(form().eval(), {"": get_default_qconfig()})
    args = (X, MASK) if form in (TakenAsItIs, Required) else (X,)
    assert _answers(model, form().eval(), (args, {}))


def test_a_call_that_float_refuses_is_refused() -> None:
    set_march(March.NASH_M)
    model = prepare_qat_fx(Required().eval(), {"": get_default_qconfig()})
    with pytest.raises(UnknownCallError, match="`mask`"):
        model(X)


@pytest.mark.parametrize(
    ("form", "example", "call", "message"),
    [
        (IsNone, (X,), GIVEN, r"`mask` None, and is called with it something else"),
        (IsNone, (X, MASK), LEFT_OUT, r"`mask` given, and is called with it left out or None"),
        (
            Flag,
            (X,),
            ((X, True), {}),
            r"`with_aux` False, and is called with it True: the graph has no other case\. Prepare",
        ),
        (Named, (X, "b"), LEFT_OUT, r"`task` 'b', and is called with it 'a'"),
        (Counted, (X, 2), ((X, 3), {}), r"`steps` 2, and is called with it 3.*py:\d+"),
        (VarArgs, (X,), GIVEN, r"`more` of length 0, and is called with it of length 1"),
        (ListInput, ([X, X],), (([X],), {}), r"`xs` of length 2, and is called with it of length 1"),
        (DictInput, ({"image": X},), (({"image": X, "mask": X},), {}), r"`batch` without the key 'mask', .* with the"),
        (DictWithNone, ({"image": X, "mask": None},), (({"image": X, "mask": X},), {}), r"`batch\['mask'\]` None"),
        (TensorOrList, (X,), (([X, X],), {}), r"`x` a Tensor, and is called with it no Tensor"),
    ],
)
def test_a_refusal_names_the_argument(form: type[Base], example: tuple, call: Call, message: str) -> None:
    set_march(March.NASH_M)
    model = _prepared(form().eval(), "symbolic", (example, {}))
    with pytest.raises(UnknownCallError, match=message):
        model(*call[0], **call[1])


def _loaded(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("then", [copy.deepcopy, _loaded, convert_fx], ids=["copied", "loaded", "converted"])
def test_the_check_goes_with_the_model(then: Callable) -> None:
    set_march(March.NASH_M)
    model = _prepared(IsNone().eval(), "symbolic", LEFT_OUT)
    calibrate(model, [(X,)], progress=False)
    later = then(model)
    with torch.no_grad():
        assert torch.equal(later(X), model(X))
    with pytest.raises(UnknownCallError, match="`mask`"):
        later(X, MASK)


def test_a_fused_model_keeps_its_check() -> None:
    set_march(March.NASH_M)
    with pytest.warns(QuantizationWarning, match="`mask`"):
        fused = fuse_fx(IsNone().eval())
    model = prepare_qat_fx(fused, {"": get_default_qconfig()})
    with pytest.raises(UnknownCallError, match="`mask`"):
        model(X)


def test_a_decorated_forward_that_takes_any_keyword_is_named() -> None:
    def decorated(old: Any) -> Any:
        @functools.wraps(old)
        def new(*args: Any, **kwargs: Any) -> Any:
            return old(*args, **kwargs)

        return new

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.fc, self.dequant = QuantStub(), nn.Linear(4, 4), DeQuantStub()

        @decorated
        def forward(self, x: Tensor, **metas: Any) -> Tensor:
            return self.dequant(self.fc(self.quant(x)))

    with pytest.raises(TraceError, match=r"arguments.py:\d+\) is behind a decorator and takes `\*\*metas"):
        prepare_qat_fx(Net().eval(), {"": get_default_qconfig()})


@torch.no_grad()
def test_a_tensor_as_default_is_refused_by_tracing_with_what_to_do() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

        def forward(self, x: Tensor, weights: Tensor = torch.ones(4) * 3) -> Tensor:  # noqa: B008
            return self.dequant(self.fc(self.quant(x))) * weights

    with pytest.raises(TraceError, match=r"`weights` of `Net.forward` \(test_optional_arguments.py:\d+\) has a tensor"):
        prepare_qat_fx(Net(), {"": get_default_qconfig()})
    rows = torch.randn(2, 4)
    net = Net().eval()
    model = prepare(net, (rows,), qconfig_dict={"": get_default_qconfig()}, method="jit-strip", out_dir=None)
    calibrate(model, [(rows,)], progress=False)
    assert torch.allclose(model(rows), net(rows), atol=0.2)
