"""A tensor that knows its scale.

While training, a `QTensor` holds real values (integer times scale) and carries gradients. In a converted model it
holds the integers themselves, in a float32 carrier that represents them exactly. Either way `int_repr()` gives the
integers and `dequantize()` the real values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch import sharing
from horizon_plugin_pytorch.asking.stack import is_recomputing
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.dtype import QuantDType, as_dtype, qbool, qint8
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.function_handlers import (  # noqa: F401  # some were defined here, and can still be imported
    calling_line,
    described,
    handle,
    handler_of,
    is_backward,
    keeps_scale,
    name_of,
    unsupported,
)
from horizon_plugin_pytorch.in_place import (  # noqa: F401  # some were defined here, and can still be imported
    FOLLOWERS,
    LentValuesError,
    StaleValues,
    TensorWithScale,
    become,
    counting_writes,
    follow_views,
    reader,
    require_own_memory,
    settled,
    show,
    stale_error,
    write,
)
from horizon_plugin_pytorch.plain_values import array_ufunc, plain_arguments
from horizon_plugin_pytorch.running import (
    asked_in_forward,
    asked_while_running,
    current_forward,
    interceptor,
    is_hybrid,
    is_in_forward,
    is_of_model,
)
from horizon_plugin_pytorch.torch_functions import (  # noqa: F401  # some were defined here, and can still be imported
    METADATA_FUNCTIONS,
    REVEALING,
    SHAPED_LIKE,
    STAYING,
    is_metadata,
    is_metadata_name,
    pad_circular,
    plain_tensors,
    reads_no_numbers,
    unseen,
)
from horizon_plugin_pytorch.untraced import is_recorded

_TRUE = 64  # the integer of a boolean that counts as the number 1


class QTensor(TensorWithScale):
    """Real values on an integer grid, or the integers of that grid, with scale and format.

    Args:
        data: real values (floating point), or the integers themselves (an integer tensor).
        scale: tensor of one element, or of one per channel.
        dtype: `qint8`, `qint16`, `qint32` or `qbool`.
        per_channel_axis: the channel axis of a per-channel scale, -1 for one scale.

    >>> q = QTensor(torch.tensor([3, -7], dtype=torch.int8), torch.tensor([0.5]), "qint8")
    >>> q.dequantize()
    tensor([ 1.5000, -3.5000])
    >>> q.reshape(2, 1).q_scale()
    tensor([0.5000])
    """

    _scale: Tensor
    _format: QuantDType
    _axis: int
    _bytes: ByteTensor | None = None  # the integers, while nobody has asked for them in another type
    _laid: Tensor | None = None  # what lies as this tensor does in float, where its numbers do not
    _is_integer: bool
    _is_rounded: bool
    _is_deferred: bool = False
    _range: tuple[int, int] | None = None
    _forward: int = 0  # that made it, if somebody counts them

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor | float,
        dtype: QuantDType | str,
        per_channel_axis: int = -1,
        zero_point: Any = None,
    ) -> QTensor:
        if zero_point is not None and bool((torch.as_tensor(zero_point) != 0).any()):
            raise ValueError("QTensor is symmetric: zero_point must be 0 or None.")
        if not isinstance(scale, Tensor):
            scale = torch.tensor([float(scale)], dtype=torch.float32, device=data.device)
        channels = 1 if per_channel_axis < 0 else data.shape[per_channel_axis] if per_channel_axis < data.dim() else 0
        if scale.numel() not in (1, channels):
            raise ValueError(
                f"QTensor: {scale.numel()} scales do not fit data of shape {tuple(data.shape)} with "
                f"per_channel_axis={per_channel_axis}; give one scale, or one for each channel of that axis."
            )
        if as_dtype(dtype) == qbool:
            return bool_qtensor(data != 0, is_integer=not data.is_floating_point())
        if data.is_floating_point():
            return real_qtensor(data, scale, as_dtype(dtype), per_channel_axis)
        return integer_qtensor(data.to(_carrier(as_dtype(dtype))), scale, as_dtype(dtype), per_channel_axis)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # everything is set in __new__

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        """The number format, such as `qint8`.

        The forward of a model that runs its own code, by running or in eager mode, gets the answer of the float tensor
        it was written for, ``torch.float32`` (``torch.bool`` for `qbool`): it asks
        ``torch.finfo(x.dtype)`` or ``mask.to(x.dtype)``.
        """
        if not asked_while_running():
            return self._format
        return torch.bool if self._format == qbool else torch.float32

    @property
    def scale(self) -> Tensor:
        """The step between two neighbouring values."""
        return self._scale

    @property
    def zero_point(self) -> Tensor:
        """Zeros: quantization is symmetric."""
        return self.q_zero_point()

    @property
    def per_channel_axis(self) -> int:
        """The axis of a per-channel scale, -1 if there is one scale."""
        return self._axis

    @property
    def is_integer(self) -> bool:
        """Does it hold integers (converted model) rather than real values (training)?"""
        return self._is_integer

    @property
    def is_rounded(self) -> bool:
        """Do its values lie on the grid? False while calibrating, where nothing is quantized yet."""
        return self._is_rounded

    @property
    def is_deferred(self) -> bool:
        """Are only the integers known, and the real values computed when something asks for them?"""
        return self._is_deferred

    @property
    def _grid(self) -> Tensor | None:
        """The integers beside real values."""
        self._unpack()
        return self.__dict__["_grid"]

    @_grid.setter
    def _grid(self, grid: Tensor | None) -> None:
        self.__dict__["_grid"] = grid

    def _unpack(self) -> None:
        """Let integers that are here as bytes be here as float32."""
        if self._bytes is None:
            return
        with plain_tensors(), torch.inference_mode(self.is_inference()):  # as this tensor was made
            floats = self._bytes.floats()
            if floats.is_inference() != self.is_inference():  # made for another one
                floats = floats.clone()
        if self._is_integer:
            with plain_tensors():
                self.data = floats
            self._is_deferred = False
        else:
            self.__dict__["_grid"] = floats
        if sharing.place_of(floats) != sharing.place_of(self._bytes.laid):
            self._laid = self._bytes.laid
        self._bytes = None

    @property
    def has_bytes(self) -> bool:
        """Are its integers here in int8 or int16, as layers on integer kernels hand them on?"""
        return self._bytes is not None

    def as_bytes(self) -> Tensor:
        """The integers for a layer that takes int8 and int16 too: in such a type if that is how they are here."""
        if self._bytes is None:
            return self.as_grid()
        self._require_unchanged()
        return self._bytes.values

    @property
    def grid(self) -> Tensor | None:
        """The integers, if this tensor was computed on them; None on the approximate training route."""
        if self._is_integer or self._format == qbool:
            return self.plain()
        self._require_unchanged()
        return self._grid

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and largest integer that can occur: the format's, or less after a ReLU."""
        return self._range or (self._format.min, self._format.max)

    def set_range(self, low: int, high: int) -> None:
        """Promise that all integers lie in ``[low, high]``."""
        is_whole = low <= self._format.min and high >= self._format.max
        self._range = None if is_whole else (low, high)

    def q_scale(self) -> Tensor:  # type: ignore[override]
        """The scale."""
        return self._scale

    def q_zero_point(self) -> Tensor:  # type: ignore[override]
        """The zero point: always zero, quantization is symmetric."""
        return torch.zeros_like(self._scale, dtype=torch.long)

    def q_per_channel_axis(self) -> int:
        """The axis of a per-channel scale, -1 if there is one scale."""
        return self._axis

    def _require_unchanged(self) -> None:
        """Insist that nobody wrote to real values that are one with this tensor in float."""
        by = sharing.written_loan(self) if sharing.is_known(self) else None
        if by is not None:
            raise LentValuesError(by, reader())

    def plain(self) -> Tensor:
        """What the tensor holds, as an ordinary tensor."""
        self._require_unchanged()
        return self._payload()

    def _payload(self) -> Tensor:
        self._unpack()
        with plain_tensors():
            if self._is_deferred:
                assert self._grid is not None
                self.data = self._scaled(self._grid)
                self._is_deferred = False
            return super().as_subclass(Tensor)

    def as_grid(self) -> Tensor:
        """The integers, as an ordinary float32 tensor (float64 for `qint32`)."""
        if self._is_integer or self._format == qbool:
            return self.plain()
        if self._grid is not None:
            self._require_unchanged()
            return self._grid
        steps = self.plain().detach().to(_carrier(self._format)) / _broadcast(self._scale, self._axis, self.dim())
        return steps.round_().clamp_(self._format.min, self._format.max)

    def int_repr(self) -> Tensor:
        """The integers in their storage type (``torch.int8`` for `qint8`)."""
        return self.as_grid().to(self._format.storage)

    def dequantize(self) -> Tensor:
        """The real values, as an ordinary tensor with memory of its own."""
        if self._is_integer or self._format == qbool:
            return self.as_real()
        return self.lent(f"`dequantize`{calling_line()}" if is_in_forward() else "")

    def lent(self, by: str) -> Tensor:
        """Real values for code of the user's, which may write to them: they have memory of their own.

        Args:
            by: who gives them, with its line, where this is the forward of a model: in float they are this tensor.
        """
        self._require_unchanged()
        if self._format == qbool:  # booleans, and no real values, in float
            return self.as_real()
        with counting_writes():
            is_new = self._is_deferred and self._grid is not None and not self.requires_grad
            out = self._scaled(self._grid) if is_new else self._payload().clone()  # type: ignore[arg-type]
        if by:
            sharing.lend(self, out, by, StaleValues.make_of)
        return out

    def shared(self, by: str) -> Tensor:
        """Values for a float operator that rarely writes to them: no copy, and who reads this tensor later is told.

        Booleans are such, as in float.

        Args:
            by: the operator, with its line.
        """
        if self._format == qbool:
            return self.plain().bool()
        if self._is_integer:
            return self.as_real()
        if self._is_deferred or self.is_inference():
            return self.lent(by)
        out = self.plain()
        sharing.lend(self, out, by)
        return out

    def as_real(self) -> Tensor:
        """The real values, for code that does not write to them: in training they are the memory of this tensor."""
        if self._format == qbool:
            return self.plain().float()
        if not self._is_integer:
            return self.plain()
        return self._scaled(self.plain())

    def _scaled(self, grid: Tensor) -> Tensor:
        return _real(grid, self._scale, self._axis)

    def as_subclass(self, cls: Any) -> Any:
        """As torch has it; a forward of the user's that asks for an ordinary tensor gets one of real values."""
        is_asked = cls is Tensor and asked_in_forward()
        return self.dequantize() if is_asked else super().as_subclass(cls)

    def as_integers(self) -> QTensor:
        """The same numbers as a converted model has them: the integers themselves."""
        if self._bytes is not None:
            self._require_unchanged()
            out = byte_qtensor(self._bytes, self._scale, self._format)
            out._range = self._range
            return out
        out = integer_qtensor(self.as_grid(), self._scale, self._format, self._axis)
        out._range = self._range
        return out

    def _as_training(self) -> QTensor:
        """The same tensor as a training stage has it; for one that is new, of which nobody else knows."""
        if self._bytes is None or is_recorded():
            return exact_qtensor(self, self._scale)
        self._is_integer = False
        return self

    def as_numbers(self) -> QTensor:
        """Booleans as the integers 0 and 64 of the scale 1/64; other formats as they are.

        Averages, resizing and limits keep the scale of their input: with the scale 1 each of them would give 0 or 1.
        Powers of two keep products with a mask exact, and averages of up to 64 booleans.
        """
        if self._format != qbool:
            return self
        scale = torch.full_like(self._scale, 1 / _TRUE)
        out = integer_qtensor(self.plain().float() * _TRUE, scale, qint8)
        out.set_range(0, _TRUE)
        return out if self._is_integer else exact_qtensor(out, scale)

    def like(self, payload: Tensor, grid: Tensor | None = None) -> QTensor:
        """`payload` with this tensor's scale and format."""
        out = payload.as_subclass(QTensor)
        out._scale, out._format, out._axis = self._scale, self._format, self._axis
        out._is_integer, out._is_rounded, out._grid = self._is_integer, self._is_rounded, grid
        out._range, out._forward = self._range, self._forward
        return out

    @property
    def _is_of_earlier_forward(self) -> bool:
        """Did a forward make it that is over, of a model whose code is seen only while it runs?"""
        if not 0 < self._forward < current_forward():
            return False
        if any(map(is_of_model, sharing.taken_of(self))):  # a constant of the model, that is quantized once
            self._forward = 0
        return self._forward != 0

    def _belong(self, forward: int) -> None:
        """Let it be a tensor of a forward: its input."""
        self._forward = forward

    def alias(self) -> QTensor:
        """Another tensor object of the same values."""
        if self._bytes is not None:
            self._require_unchanged()
            return self._of_bytes(self._bytes)
        if self._is_deferred and not self._is_integer:
            assert self._grid is not None
            return self.with_grid(self._grid)
        return self.like(self.plain().view_as(self.plain()), self._grid)

    def unrounded(self, values: Tensor) -> QTensor:
        """Other real values, that no longer lie on the grid."""
        out = self.like(values)
        out._is_rounded = False
        return out

    def overwrite(self, other: Tensor) -> bool:
        if not isinstance(other, QTensor):
            return False
        values, mine = other.plain(), self._payload()
        if values.shape != mine.shape or values.dtype != mine.dtype:
            return False
        with torch.no_grad():
            mine.copy_(values)
        for name in ("_scale", "_format", "_axis", "_grid", "_is_integer", "_is_rounded", "_range", "_forward"):
            setattr(self, name, getattr(other, name))
        return True

    def with_grid(self, grid: Tensor) -> QTensor:
        """Other integers of this scale and format, whose real values are computed when something asks for them."""
        if self._is_integer:  # as a module that `preserve_qat_mode` has kept is given them
            return self.like(grid)
        if is_recorded():
            return self.like(self._scaled(grid), grid)
        out = self.like(_placeholder(grid), grid)
        out._is_deferred = True
        return out

    def with_bytes(self, values: Tensor, laid: Tensor | None = None) -> QTensor:
        """Other integers of this scale and format, in int8 or int16.

        Args:
            laid: a tensor that lies in its memory as float has it; None if they are no view.
        """
        return self._of_bytes(ByteTensor(values, laid))

    def lying_as(self, laid: Tensor) -> QTensor:
        """The same tensor, of which this is known: `laid` lies in its memory as it does in float."""
        self._laid = laid
        return self

    def _of_bytes(self, integers: ByteTensor) -> QTensor:
        out = byte_qtensor(integers, self._scale, self._format)
        out._is_integer, out._range, out._forward = self._is_integer, self._range, self._forward
        return out

    def with_scale(self, scale: Tensor, factor: float) -> QTensor:
        """The tensor times a positive number: the same integers with the scale ``scale = self.scale * factor``."""
        if self._is_integer:
            out = self.like(self.plain())
        elif self._is_deferred:
            assert self._grid is not None
            out = self.with_grid(self._grid)
        else:
            out = self.like(self.plain() * factor, self._grid)
        out._scale = scale
        return out

    def spoil(self, change: sharing.Write) -> None:
        """Refuse readers from now on: a write changed this tensor through another one."""
        _Stale.make_of(self, change)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "integers" if self._is_integer else "values"
        axis = f", per_channel_axis={self._axis}" if self._axis >= 0 else ""
        return f"QTensor({kind}={self._payload()!r}, scale={self._scale!r}, dtype={self._format}{axis})"

    def __format__(self, spec: str) -> str:
        """``f"{x.max():.2f}"`` spells the real number; a tensor with axes prints as what it is."""
        if not spec or self.dim():
            return super().__format__(spec)
        return format((self.plain() if self._format == qbool else self.as_real()).item(), spec)

    def __deepcopy__(self, memo: dict) -> QTensor:
        out = self.like(self.plain().detach().clone(), None if self._grid is None else self._grid.clone())
        out._scale = self._scale.detach().clone()
        out.requires_grad_(self.requires_grad)
        memo[id(self)] = out
        return out

    __array_ufunc__ = array_ufunc

    def __reduce_ex__(self, proto: Any) -> Any:
        state = {name: getattr(self, name) for name in ("_axis", "_grid", "_is_integer", "_is_rounded", "_range")}
        return _rebuild, (self.plain().detach(), self._scale, self._format, state, self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            if func in REVEALING:
                args[0].plain()
            with plain_tensors():
                return func(*args, **kwargs)
        model = interceptor()
        if model is not None:
            out = model(func, args, kwargs)
            if out is not NotImplemented:
                return out
        elif is_backward() and not is_recomputing():  # the backward of an `autograd.Function` of the user's
            args, kwargs = pytree.tree_map(lambda x: x.as_real() if isinstance(x, QTensor) else x, (args, kwargs))
            return func(*args, **kwargs)
        if len(types) > 1 and any(getattr(t, "hands_over", False) for t in types):
            return NotImplemented  # the other kind calls again, with ordinary tensors
        try:
            return _with_scales(func, args, kwargs)
        except NotImplementedError as error:
            if type(error) is not NotImplementedError or not is_hybrid():
                raise
        by = f"{described(func)}, which runs in float"
        args, kwargs = pytree.tree_map(lambda x: x.shared(by) if isinstance(x, QTensor) else x, (args, kwargs))
        return func(*args, **kwargs)


def _with_scales(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What a function on quantized tensors gives, by its handler.

    Raises:
        NotImplementedError: it would have to know what to do with the scales.
    """
    handler = handler_of(func)
    if handler is None:
        raise unsupported(func)
    if kwargs.get("out") is not None:
        raise NotImplementedError(f"{described(func)} has no quantized form with `out`: use its result instead.")
    plain_args, plain_kwargs = plain_arguments(args, kwargs, is_index=func in _INDEXING)
    out = handler(func, plain_args, plain_kwargs)
    follow_views(func, args, out, QTensor)
    return settled(func, args, kwargs, out)


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class _Stale(sharing.Spoiled, QTensor):
    """A tensor that was changed through another one, which shows its memory in float; reading it is an error.

    Its shape and device can be asked for.
    """

    _valid = QTensor

    def refuse(self) -> UnsupportedOperatorError:
        """The error for a reader."""
        return stale_error(self._change)

    def __getattr__(self, name: str) -> Any:
        if name in QTensor.__annotations__:
            raise self.refuse()
        raise AttributeError(name)

    def plain(self) -> Tensor:
        raise self.refuse()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Stale()"

    def __deepcopy__(self, memo: dict) -> QTensor:
        raise self.refuse()

    def __reduce_ex__(self, proto: Any) -> Any:
        raise self.refuse()

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in METADATA_FUNCTIONS and func not in REVEALING:
            with plain_tensors():
                return func(*args, **kwargs or {})
        x = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Stale))
        if func is Tensor.__setitem__ and x is args[0] and x.is_written_back(*args[1:]):
            return x.assign_back(*args[1:])
        raise x.refuse()


def real_qtensor(
    value: Tensor,
    scale: Tensor,
    dtype: QuantDType,
    per_channel_axis: int = -1,
    grid: Tensor | None = None,
    is_rounded: bool = True,
) -> QTensor:
    """A training-stage QTensor: real values, and their integers where these are known exactly."""
    out = value.as_subclass(QTensor)
    out._scale, out._format, out._axis, out._grid = scale, dtype, per_channel_axis, grid
    out._is_integer, out._is_rounded, out._forward = False, is_rounded, current_forward()
    return out


def taken(out: QTensor, x: Tensor, by: str) -> QTensor:
    """A quantized tensor that a stub made of an ordinary one, which the user may write to later.

    Args:
        by: the stub, with its line.
    """
    if sharing.shows(out, x):  # as long as nothing is rounded
        out = out.like(out._payload().clone())
    sharing.lend(out, x, by)
    if isinstance(x, torch.nn.Parameter):  # a constant, which later forwards may read
        out._forward = 0
    return out


def _carrier(dtype: QuantDType) -> torch.dtype:
    """The floating-point type that represents every integer of the format."""
    return torch.float32 if dtype.bits <= 24 else torch.float64


def _placeholder(grid: Tensor) -> Tensor:
    """A tensor of that shape without memory of its own, until its values are wanted."""
    return grid.new_empty(()).expand(grid.shape)


def exact_qtensor(integers: QTensor, scale: Tensor) -> QTensor:
    """A training-stage QTensor of known integers. Its real values are computed when something asks for them."""
    is_deferred = not is_recorded()  # who records does not see the values that fill a tensor later
    if is_deferred and integers._bytes is not None:
        out = byte_qtensor(integers._bytes, scale, integers._format)
        out._is_integer, out._range = False, integers._range
        return out
    grid = integers.plain()
    values = _placeholder(grid) if is_deferred else _real(grid, scale, integers._axis)
    out = real_qtensor(values, scale, integers._format, integers._axis, grid)
    out._is_deferred, out._range = is_deferred, integers._range
    return out


def integer_qtensor(grid: Tensor, scale: Tensor, dtype: QuantDType, per_channel_axis: int = -1) -> QTensor:
    """A converted-stage QTensor: integers in a float32 carrier."""
    out = grid.as_subclass(QTensor)
    out._scale, out._format, out._axis, out._grid = scale, dtype, per_channel_axis, None
    out._is_integer, out._is_rounded, out._forward = True, True, current_forward()
    return out


def byte_qtensor(integers: ByteTensor, scale: Tensor, dtype: QuantDType) -> QTensor:
    """A converted-stage QTensor of integers that are here as bytes, until somebody asks for them in float32."""
    with unseen():
        out: Any = integers.placeholder()
    out.__class__ = QTensor  # nobody has seen it: `as_subclass` would make a second tensor
    out.__dict__.update(
        _scale=scale, _format=dtype, _axis=-1, _grid=None, _is_integer=True, _is_rounded=True,
        _forward=current_forward(), _bytes=integers, _is_deferred=True,
    )  # fmt: skip
    return out


def bool_qtensor(values: Tensor, is_integer: bool = True) -> QTensor:
    """Booleans as a QTensor; it holds the same in training and after conversion.

    Args:
        is_integer: of a converted model? Numbers that are made of it are then integers.

    >>> bool_qtensor(torch.tensor([True, False]), is_integer=True).dequantize()
    tensor([1., 0.])
    """
    out = integer_qtensor(values, torch.ones(1, dtype=torch.float32, device=values.device), qbool)
    out._is_integer = is_integer
    return out


def _rebuild(data: Tensor, scale: Tensor, dtype: QuantDType, state: dict[str, Any], requires_grad: bool) -> QTensor:
    out = real_qtensor(data, scale, dtype)
    for name, value in state.items():
        setattr(out, name, value)
    return out.requires_grad_(requires_grad)  # type: ignore[return-value]


def _real(grid: Tensor, scale: Tensor, axis: int) -> Tensor:
    """The real values of integers; rounding leaves zeros of either sign, and each of them is +0 here."""
    return torch.mul(grid, _broadcast(scale, axis, grid.dim())).add_(0.0)


def _broadcast(scale: Tensor, axis: int, dim: int) -> Tensor:
    if axis < 0 or scale.numel() == 1:
        return scale.reshape(()) if dim == 0 else scale
    shape = [1] * dim
    shape[axis] = -1
    return scale.reshape(shape)
