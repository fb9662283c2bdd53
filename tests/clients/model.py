"""A whole model of a seed: classes, inputs, outputs, and the module that Python makes of it."""

from __future__ import annotations

import random
import sys
import types
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.clients.idioms import IDIOMS
from tests.clients.writer import HEADER, Source, Value, Writer

# How the images reach the forward: its arguments, lines that begin it, and the inputs of a run.
INPUTS = {
    "tensor": (", image", ["x = self.quant(image)"]),
    "two": (", image, other=None", ["x = self.quant(image)", "y = self.quant2(other)"]),
    "dict": (", data", ['x = self.quant(data["image"])']),
    "written dict": (", data", ['data["image"] = self.quant(data["image"])', 'x = data["image"]']),
    "popped dict": (", data", ['x = self.quant(data.pop("image"))']),
    "list": (", images", ["x = self.quant(images[0])", "y = self.quant2(images[1])"]),
    "keywords": (", image, **kwargs", ["x = self.quant(image)"]),
    "left out": (
        ", image, other=None",
        ["x = self.quant(image)", "if other is not None:", "    x = self.quant2(other)"],
    ),
    "object": (", batch", ["x = self.quant(batch.first)", "y = self.quant2(batch.rest[0])"]),
}
# On the model itself.
HOOKS = (
    "self.register_forward_pre_hook(lambda m, a: None)",
    "self.register_forward_pre_hook(lambda m, a: ((a[0] - 0.1) / 1.1, *a[1:]))",
    "self.register_forward_pre_hook(lambda m, a, k: (a, k), with_kwargs=True)",
    "self.register_forward_pre_hook(lambda m, a, k: ((a[0] * 0.5,), k), with_kwargs=True)",
    "self.register_forward_hook(lambda m, a, o: None)",
    "self.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)",
    "self.register_forward_hook(lambda m, a, k, o: o, with_kwargs=True)",
)
_UNTRACEABLE = ("keywords",)
WRITTEN_INPUTS = ("written dict", "popped dict", "left out")  # tracing follows these with example inputs


@dataclass
class Generated:
    """A model and what is known of it.

    Args:
        text: its source.
        style: how its inputs are given.
        is_traceable: symbolic trace is to succeed.
        has_repeats: a line with functions runs several times in a forward.
        used: names of the idioms in it.
    """

    seed: int
    text: str
    style: str
    is_traceable: bool
    has_repeats: bool
    used: set[str]

    @property
    def name(self) -> str:
        """Of its module."""
        return f"client_{self.seed}"

    def load(self, folder: Path) -> nn.Module:
        """The model, from a file of its own."""
        path = folder / f"{self.name}.py"
        path.write_text(self.text)
        module = types.ModuleType(self.name)
        module.__file__ = str(path)
        sys.modules[self.name] = module
        exec(compile(self.text, str(path), "exec"), module.__dict__)
        torch.manual_seed(self.seed)
        model = module.Net()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.uniform_(-0.3, 0.3)  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        return model.eval()

    def inputs(self, seed: int) -> tuple:
        """Fresh inputs: a forward may write into them."""
        generator = torch.Generator().manual_seed(seed)
        # On the grid of a stub with the scale 1/32, as the pixels of a camera are.
        a, b = ((torch.randn(2, 4, 8, 8, generator=generator).clamp(-3, 3) * 32).round() / 32 for _ in range(2))
        if self.style in ("tensor", "keywords"):
            return (a,)
        if self.style == "two":
            return (a, b)
        if self.style == "left out":
            return (a, None)
        if self.style == "object":
            return (sys.modules[self.name].Features(a, [b]),)
        return ([a, b],) if self.style == "list" else ({"image": a, "name": "frame"},)


def write(seed: int) -> Generated:
    """The source of a seed."""
    chance = random.Random(seed)
    source = Source(chance, is_traceable=chance.random() < 0.6)
    style = chance.choice([s for s in INPUTS if not source.is_traceable or s not in _UNTRACEABLE])
    arguments, beginning = INPUTS[style]
    values = [Value("x", 4, 8, 8)] + ([Value("y", 4, 8, 8)] if style in ("two", "list", "object") else [])
    writer = Writer(source, values)
    scale = chance.choice(["", "", "", "scale=1 / 32", "1 / 32"])
    writer.made += [f"self.quant = QuantStub({scale})", "self.quant2 = QuantStub()", "self.dequant = DeQuantStub()"]
    writer.body += beginning
    if chance.random() < 0.25:
        writer.prepared.append(chance.choice([hook for hook in HOOKS if style == "tensor" or "a[0]" not in hook]))
    writer.grow(IDIOMS, chance.randint(2, 6))
    text = "\n\n\n".join([HEADER, *source.classes, writer.text("Net", arguments, _ending(writer))])
    return Generated(seed, text + "\n", style, source.is_traceable, source.has_repeats, source.used)


def _ending(w: Writer) -> list[str]:
    w.made.append("self.dequant2 = DeQuantStub()")
    rest = "".join(f", self.dequant({v.name})" for v in w.unread())
    a, b = w.values[-1].name, w.pick().name
    ways = [
        "[self.dequant({a}), self.dequant({b}){rest}]",
        '{{"a": self.dequant({a}), "b": [self.dequant2({b}){rest}]}}',
        "tuple(self.dequant(v) for v in ({a}, {b})) + (self.dequant({a}){rest},)",
    ]
    if w.maybe(0.3):  # two heads, which share a DeQuantStub
        c = w.values[-1].channels
        scores, boxes = w.module(f"nn.Conv2d({c}, 3, 1)", "cls"), w.module(f"nn.Conv2d({c}, 4, 3, padding=1)", "reg")
        ways = [
            f"(self.dequant({scores}({{a}})), self.dequant({boxes}({{a}})){{rest}})",
            f"[self.dequant(head({{a}})) for head in ({scores}, {boxes})] + [self.dequant({{a}}){{rest}}]",
        ]
    elif not rest:
        ways += ["Features(first=self.dequant({a}), rest=[self.dequant2({b}), None])"]
        ways += ["self.dequant({a})", "Heads(self.dequant({a}), self.dequant2({b}))", "self.dequant({a})[0]"]
    return ["return " + w.choose(*ways).format(a=a, b=b, rest=rest)]


def outputs_of(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    inside = [outputs_of(list(vars(x).values())) if is_dataclass(x) else [x] for x in leaves]
    return [x for part in inside for x in part if isinstance(x, torch.Tensor)]
