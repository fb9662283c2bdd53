"""Idioms that are text: a table has them, and this writes them into a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.clients.writer import Value, Writer

IDIOMS: list[Callable[[Writer], None]] = []
Options = str | tuple[str, ...]


def idiom(weight: int = 1, is_traceable: bool = True) -> Callable[[Callable], Callable]:
    """Register an idiom; what tracing cannot follow stands in wrapped code and in models prepared by running."""

    def register(f: Callable) -> Callable:
        f.is_traceable = is_traceable  # type: ignore[attr-defined]
        IDIOMS.extend([f] * weight)
        return f

    return register


@dataclass(frozen=True)
class Form:
    """An idiom as text. Each text is one, or several to choose from.

    In all of them ``{x}`` is the value that the idiom takes and ``{y}`` another of its shape (or the same), ``{c}``,
    ``{h}``, ``{w}`` are channels, height and width, and the keys of `made`, `modules` and `names` stand for what they
    make.

    Args:
        name: what a seed is said to use.
        result: the expression of the new value; "" if there is none.
        modules: a constructor for each name; it is registered in one of the ways that people use.
        made: the same, as an attribute of the class itself: tensors, numbers, layers that are read.
        init: lines that end ``__init__``.
        names: local variables.
        lines: what comes before the result.
        shape: of the result: "same", "halved", "doubled", or channels as a number.
        largest: the largest height that it takes.
        smallest: the smallest.
        has_arguments: the modules take several arguments, so that none is wrapped in an `nn.Sequential`.
        has_repeats: a line of it runs several times in a forward.
    """

    name: str
    result: Options
    modules: Mapping[str, Options] = field(default_factory=dict)
    made: Mapping[str, Options] = field(default_factory=dict)
    init: tuple[Options, ...] = ()
    names: str = ""
    lines: tuple[Options, ...] = ()
    shape: str | int = "same"
    smallest: int = 1
    largest: int = 16
    weight: int = 1
    is_traceable: bool = True
    has_arguments: bool = False
    has_repeats: bool = False

    def __call__(self, w: Writer) -> None:
        v = w.pick()
        if not self.smallest <= v.height <= self.largest:
            return
        words = {"x": v.name, "y": (w.alike(v) or v).name, "c": v.channels, "h": v.height, "w": v.width}

        def text(options: Options) -> str:
            return (options if isinstance(options, str) else w.choose(*options)).format_map(words)

        words |= {name: w.name(name) for name in self.names.split()}
        words |= {name: f"self.{w.name(name)}" for name in self.made}
        for name, options in self.made.items():
            w.attribute(words[name], text(options))
        for name, options in self.modules.items():
            words[name] = w.module(text(options), name, is_alone=self.has_arguments)
        w.prepared += [text(line) for line in self.init]
        w.source.has_repeats |= self.has_repeats
        for line in self.lines:
            w.line(text(line))
        if self.result:
            w.let(text(self.result), *self._shape(v))

    def _shape(self, v: Value) -> tuple[int, int, int]:
        if self.shape == "halved":
            return v.channels, v.height // 2, v.width // 2
        if self.shape == "doubled":
            return v.channels, v.height * 2, v.width * 2
        return v.shape if self.shape == "same" else (int(self.shape), v.height, v.width)

    def register(self) -> None:
        """Let generated models have it."""
        IDIOMS.extend([self] * self.weight)
