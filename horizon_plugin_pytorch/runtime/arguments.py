"""What a model is called with, of example inputs or of a batch: one rule for all that run models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.nested import tensors_of


class WithDefaults(tuple):
    """Arguments by position, some of which are defaults of the forward: their tensors are no inputs, but constants.

    Whoever looks for tensors in it (`tensors_of`, `map_tensors`, `located`) finds those of the others.

    Args:
        values: all arguments.
        defaults: positions of the defaults that hold tensors.

    >>> import torch
    >>> given = WithDefaults((torch.ones(1), torch.zeros(2)), {1})
    >>> tensors_of(given), given.data
    ([tensor([1.])], (tensor([1.]), None))
    """

    defaults: frozenset[int]

    def __new__(cls, values: Iterable[Any], defaults: Iterable[int]) -> WithDefaults:
        made = super().__new__(cls, values)
        made.defaults = frozenset(defaults)
        return made

    def __reduce__(self) -> tuple:
        return WithDefaults, (tuple(self), self.defaults)

    @property
    def data(self) -> tuple[Any, ...]:
        """What a recorded program takes: nothing is in the place of its constants."""
        return tuple(None if index in self.defaults else value for index, value in enumerate(self))


def _apart(given: WithDefaults) -> tuple[list[tuple[Any, Any]], Any]:
    """What is given, by position, and all that makes it `WithDefaults` again."""
    given_by_place = [(i, value) for i, value in enumerate(given) if i not in given.defaults]
    keyed: list[tuple[Any, Any]] = [(pytree.SequenceKey(i), value) for i, value in given_by_place]
    return keyed, (len(given), {i: given[i] for i in given.defaults})


def _together(values: Iterable[Any], context: Any) -> WithDefaults:
    """The reverse of `_apart`."""
    count, defaults = context
    rest = iter(values)
    return WithDefaults([defaults[i] if i in defaults else next(rest) for i in range(count)], defaults)


def _values_apart(given: WithDefaults) -> tuple[list[Any], Any]:
    """What is given without its positions, and all that makes it `WithDefaults` again."""
    keyed, context = _apart(given)
    return [value for _, value in keyed], context


pytree.register_pytree_node(WithDefaults, _values_apart, _together, flatten_with_keys_fn=_apart)


def arguments_of(
    model: nn.Module, given: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments of a model.

    Args:
        given: a tuple or list has the arguments one by one; as many are used as the forward takes, so that labels may
            stand behind the inputs of a loader. A dictionary has them by name, if the forward has parameters of these
            names; else it is the only argument. Anything else is the only argument, and None is none. A list or
            dictionary that is itself an argument is told by a tuple around it.
        kwargs: keyword arguments besides.

    >>> class Net(nn.Module):
    ...     def forward(self, image, scale=1.0): ...
    >>> arguments_of(Net(), 5), arguments_of(Net(), [5, 0.5, "label"]), arguments_of(Net(), {"image": 5})
    (((5,), {}), ((5, 0.5), {}), ((), {'image': 5}))
    >>> arguments_of(Net(), {"left": 5, "right": 6}), arguments_of(Net(), ([5, 6],))
    ((({'left': 5, 'right': 6},), {}), (([5, 6],), {}))
    """
    named = dict(kwargs or {})
    if given is None:
        return (), named
    if isinstance(given, Mapping):
        is_named = _fits(model, (), {**given, **named}) or not _fits(model, (given,), named)
        return ((), {**given, **named}) if is_named else ((given,), named)
    if isinstance(given, WithDefaults):
        return given, named
    if isinstance(given, (tuple, list)):
        return tuple(given[: _most_arguments(model)]), named
    return (given,), named


def positional_arguments(model: nn.Module, given: Any) -> tuple[Any, ...]:
    """The same, all by position: what is recorded or exported has inputs in an order.

    Where one is left out before another, its default is there; if that is a tensor, they are `WithDefaults`.

    >>> class Net(nn.Module):
    ...     def forward(self, image, scale=1.0): ...
    >>> positional_arguments(Net(), {"scale": 0.5, "image": 5})
    (5, 0.5)
    """
    args, kwargs = arguments_of(model, given)
    signature = _signature(model)
    if not kwargs or signature is None:
        return args
    bound = _without_gaps(signature, kwargs)
    if bound.kwargs:
        raise TypeError(
            f"{', '.join(bound.kwargs)}: the forward of `{type(model).__name__}` takes it by keyword only, and here "
            "arguments have an order; let the forward take it by position, too."
        )
    given = signature.bind(**kwargs).arguments
    constant = [i for i, (name, x) in enumerate(bound.arguments.items()) if name not in given and tensors_of(x)]
    return WithDefaults(bound.args, constant) if constant else bound.args


def data_arguments(model: nn.Module, given: Any) -> tuple[Any, ...]:
    """The same as a program or a file takes them: without defaults that are tensors, which are constants of these.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def forward(self, image, weight=torch.ones(2), scale=1.0): ...
    >>> data_arguments(Net(), {"scale": 0.5, "image": 5})
    (5, None, 0.5)
    """
    args = positional_arguments(model, given)
    return args.data if isinstance(args, WithDefaults) else args


def _without_gaps(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Arguments by name in the order of a signature; where one is left out before another, its default is there."""
    bound = signature.bind(**kwargs)
    given = dict(bound.arguments)
    bound.apply_defaults()
    places = list(bound.arguments)
    last = max(places.index(name) for name in given) if given else -1
    for name in places:
        is_named = signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if name not in given and (is_named or places.index(name) > last):
            del bound.arguments[name]
    return bound


def argument_names(model: nn.Module, given: Any) -> list[str | int]:
    """What each of the `positional_arguments` is called: its parameter, where it is given by name, else its position.

    >>> class Net(nn.Module):
    ...     def forward(self, image, scale=1.0): ...
    >>> argument_names(Net(), {"scale": 0.5, "image": 5}), argument_names(Net(), (5, 0.5))
    (['image', 'scale'], [0, 1])
    """
    args, kwargs = arguments_of(model, given)
    signature = _signature(model)
    if not kwargs or signature is None:
        return list(range(len(args)))
    return list(_without_gaps(signature, kwargs).arguments)


def script_arguments(given: Any) -> tuple[Any, ...]:
    """What a TorchScript module is called with: it has no signature to ask, so that all of a list are arguments.

    >>> script_arguments(5), script_arguments([5, 6]), script_arguments(([5, 6],))
    ((5,), (5, 6), ([5, 6],))
    """
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def surplus(model: nn.Module, given: Any) -> int:
    """How many items of a tuple or list the forward does not take; `arguments_of` leaves them out."""
    most = _most_arguments(model)
    return 0 if most is None or not isinstance(given, (tuple, list)) else max(len(given) - most, 0)


def _signature(model: nn.Module) -> inspect.Signature | None:
    wrapped = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    try:
        return inspect.signature(wrapped.forward)
    except (TypeError, ValueError):  # compiled code
        return None


def _fits(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    signature = _signature(model)
    if signature is None or not all(isinstance(name, str) for name in kwargs):
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _most_arguments(model: nn.Module) -> int | None:
    """How many positional arguments the forward takes; None for any number."""
    signature = _signature(model)
    parameters = () if signature is None else tuple(signature.parameters.values())
    if signature is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
