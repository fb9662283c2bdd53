"""Who asks for the class of a traced value: the user's code gets that of a tensor, functions written in C the true one.

For torch's C code a class is a promise about memory: taking a proxy for a tensor, it would read what is not there.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.tracing import trace
from horizon_plugin_pytorch.capture.type_tests import tell_type_tests
from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import QuantStub, prepare_qat, prepare_qat_fx
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import qconfig

FOUND: dict[str, Any] = {}


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        FOUND["isinstance"] = isinstance(x, Tensor)
        FOUND["in a comprehension"] = [isinstance(v, Tensor) for v in (x, 1.0)]
        FOUND["over lines"] = isinstance(
            x,
            (list, Tensor),
        )
        FOUND["attribute"] = x.__class__ is Tensor
        match x:
            case Tensor():
                FOUND["match"] = True
        FOUND["from C"] = functools.partial(isinstance, x, Tensor)()
        FOUND["mapped from C"] = list(map(isinstance, [x], [Tensor]))
        return x


def test_python_code_is_told_of_tensors_and_c_code_is_not() -> None:
    FOUND.clear()
    for _ in range(20):  # until the interpreter has specialised the calls
        trace(Asks())
    assert FOUND == {
        "isinstance": True, "in a comprehension": [True, False], "over lines": True, "attribute": True, "match": True,
        "from C": False, "mapped from C": [False],
    }  # fmt: skip


class AsksForAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, batch: Any) -> Any:
        x = self.conv(batch)
        x.level = 3
        try:
            FOUND["read"] = x.mask
        except AttributeError as error:
            FOUND["read"] = str(error)
        FOUND["asked"] = [hasattr(v, "mask") for v in (x, x + 1, x.view(-1), batch, [])]
        FOUND["with a default"] = getattr(x, "mask", None), getattr(batch, "mask", 2)
        FOUND["of tensors"] = hasattr(x, "shape") and hasattr(x, "relu") and hasattr(x, "level")
        return x


def test_a_traced_value_has_the_attributes_of_a_tensor() -> None:
    FOUND.clear()
    for _ in range(20):
        trace(AsksForAttributes())
    assert FOUND == {
        "read": "'Tensor' object has no attribute 'mask'",
        "asked": [False] * 5, "with a default": (None, 2), "of tensors": True,
    }  # fmt: skip


class ReadsAttributes(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch.image + getattr(batch, "shift")  # noqa: B009  # as clients write it


def test_an_argument_may_have_attributes_that_are_read() -> None:
    graph = trace(ReadsAttributes())
    assert [node.args[1] for node in graph.nodes if node.target is getattr] == ["image", "shift"]


@wrap()
def unknown(x: Tensor) -> Any:
    return x


class AsksTheUnknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if hasattr(unknown(x), "mask") else x


def test_an_attribute_that_may_be_there_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"test_classes_of_proxies.py:\d+: whether a value has the attribute `mask` is"
    ):
        trace(AsksTheUnknown())


class ComparesTruth(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.quant, self.conv, self.answer = QuantStub(), nn.Conv2d(2, 2, 1), answer

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        return x + 1 if self.answer(x) else x


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.is_same_size(x + 1) is True,
        lambda x: x.is_contiguous() is not False,
        lambda x: (x.shape[0] > 1) is True,
        lambda x: x.is_cuda is True,
    ],
)
def test_what_is_not_known_is_not_compared_with_true(answer: Any) -> None:
    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: .* `is True` and `is False` cannot compare"):
        trace(ComparesTruth(answer))


def test_what_is_known_is_compared_with_true() -> None:
    graph = trace(ComparesTruth(lambda x: x.is_floating_point() is True and x.is_complex() is False))
    assert [node.op for node in graph.nodes].count("call_function") == 1


def _is_plain(x: Any) -> bool:
    return type(x) in (list, torch.Tensor)


class ComparesTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.is_plain = QuantStub(), nn.Conv2d(2, 2, 1), _is_plain

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.conv(x) if type(self.conv) is nn.Conv2d else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        if type(x) == Tensor or type(x).__name__ == "Tensor":  # noqa: E721
            x = self.inner(x)
        if x.__class__ is Tensor:  # answered while tracing
            x = x + 0
        if type(self.conv) is nn.Conv2d and type(self.training) is bool:  # known while tracing
            x = x + 0
        return x if self.is_plain(x) else self.conv(x)


@pytest.mark.parametrize(("is_eager", "count"), [(False, 3), (True, 5)])
def test_lines_that_compare_the_very_class_are_named(is_eager: bool, count: int) -> None:
    with pytest.warns(QuantizationWarning, match="compares the very class") as caught:
        tell_type_tests(ComparesTypes(), is_eager)
    assert str(caught[0].message).count("test_classes_of_proxies.py:") == count


@pytest.mark.parametrize("is_eager", [False, True])
def test_preparing_names_them(is_eager: bool) -> None:
    set_march(March.NASH_M)
    model = ComparesTypes().eval()
    model.qconfig = qconfig("qint8")
    with pytest.warns(QuantizationWarning, match="compares the very class"):
        prepare_qat(model) if is_eager else prepare_qat_fx(model, {"": model.qconfig})


@pytest.mark.parametrize(
    "make", [lambda x: torch.tensor(x.shape[0] > 1), lambda x: torch.as_tensor(x.shape[0]), lambda x: torch.tensor(x)]
)
def test_tensors_of_what_is_traced_are_refused_with_what_to_write(make: Any) -> None:
    with pytest.raises(
        TraceError, match=r"test_classes_of_proxies.py:\d+: torch.tensor\(\) .* A size takes part as it"
    ):
        trace(ComparesTruth(make))
