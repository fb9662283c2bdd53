"""What a traced forward relied on of its arguments, and the check that a later call is like it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import code_of
from horizon_plugin_pytorch.asking.questions import names_tested_for_none
from horizon_plugin_pytorch.errors import UnknownCallError

GUARD = "_argument_guard"  # where a traced model keeps what it relied on
_MISSING = object()
_SETTINGS = (bool, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format)


def is_setting(value: Any) -> bool:
    """Is it a value that chooses code rather than takes part in it: None, a flag, a mode?

    >>> is_setting(None), is_setting("train"), is_setting(0.5)
    (True, True, False)
    """
    return value is None or isinstance(value, _SETTINGS)


@dataclass(frozen=True)
class Place:
    """An argument of the forward, or something inside it.

    >>> str(Place("batch", ("mask", 0)))
    "batch['mask'][0]"
    """

    name: str
    keys: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name.lstrip("*") + "".join(f"[{key!r}]" for key in self.keys)

    def item(self, key: Any) -> Place:
        """The place of an item."""
        return Place(self.name, (*self.keys, key))

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """What is there in a call."""
        value = arguments.get(self.name.lstrip("*"), _MISSING)
        for key in self.keys:
            if isinstance(value, Tensor):
                return value  # a part of it is as given as it is
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return _MISSING
        return value


@dataclass(frozen=True)
class _Question:
    """Something that code asks of an argument: how it is answered, and what an answer means in words."""

    answer: Callable[[Any, Any], Any]
    words: Callable[[Any, Any], str]


def _is_given(value: Any, _: Any) -> bool:
    return value is not _MISSING and value is not None and not (isinstance(value, (tuple, dict)) and not value)


def _setting(value: Any, _: Any) -> Any:
    return value if value is _MISSING or is_setting(value) or isinstance(value, (int, float, list, tuple)) else ...


_QUESTIONS: dict[str, _Question] = {
    "value": _Question(_setting, lambda answer, _: "left out" if answer is _MISSING else _shown(answer)),
    "given": _Question(_is_given, lambda answer, _: "given" if answer else "left out or None"),
    "class": _Question(
        lambda value, cls: isinstance(value, cls),
        lambda answer, cls: f"{'a' if answer else 'no'} {cls.__name__}",
    ),
    "length": _Question(
        lambda value, _: len(value) if hasattr(value, "__len__") else None, lambda answer, _: f"of length {answer}"
    ),
    "keys": _Question(
        lambda value, _: list(value) if isinstance(value, Mapping) else None, lambda answer, _: f"with keys {answer}"
    ),
    "has": _Question(
        lambda value, key: isinstance(value, Mapping) and key in value,
        lambda answer, key: f"{'with' if answer else 'without'} the key {key!r}",
    ),
}


def _shown(value: Any) -> str:
    return "something else" if value is ... else repr(value)


@dataclass(frozen=True)
class Fact:
    """One thing that was so when the forward was traced."""

    place: Place
    question: str
    about: Any
    answer: Any
    line: str

    def found(self, arguments: Mapping[str, Any]) -> Any:
        """The answer of a call."""
        return _QUESTIONS[self.question].answer(self.place.value(arguments), self.about)

    def words(self, answer: Any) -> str:
        """An answer in words."""
        return _QUESTIONS[self.question].words(answer, self.about)


def _says_none(annotation: Any) -> bool:
    """Does an annotation allow None?"""
    if isinstance(annotation, str):  # of a file with `from __future__ import annotations`
        return re.search(r"\bOptional\b|\bNone\b", annotation) is not None
    return type(None) in get_args(annotation)


class ArgumentGuard:
    """Refuses calls for which the traced forward would have run other code than the graph has.

    Args:
        model: whose forward is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        forward = inspect.unwrap(type(model).forward)
        parameters = inspect.signature(forward).parameters.values()
        tested = names_tested_for_none(code_of(forward)) if inspect.isfunction(forward) else set()
        self.may_be_none = {p.name for p in parameters if p.name in tested or _says_none(p.annotation)}
        plain = [p.replace(annotation=p.empty) for p in list(parameters)[1:]]
        self.signature = inspect.Signature(plain)
        self.facts: dict[tuple[Place, str, Any], Fact] = {}

    def rely(self, place: Place, question: str, answer: Any, about: Any = None, line: str = "") -> None:
        """Note what code was told of an argument."""
        key = (place, question, about)
        if key not in self.facts:
            self.facts[key] = Fact(place, question, about, answer, line)

    def check(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Insist that a call gives what code was told while it was traced.

        Raises:
            UnknownCallError: names the argument and the line.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:  # the forward says it better
            return
        bound.apply_defaults()
        for fact in self.facts.values():
            found = fact.found(bound.arguments)
            if not _equal(found, fact.answer):
                line = f" The line {fact.line} depends on it." if fact.line else ""
                raise UnknownCallError(
                    f"`{self.name}` was traced with `{fact.place}` {fact.words(fact.answer)}, and is called with it "
                    f"{fact.words(found)}: the graph has no other case.{line} Prepare it with example_inputs that "
                    "are like this call; or with `PrepareMethod.JIT_STRIP`, whose model runs its own forward."
                )


def _equal(found: Any, answer: Any) -> bool:
    if isinstance(found, (Tensor, torch.fx.Proxy)) or found is ... or found is _MISSING:
        return False
    return bool(found is answer or (type(found) is type(answer) and found == answer) or _same_number(found, answer))


def _same_number(found: Any, answer: Any) -> bool:
    numbers = (int, float)
    are_numbers = isinstance(found, numbers) and isinstance(answer, numbers)
    are_lists = isinstance(found, (list, tuple)) and isinstance(answer, (list, tuple))
    return (are_numbers and found == answer) or (are_lists and list(found) == list(answer))


class Arguments:
    """What is known of the arguments of a forward while it is traced.

    Args:
        model: whose forward it is.
        example: the arguments and keyword arguments of a call like those to come, if there are any.
        absent: parameters that are traced as if they were not given.
    """

    def __init__(
        self,
        model: nn.Module,
        example: tuple[tuple, dict[str, Any]] | None = None,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.guard = ArgumentGuard(model)
        parameters = self.guard.signature.parameters
        self.values = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self.optional = [
            name
            for name, p in parameters.items()
            if p.default is None
            or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            or (p.default is p.empty and name in self.guard.may_be_none)
        ]
        self.has_example = False
        try:
            bound = None if example is None else self.guard.signature.bind(*example[0], **example[1])
        except TypeError:
            bound = None
        if bound is not None:
            bound.apply_defaults()
            self.values, self.has_example = dict(bound.arguments), True
        else:
            for name in self.optional:
                if name not in absent:
                    self.values.pop(name, None)  # it counts as given, and is unknown
                elif parameters[name].kind is parameters[name].VAR_POSITIONAL:
                    self.values[name] = ()
                elif parameters[name].kind is parameters[name].VAR_KEYWORD:
                    self.values[name] = {}
                else:
                    self.values[name] = None

    def is_known(self, name: str) -> bool:
        """Is there a value of a parameter?"""
        return name.lstrip("*") in self.values

    def known(self, name: str) -> Any:
        """The value that a parameter has."""
        return self.values[name.lstrip("*")]

    def rely_on_given(self) -> None:
        """Of arguments that may be left out, those of the example were given."""
        for name in self.optional if self.has_example else ():
            if isinstance(self.values[name], Tensor):
                self.guard.rely(Place(name), "given", True)
