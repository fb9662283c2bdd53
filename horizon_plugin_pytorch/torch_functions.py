"""What torch's functions, methods and modules do with a tensor: facts about torch, in one place.

Which of them write to their arguments is in `writing.py`; which of them have a quantized form, in the operator table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

plain_tensors = torch._C.DisableTorchFunctionSubclass  # a context in which subclasses are tensors like all others
unseen = torch._C.DisableTorchFunction  # the same, and modes such as that of a watch see nothing of it

# Attributes and methods that ask about a tensor, or about its place in autograd.
METADATA = frozenset(
    "size dim numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed element_size "
    "__len__ shape device requires_grad is_leaf grad_fn ndim layout is_cuda is_cpu is_sparse is_quantized grad names "
    "output_nr _version _backward_hooks _base is_meta is_mps is_xpu is_nested is_mkldnn is_vulkan is_hpu is_ipu is_xla "
    "is_mtia is_maia is_ort retains_grad get_device data_ptr untyped_storage storage retain_grad register_hook "
    "requires_grad_ backward _is_view is_inference is_conj is_neg as_subclass __hash__ __format__ __dir__ "
    "storage_type _typed_storage is_set_to is_same_size is_shared is_pinned has_names nbytes itemsize".split()
)
# Those that show memory to code which does not know of deferred values; these must be there by then.
REVEALING = frozenset(
    getattr(Tensor, name)
    for name in (
        "as_subclass", "data_ptr", "untyped_storage", "requires_grad_", "register_hook", "stride", "storage_offset",
        "is_contiguous",
    )
)  # fmt: skip
SIZE_METHODS = frozenset({"size", "dim", "numel", "stride", "get_device", "ndimension", "nelement"})  # give numbers
_SHAPES = (Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, torch.numel)

VIEW_ATTRIBUTES = ("T", "mT", "H", "mH", "data")  # attributes that show the memory of the tensor
RESULT_FIELDS = {"values": 0, "indices": 1, "min": 0, "max": 1}  # of max, topk and their kin, by position
_RESULT_TYPES = [cls for cls in vars(torch.return_types).values() if isinstance(cls, type)]
# Attributes that are tensors: views, and the results of max, qr and others by name.
TENSOR_ATTRIBUTES = frozenset(
    (*VIEW_ATTRIBUTES, "real", "imag", *(name for cls in _RESULT_TYPES for name in getattr(cls, "__match_args__", ())))
)

# Types of real numbers; constants and results of any of them are quantized as those of float32 are.
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Methods that read only the shape or type of the tensor that they are given.
SHAPED_LIKE = frozenset({"expand_as", "reshape_as", "view_as", "type_as", "to"})

# Functions and methods that make numbers in the shape or type of a tensor, whose values they do not read.
FILLERS = (torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like)
FILLING_METHODS = ("new_ones", "new_full", "new_tensor")
ZERO_FILLERS = (torch.zeros_like, torch.empty_like)
ZERO_FILLING_METHODS = ("new_zeros", "new_empty")

# Functions and methods whose result may show the memory of their first argument, by name.
SAME_MEMORY = frozenset({
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "chunk", "split",
    "narrow", "select", "expand", "t", "getitem", "unbind", "view_as", "movedim", "swapaxes", "contiguous", "detach",
    "to", "dropout", "expand_as", "reshape_as", "split_with_sizes", "tensor_split", "moveaxis", "swapdims",
    "hsplit", "vsplit", "dsplit", "diagonal", "unfold", "ravel", "adjoint", "broadcast_to", *VIEW_ATTRIBUTES,
    "float", "cpu", "cuda", "type", "type_as", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout",
})  # fmt: skip

# Modules of which the same is true.
SAME_MEMORY_MODULES = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip

# Operators of a program that show a tensor in another shape, or a part of it: nothing is computed or moved.
VIEW_OPERATORS = frozenset(
    f"aten::{name}"
    for name in "alias detach view _unsafe_view reshape unsqueeze squeeze expand slice select split t".split()
)
# Operators of a TorchScript graph that only pass numbers on, by name: a compiled model has none of them.
PASSING_OPERATORS = frozenset(
    "alias detach clone contiguous to size view view_as slice expand expand_as lift_fresh zeros_like ones_like".split()
)

UNBINDING = (torch.unbind, Tensor.unbind, Tensor.__iter__)  # one tensor for each index of an axis

# Functions and methods that leave every value in its channel.
_STAYING_NAMES = ("clone", "detach", "contiguous", "relu", "to", "cpu", "cuda")
STAYING = frozenset(getattr(Tensor, name) for name in _STAYING_NAMES) | {torch.clone, torch.detach, torch.relu}


def _metadata_functions() -> set[Callable]:
    found: set[Callable] = {
        torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_same_size,
    }  # fmt: skip
    for name in METADATA:
        member = getattr(Tensor, name, None)
        if member is None:
            continue
        if hasattr(member, "__get__") and not callable(member):
            found.add(member.__get__)
            if hasattr(member, "__set__") and name != "requires_grad":
                found.add(member.__set__)
        else:
            found.add(member)
    return found


METADATA_FUNCTIONS = _metadata_functions()  # as `__torch_function__` gets them


def is_metadata(func: Callable) -> bool:
    """True for a function that asks about a tensor (its shape, its device) rather than computes with it.

    >>> is_metadata(Tensor.size), is_metadata(Tensor.device.__get__), is_metadata(torch.add)
    (True, True, False)
    """
    return func in METADATA_FUNCTIONS


def is_metadata_name(name: str) -> bool:
    """True for a tensor's method or attribute that asks about the tensor, and not for its values.

    >>> is_metadata_name("shape"), is_metadata_name("size"), is_metadata_name("data"), is_metadata_name("storage")
    (True, True, False, False)
    """
    member = getattr(Tensor, name, None)
    is_asked = name == "dtype" or name in METADATA
    return is_asked and member not in REVEALING and not name.endswith("storage")


def is_shape(func: Callable) -> bool:
    """True for a function that asks for a tensor's shape.

    >>> is_shape(Tensor.size), is_shape(Tensor.shape.__get__), is_shape(Tensor.device.__get__)
    (True, True, False)
    """
    return getattr(func, "__self__", None) is Tensor.shape or func in _SHAPES


def pad_circular(x: Any, padding: Sequence[int]) -> Any:
    """``F.pad(x, padding, "circular")`` by selecting positions; torch's own writes in place, which no graph shows.

    >>> pad_circular(torch.tensor([[1, 2, 3]]), (1, 2))
    tensor([[3, 1, 2, 3, 1, 2]])
    """
    for index in range(len(padding) // 2):
        before, after = padding[2 * index : 2 * index + 2]
        axis = x.dim() - 1 - index
        start, stop = max(-before, 0), x.shape[axis] - max(-after, 0)  # negative padding crops first
        positions = torch.arange(-max(before, 0), stop - start + max(after, 0), device=x.device)
        x = torch.index_select(x, axis, positions % (stop - start) + start)
    return x


_FILLERS = frozenset((*FILLERS, *(getattr(Tensor, name) for name in FILLING_METHODS)))


def reads_no_numbers(func: Callable, args: tuple, kind: type) -> bool:
    """Does a call take only the shape or type of its arguments of a kind: ``torch.ones_like(x)``, ``y.to(x)``?"""
    is_shaped = getattr(func, "__name__", "") in SHAPED_LIKE
    return func in _FILLERS or (is_shaped and bool(args) and not isinstance(args[0], kind))
