"""Who asks for the class of a traced value: the user's code gets that of a tensor, functions written in C the true one.

For torch's C code a class is a promise about memory: taking a proxy for a tensor, it would read what is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.tracing import trace
from horizon_plugin_pytorch.capture.type_tests import tell_type_tests
from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
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


@pytest.mark.slow
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


def _is_like(x: Any) -> Any:
    is_same = x.is_same_size(x + 1)
    return is_same


class Kept:
    is_same: Any = None


def _keeps(x: Any) -> bool:
    Kept.is_same = x.is_same_size(x + 1)
    return Kept.is_same is False


def _asks_later(x: Any) -> bool:
    is_cuda = x.is_cuda
    size = x.dim()
    return is_cuda is False or size == 3


def _asks_numbers(x: Any) -> bool:
    size = x.dim()
    return size is 4  # noqa: F632  # as clients write it


@pytest.mark.parametrize("answer", [lambda x: _is_like(x) is True, _keeps, _asks_later, _asks_numbers])
def test_what_is_not_known_is_not_compared_later(answer: Any) -> None:
    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: .* `is True` and `is False` cannot compare"):
        trace(ComparesTruth(answer))


def _compares_tensors(x: Any) -> bool:
    flag = x > 0
    return flag is True


def test_tensors_may_be_compared_with_true() -> None:
    assert trace(ComparesTruth(_compares_tensors)).nodes


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


@pytest.mark.parametrize(("is_eager", "count"), [(False, 1), (True, 5)])
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


QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "callable": lambda x: callable(x) or callable(x.shape) or not callable(x.relu),
    "Callable": lambda x: isinstance(x, Callable) or isinstance(x + 1, Callable),
    "the type of a tensor": lambda x: type(x) is not Tensor or type(x).__name__ != "Tensor",
    "the type of a size": lambda x: type(x.shape[0]) is not int or type(x.shape) is not torch.Size,
    "the type of parts": lambda x: type(x.chunk(2, 1)) not in (list, tuple),
    "the type in a function": lambda x: not _is_plain(x),
    "what else type is for": lambda x: isinstance(x, type) or not isinstance(Tensor, type),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_types_are_answered_while_tracing(name: str) -> None:
    graph = trace(ComparesTruth(QUESTIONS[name]))
    assert not any(node.target is operator.add and node.users for node in graph.nodes)
    assert "type" not in globals() and "callable" not in globals()


class AsksArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()

    def forward(self, batch: Any, sizes: Any) -> Tensor:
        x = self.quant(batch["image"] if type(batch) is dict else batch)
        return x * 2 if type(sizes) in (list, tuple) and type(sizes[0]) is int else x


def test_types_of_containers_are_answered_with_an_example() -> None:
    graph = trace(AsksArguments(), (({"image": torch.ones(1, 2, 4, 4)}, [3, 4]), {}))
    assert operator.mul in [node.target for node in graph.nodes]


@wrap()
def a_function(x: Tensor) -> Any:
    return lambda y: y + x


class CallsTheUnknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = a_function(x)
        return made(x) if callable(made) else x


def test_a_class_that_is_not_known_is_told() -> None:
    with pytest.warns(QuantizationWarning, match=r"asks for the class of a value \(test_classes_of_proxies.py:\d+\)"):
        trace(CallsTheUnknown())


@pytest.mark.parametrize(
    "make", [lambda x: torch.tensor(x.shape[0] > 1), lambda x: torch.as_tensor(x.shape[0]), lambda x: torch.tensor(x)]
)
def test_tensors_of_what_is_traced_are_refused_with_what_to_write(make: Any) -> None:
    with pytest.raises(
        TraceError, match=r"test_classes_of_proxies.py:\d+: torch.tensor\(\) .* A size takes part as it"
    ):
        trace(ComparesTruth(make))


LEGACY = (torch.HalfTensor, torch.FloatTensor)


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: isinstance(x, torch.FloatTensor),
        lambda x: isinstance(x, (list, torch.cuda.LongTensor)),
        lambda x: isinstance(x, LEGACY),
        lambda x: isinstance(x.shape, torch.FloatTensor),
    ],
)
def test_classes_that_are_written_in_c_are_refused(answer: Any) -> None:
    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: torch.FloatTensor and its like cannot be"):
        trace(ComparesTruth(answer))


class AsksFacts(nn.Module):
    """Asks for what tracing knows without any numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.ff = QuantStub(), nn.Conv2d(2, 2, 1), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        sizes, half = x.shape, x.shape[2] / 2
        FOUND["classes"] = [
            isinstance(sizes, torch.Size) and isinstance(x.size(), tuple) and isinstance(x.shape[1:], torch.Size),
            isinstance(x.shape[0], int) and isinstance(x.size(1), numbers.Number) and isinstance(x.dim() + 1, int),
            isinstance(half, float) and not isinstance(half, int) and not isinstance(x.shape[0], Tensor),
            isinstance(x, torch.autograd.Variable) and isinstance(self.ff.add(x, x), Tensor),
            isinstance(x.topk(1, 1), tuple)
            and isinstance((x > 0).float().sum(1), Tensor)
            and isinstance(x.device, torch.device),
            not hasattr(x.device, "mask") and hasattr(x.device, "index") and not hasattr(x.shape, "mask"),
            x.layout is torch.strided and x.is_sparse is False and not x.is_quantized,
        ]
        return x


@pytest.mark.slow
def test_facts_of_tensors_have_the_classes_of_float() -> None:
    FOUND.clear()
    for _ in range(20):
        trace(AsksFacts())
    assert FOUND == {"classes": [True] * 7}


class AsksParts(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch.image + 1 if hasattr(batch.image, "mask") else batch.image


def test_an_attribute_of_an_attribute_is_refused() -> None:
    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: whether a value has the attribute `mask`"):
        trace(AsksParts())


TABLE = {8: 2.0}


class LooksUp(nn.Module):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.quant, self.look = QuantStub(), look

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return x * (2.0 if self.look(x) else 3.0)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: TABLE.get(x.shape[-1], 3.0) == 2.0,
        lambda x: x.shape[-2:] in {(8, 8)},
        lambda x: (x.dim(), x.size(0)) in TABLE,
        lambda x: str(x.device) == "cpu",
    ],
)
def test_sizes_that_are_looked_up_are_told(look: Any) -> None:
    line = rf"test_classes_of_proxies.py:{look.__code__.co_firstlineno}"
    with pytest.warns(QuantizationWarning, match=rf"looks for a size, or for a device, .*{line}"):
        trace(LooksUp(look))


def test_tensors_as_keys_and_printed_sizes_are_left_alone(capsys: Any, recwarn: Any) -> None:
    def look(x: Tensor) -> bool:
        print(x.shape, f"{x.device}")
        return {x: True}[x]

    trace(LooksUp(look))
    assert not recwarn.list


class AsksResults(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y = unknown(x)
        return y[0] if isinstance(y, tuple) else y


def test_a_class_that_nobody_knows_is_told() -> None:
    with pytest.warns(QuantizationWarning, match=r"asks for the class of a value \(test_classes_of_proxies.py:\d+\)"):
        trace(AsksResults())


@pytest.mark.parametrize(
    "function",
    [
        lambda v: v.reshape(2, 3, v.shape[0] // 6, *v.shape[1:]),
        lambda v: v.view(2, -1, *v.size()[1:]),
        lambda v: v.reshape([-1, *v.shape]),
    ],
)
def test_a_shape_that_is_unpacked_has_a_remedy_that_fits(function: Any) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: how many axes .*`v.unflatten\(0, "):
        trace(Net())


def test_what_is_looked_up_or_made_an_array_is_named_without_words_of_ours() -> None:
    class Keys(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return {2: x}[x.shape[0]]

    class Arrays(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy())

    for net, words in ((Keys(), "looked up in a dictionary"), (Arrays(), "got a tensor that is traced")):
        with pytest.raises(TraceError, match=words):
            trace(net)


def test_the_length_of_a_tensor_has_a_remedy_that_fits() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), -1)

    with pytest.raises(TraceError, match=r"test_classes_of_proxies.py:\d+: .*Write `x.shape\[0\]`"):
        trace(Net())


def test_what_is_written_instead_of_an_unpacked_shape_is_traced() -> None:
    class Net(nn.Module):
        def forward(self, v: Tensor) -> tuple[Tensor, ...]:
            height, width = v.shape[1:]
            first = v.unflatten(0, (2, 3, v.shape[0] // 6)), v.flatten(0, 1), v.reshape(2, -1, height, width)
            parts = v.reshape(*v.shape[:2], 2, -1), v.reshape(2, -1, *v.shape[-2:]), v.reshape([*v.shape[1:2], -1])
            return *first, *parts, v.reshape([-1, *v.size()[-3:-1]])

    x = torch.randn(12, 3, 4)
    for got, wanted in zip(torch.fx.GraphModule(Net(), trace(Net()))(x), Net()(x), strict=True):
        assert torch.equal(got, wanted)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


def test_what_the_package_asks_through_the_standard_library_is_not_told(recwarn: Any) -> None:
    trace(Scales())
    assert not recwarn.list


class AsksTheStandardLibrary(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y = unknown(x)
        return y.first if dataclasses.is_dataclass(y) else y


def test_what_the_user_asks_through_the_standard_library_is_told() -> None:
    with pytest.warns(QuantizationWarning, match="asks for the class of a value"):
        trace(AsksTheStandardLibrary())


class GivesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(2, 2, 1)
        self.register_buffer("state", torch.zeros(1, 2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(x))
        self.state.data = y
        return y


def test_eager_mode_names_lines_that_give_away_memory() -> None:
    set_march(March.NASH_M)
    model = GivesMemory().eval()
    model.qconfig = qconfig("qint8")
    with pytest.warns(QuantizationWarning, match=r"`x.data = y` \(test_classes_of_proxies.py:\d+\).*dequantize"):
        prepare_qat(model)
