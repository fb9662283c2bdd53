"""Which qconfig a module has, and the rules that gave it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from horizon_plugin_pytorch.capture.leaves import is_leaf
from horizon_plugin_pytorch.capture.region import module_at
from horizon_plugin_pytorch.errors import require_module
from horizon_plugin_pytorch.fake_quant.qconfig import spell, unasked
from horizon_plugin_pytorch.notes import keep_notes, note_of  # noqa: F401 - for the docstring's example
from horizon_plugin_pytorch.operators.table import row_named
from horizon_plugin_pytorch.runtime.located import FUSED_INTO, PlacedModule

KEEPS_FORMAT, GIVES_REAL = "keeps the format of its input", "gives real numbers"
NO_SETTER = "no setter gives it a qconfig"
NO_FORMAT = "has no format of its own"


@dataclass(frozen=True)
class Step:
    """One rule, and the formats that it gave; empty for a part that it left alone.

    >>> str(Step("ModuleNameTemplate ''", output="qint16", weight="qint8"))
    "output qint16, weight qint8: ModuleNameTemplate ''"
    """

    rule: str
    output: str = ""
    weight: str = ""
    input: str = ""

    def __str__(self) -> str:
        given = [f"{part} {getattr(self, part)}" for part in ("output", "weight", "input") if getattr(self, part)]
        return f"{', '.join(given)}: {self.rule}" if given else self.rule


def step_between(before: Any, after: Any, rule: str) -> Step:
    """What a rule changed in a qconfig; `before` is None where it is the first one."""
    if after is None:
        return Step(rule, output="float")
    parts = ("output", "weight") if before is None else ("output", "weight", "input")  # an input is said if it changes
    formats = {part: _spelled(after, part) for part in parts}
    if before is not None:
        formats = {part: text for part, text in formats.items() if _spelled(before, part) != text}
    return Step(rule, **formats)


def _spelled(qconfig: Any, part: str) -> str:
    """The format of a part; of an input only if somebody asked for it."""
    found = _part(qconfig, part)
    if part != "input":
        return spell(found)
    asked = found if isinstance(found, (tuple, list)) else [found]
    texts = ["any" if one is None or getattr(one, "is_default", False) else spell(one) for one in asked]
    return "" if set(texts) == {"any"} else ", ".join(texts)


def _part(qconfig: Any, part: str) -> Any:
    """A part of a qconfig, ours or torch's."""
    return getattr(qconfig, "activation" if part == "output" else part, None)


@dataclass(frozen=True)
class Choice:
    """A module's qconfig, and why it has it.

    Args:
        is_explicit: was it given for this very module, rather than inherited?
        steps: the rules that gave it, oldest first.
        is_fixed: did the user insist, with an attribute or with ``freeze=True``? Then setters leave it alone.
        products: formats of the two operands of the products of matrices inside of it, if somebody asked for them.
    """

    qconfig: Any
    is_explicit: bool = False
    steps: tuple[Step, ...] = ()
    is_fixed: bool = False
    products: tuple[Any, Any] | None = None

    @property
    def reason(self) -> str:
        """The rule that decided; empty where nothing did."""
        return self.steps[-1].rule if self.steps else ""

    def changed(self, qconfig: Any, rule: str) -> Choice:
        """The choice after one more rule.

        >>> [str(step) for step in Choice(None, steps=(Step("global"),)).changed(None, "a setter").steps]
        ['global', 'output float: a setter']
        """
        return replace(self, qconfig=qconfig, steps=(*self.steps, step_between(self.qconfig, qconfig, rule)))

    def below(self) -> Choice:
        """What modules and functions inside inherit."""
        return replace(self, qconfig=unasked(self.qconfig), is_explicit=False, products=None)


def inherited_choice(choices: dict[str, Choice], path: str) -> Choice | None:
    """The choice of a module, or of the nearest one around it that has one."""
    while path not in choices and path:
        path = path.rpartition(".")[0]
    return choices.get(path)


def steps_of(model: nn.Module, path: str) -> tuple[Step, ...]:
    """The rules that gave a module of a prepared model its formats, oldest first; none where nothing is known.

    Weights are left out for modules that have none. What is fused into another module says where it went.

    Raises:
        ValueError: if the model has no such module.
    """
    module = _module(model, path)
    choices = note_of(model, "choices", {})
    fused = vars(module).get(FUSED_INTO, ())
    if fused:
        places = [name for name, other in model.named_modules() if any(other is one for one in fused)]
        return tuple(Step(f"fused into `{place}`: {reason_of(model, place)}") for place in places)
    choice = inherited_choice(choices, path)
    if choice is None:
        return ()
    whole = _operator_around(model, choices, path)
    if whole:
        return (Step(f"part of `{whole}`: {reason_of(model, whole)}"),)
    is_unknown = path not in choices and row_named(getattr(module, "operator", "")) is None
    if is_unknown or _is_container(module):
        return (Step(NO_FORMAT),)
    row = row_named(getattr(module, "operator", ""))
    if row is not None and not row.needs_qconfig:
        return (Step(GIVES_REAL if row.is_dequant else KEEPS_FORMAT),)
    return choice.steps if hasattr(module, "weight") else tuple(replace(step, weight="") for step in choice.steps)


def _operator_around(model: nn.Module, choices: dict[str, Choice], path: str) -> str:
    """The path of the operator that a module is a part of; empty if it is none."""
    while path:
        path = path.rpartition(".")[0]
        if path in choices and not _is_container(module_at(model, path)):
            return path
    return ""


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        close = get_close_matches(path, [name for name, _ in model.named_modules()], 3)
        hint = f"Did you mean {', '.join(map(repr, close))}?" if close else "See `model.named_modules()`."
        raise ValueError(f"`{type(model).__name__}` has no module {path!r}. {hint}") from None


def _is_container(module: nn.Module) -> bool:
    """Does it only hold others?"""
    return not isinstance(module, PlacedModule) and not is_leaf(module)


def reason_of(model: nn.Module, path: str) -> str:
    """The chain of rules of one module in one line; empty where nothing is known.

    >>> net = nn.Sequential(nn.Linear(1, 1))
    >>> steps = (Step("default", "qint8", "qint8"), Step("sensitivity table rank 3", "qint16"))
    >>> keep_notes(net, choices={"0": Choice(None, steps=steps)})
    >>> reason_of(net, "0")
    'int16: sensitivity table rank 3; was int8 from default; weight int8: default'
    """
    require_module(model, "reason_of")
    steps = steps_of(model, path)
    told = [text for part in ("output", "weight", "input") if (text := _chain(steps, part))]
    return "; ".join(told + [step.rule for step in steps if str(step) == step.rule])


def _chain(steps: tuple[Step, ...], part: str) -> str:
    """What the rules said of one part, the last one first."""
    label = "" if part == "output" else f"{part} "
    said = [(getattr(step, part).replace("qint", "int"), step.rule) for step in reversed(steps) if getattr(step, part)]
    if not said:
        return ""
    (last, why), *before = said
    return "; ".join([f"{label}{last}: {why}", *(f"was {text} from {rule}" for text, rule in before)])
