"""Operators that the chip computes in float16: the float operator, with its result rounded to float16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.nn.intrinsic import CalledByAdd
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.runtime.located import NOT_SETTINGS, PlacedModule, tell
from horizon_plugin_pytorch.runtime.real_tensor import marked, unmarked


def _real(tree: Any) -> Any:
    return pytree.tree_map(real, tree)


class Float16(PlacedModule):
    """A float module in float16. Integers that reach it become real numbers; its results are ordinary tensors.

    It is the same before and after conversion, and has the parameters and children of the module at its place, under
    the same names: checkpoints fit whether an operator is int8 or float16.
    """

    def __init__(self, operator: nn.Module, qconfig: Any) -> None:
        super().__init__()
        self.qconfig = qconfig
        object.__setattr__(self, "_float", operator)
        # One set of parameters and children for both: what is loaded, moved or trained here is what `operator` runs on.
        self.__dict__["_parameters"] = operator._parameters
        self.__dict__["_buffers"] = operator._buffers
        self.__dict__["_modules"] = operator._modules
        self.activation_post_process = qconfig.activation(channel_len=1)
        self._weight_cast = None
        if is_cast(qconfig.weight):  # not a child: the children are those of the module at this place
            object.__setattr__(self, "_weight_cast", qconfig.weight(channel_len=1))

    def train(self, mode: bool = True) -> Any:
        self._float.training = mode
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _real(args), _real(kwargs)
        if self._weight_cast is not None and FakeCast.enabled:
            weights = {name: self._weight_cast(value) for name, value in self._float.named_parameters()}
            return self._cast(functional_call(self._float, weights, args, kwargs))
        return self._cast(self._float(*args, **kwargs))

    def _cast(self, tree: Any) -> Any:
        cast = self.activation_post_process
        return pytree.tree_map(lambda x: cast(x) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        operator = self.__dict__.get("_float")
        if operator is not None and name in vars(operator) and name not in NOT_SETTINGS:
            object.__setattr__(operator, name, value)  # a setting: what is asked of this module is what runs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__.get("_float"), name, None)
            if found is None or name.startswith("__"):
                raise
            if name == "add" and isinstance(self._float, CalledByAdd):
                return lambda x, y: self(*self._float.layer_first(x, y))
            return self._method(name, found) if callable(found) else found

    def _method(self, name: str, method: Callable) -> Callable:
        """A method of a FloatFunctional."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            module = self.of_call()
            if module is not self:
                return getattr(module, name)(*args, **kwargs)
            is_run = interceptor() is not None  # by the forward of the user's model
            step = None
            if is_run and self.member is not None:
                step, args = self.member.take(args)
            if self.stub_paths:
                args, kwargs = self.through_stubs(args, kwargs)
            if is_run:  # what stubs gave is marked, too
                args, kwargs = unmarked((args, kwargs))
            out = self._cast(method(*_real(args), **_real(kwargs)))
            tell(self, method.__name__, args, kwargs, out)
            out = marked(out) if is_run else out
            return out if step is None else self.member.give(step, out)

        return call

    def extra_repr(self) -> str:
        return type(self._float).__name__
