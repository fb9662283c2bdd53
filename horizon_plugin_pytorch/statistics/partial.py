"""A class with some of its constructor's arguments given: what a qconfig is made of."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from horizon_plugin_pytorch.asking.stack import is_torch_quantizing
from horizon_plugin_pytorch.errors import QuantizationConfigError


@dataclass(frozen=True)
class Partial:
    """A class with some constructor arguments given; call it to make the object, `with_args` to give more.

    Args:
        is_default: nobody asked for it: it counts where something is needed, and changes nothing where not.

    >>> Partial(dict, {"a": 1}).with_args(b=2)()
    {'a': 1, 'b': 2}
    """

    cls: type
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_default: bool = field(default=False, compare=False)

    def __call__(self, **kwargs: Any) -> Any:
        if is_torch_quantizing():
            raise QuantizationConfigError(
                "torch's own quantization is preparing a model that has a qconfig of this package: it would put fake "
                "quantizers into modules that know no integers. Call `prepare`, `prepare_qat` or `prepare_qat_fx` of "
                "`horizon_plugin_pytorch.quantization` in place of torch's functions."
            )
        return self.cls(**{**self.kwargs, **kwargs})

    def with_args(self, **kwargs: Any) -> Partial:
        """The same class with more arguments given."""
        return Partial(self.cls, {**self.kwargs, **kwargs})

    def with_observer(self, observer: type, **kwargs: Any) -> Partial:
        """The same class with another observer: settings of the one before, which the new one does not know, are left.

        >>> class Quantizer:
        ...     def __init__(self, observer, saturate=True, **settings): ...
        >>> class Fixed:
        ...     def __init__(self, scale, dtype): ...
        >>> part = Partial(Quantizer, {"observer": object, "saturate": False, "dtype": "qint8", "percentile": 99.9})
        >>> sorted(part.with_observer(Fixed, scale=0.5).kwargs)
        ['dtype', 'observer', 'saturate', 'scale']
        """
        known = _named_arguments(self.cls) | _named_arguments(observer)
        kept = {name: value for name, value in self.kwargs.items() if name in known}
        return Partial(self.cls, {**kept, "observer": observer, **kwargs})

    def __hash__(self) -> int:
        return hash((self.cls, *sorted(self.kwargs)))  # the values may be unhashable; equal partials have equal names

    def __repr__(self) -> str:
        return f"{self.cls.__name__}.with_args({', '.join(f'{k}={v!r}' for k, v in self.kwargs.items())})"


def whole_signature(cls: type) -> inspect.Signature:
    """A constructor's own arguments, and in place of ``*args`` and ``**kwargs`` those that it passes on.

    >>> class Whole:
    ...     def __init__(self, start=0, stop=9): ...
    >>> class Half(Whole):
    ...     def __init__(self, share=0.5, *args, **kwargs): ...
    >>> whole_signature(Half)
    <Signature (share=0.5, start=0, stop=9)>
    """
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    if "__init__" not in vars(cls):
        return inspect.signature(cls.__mro__[1])
    kinds = {parameter.kind for parameter in own}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return inspect.Signature(own)
    by_name = inspect.Parameter.KEYWORD_ONLY
    passed_on = [
        p for p in inspect.signature(cls.__mro__[1]).parameters.values() if p.name not in {q.name for q in own}
    ]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        passed_on = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=by_name) for p in passed_on]
    whole = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)] + passed_on
    return inspect.Signature(sorted(whole, key=lambda p: p.kind))  # sorting is stable


def show_signature(cls: Any) -> None:
    """Let a class, and its constructor, answer `inspect.signature` with all that can be given."""
    whole = whole_signature(cls)
    cls.__signature__ = whole
    if "__init__" in vars(cls):
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        cls.__init__.__signature__ = whole.replace(parameters=[own, *whole.parameters.values()])


def _named_arguments(cls: type) -> set[str]:
    """Names of the arguments that a class and those it derives from take when one is made."""
    makers = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    signatures = [inspect.signature(maker).parameters.values() for maker in makers]
    return {p.name for parameters in signatures for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
