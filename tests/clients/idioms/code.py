"""Idioms that need more than a table: what is random in them depends on what came before."""

from __future__ import annotations

from tests.clients.idioms.form import IDIOMS, idiom
from tests.clients.writer import Value, Writer


def _convolution(w: Writer, v: Value, out: int, kernel: int = 0, extra: str = "") -> str:
    kernel = kernel or w.random.choice([1, 3])
    return f"nn.Conv2d({v.channels}, {out}, {kernel}, padding={kernel // 2}{extra})"


def _channels(w: Writer) -> int:
    return w.random.choice([4, 8])


def _activation(w: Writer) -> str:
    return w.choose(
        "nn.ReLU()",
        "nn.ReLU(inplace=True)",
        "nn.ReLU6()",
        "nn.SiLU()",
        "nn.Sigmoid()",
        "nn.GELU()",
        "nn.LeakyReLU(0.1)",
    )


def _shared(w: Writer, name: str, made: str) -> str:
    """A module that the whole class shares."""
    if all(f"self.{name} =" not in line for line in w.made):
        w.made.append(f"self.{name} = {made}")
    return f"self.{name}"


@idiom(4)
def conv_bn_act(w: Writer) -> None:
    v, out = w.pick(), _channels(w)
    parts = [_convolution(w, v, out)]
    if w.maybe():
        parts.append(f"nn.BatchNorm2d({out})")
    if w.maybe(0.7):
        parts.append(_activation(w))
    if w.maybe(0.2):
        parts.append(f"nn.Dropout({w.choose('0.0', '0.1')})")
    if w.maybe():
        called = w.module(f"nn.Sequential({', '.join(parts)})", "block")
        w.let(f"{called}({v.name})", out, v.height, v.width)
        return
    expression = v.name
    for part in parts:
        keyword = "input=" if w.maybe(0.15) else ""
        expression = f"{w.module(part)}({keyword}{expression})"
    w.let(expression, out, v.height, v.width)


@idiom(2)
def conv_shared_relu(w: Writer) -> None:
    v, out = w.pick(), _channels(w)
    relu = _shared(w, "relu", f"nn.ReLU(inplace={w.choose('True', 'False')})")
    conv = w.module(_convolution(w, v, out), "conv")
    if w.maybe():
        bn = w.module(f"nn.BatchNorm2d({out})", "bn")
        w.let(f"{relu}({bn}({conv}({v.name})))", out, v.height, v.width)
    else:
        w.let(f"{relu}({conv}({v.name}))", out, v.height, v.width)


@idiom()
def activation_under_two_paths(w: Writer) -> None:
    v = w.pick()
    act, layers = w.name("act"), w.name("layers")
    drop = w.choose("", "nn.Dropout(0.1), ", "nn.Dropout(0.0), ")
    w.made.append(f"self.{act} = {w.choose('nn.ReLU(inplace=True)', 'nn.ReLU()', 'nn.SiLU()')}")
    first, second = _convolution(w, v, 8), f"nn.Conv2d(8, {v.channels}, 1)"
    w.made.append(f"self.{layers} = nn.Sequential({first}, self.{act}, {drop}{second})")
    w.let(f"self.{layers}({v.name})", *v.shape)
    if w.maybe():
        w.let(f"self.{act}({w.values[-1].name})", *v.shape)


@idiom()
def deconvolution(w: Writer) -> None:
    v = w.pick()
    if v.height > 8:
        return
    up = w.module(f"nn.ConvTranspose2d({v.channels}, 4, 2, 2)", "up")
    w.let(f"{up}({v.name})", 4, v.height * 2, v.width * 2)


@idiom(3)
def residual(w: Writer) -> None:
    v = w.pick()
    other = w.alike(v)
    if other is None or w.maybe(0.3):
        conv = w.module(_convolution(w, v, v.channels), "res")
        other = w.let(f"{conv}({v.name})", *v.shape)
    if other.name == v.name:
        return
    a, b = v.name, other.name
    way = w.random.randrange(6)
    if way == 0:
        w.let(f"{a} + {b}", *v.shape)
    elif way == 1:
        w.let(f"torch.add({a}, {b})", *v.shape)
    elif way == 2:
        w.made.append(f"self.{(n := w.name('ff'))} = FloatFunctional()")
        w.let(f"self.{n}.add({a}, {b})", *v.shape)
    elif way == 3:
        w.made.append(f"self.{(n := w.name('ff'))} = torch.nn.quantized.FloatFunctional()")
        w.let(f"self.{n}.add({a}, {b})", *v.shape)
    elif way == 4:
        new = w.let(f"{a} * 1.0", *v.shape)
        w.line(f"{new.name} += {b}")
    else:
        w.let(f"F.relu({a} + {b})", *v.shape)


@idiom(2)
def concatenate(w: Writer) -> None:
    v = w.pick()
    other = w.alike(v) or v
    way = w.choose(
        "torch.cat([{a}, {b}], 1)", "torch.cat(({a}, {b}), dim=1)", "ff", "torch.cat(tensors=[{a}, {b}], dim=-3)"
    )
    if way == "ff":
        w.made.append(f"self.{(n := w.name('cat'))} = FloatFunctional()")
        way = f"self.{n}.cat([{{a}}, {{b}}], 1)"
    if v.channels <= 8:
        w.let(way.format(a=v.name, b=other.name), 2 * v.channels, v.height, v.width)


@idiom(2)
def wrapped_method(w: Writer) -> None:
    if w.is_wrapped:
        return
    first, second = w.pick(), w.pick()
    name = w.name("decode")
    style = w.choose("tensor", "list", "two")
    inner = [Value("a", *first.shape)]
    lines = []
    if style == "list":
        lines, arguments, call = ["a, b = parts"], "parts", f"[{first.name}, {second.name}]"
    elif style == "two":
        arguments, call = "a, b", f"{first.name}, {second.name}"
    else:
        arguments, call = "a", first.name
    if style != "tensor":
        inner.append(Value("b", *second.shape))
    w.is_wrapped = True
    with w.apart(inner) as body:
        w.grow(IDIOMS, w.random.randint(1, 3))
        last = w.last()
    w.is_wrapped = False
    w.methods.append(
        ["@wrap()", f"def {name}(self, {arguments}):", *[f"    {x}" for x in lines + body], f"    return {last.name}"]
    )
    w.let(f"self.{name}({call})", *last.shape)


@idiom(2)
def block(w: Writer) -> None:
    if w.depth > 1 or w.is_wrapped:
        return
    v = w.pick()
    inner = Writer(w.source, [Value("x", *v.shape)], w.depth + 1)
    inner.grow(IDIOMS, w.random.randint(1, 3))
    last = inner.last()
    name = f"Block{len(w.source.classes)}"
    w.source.classes.append(inner.text(name, ", x", [f"return {last.name}"]))
    called = w.module(f"{name}()", "block")
    new = w.let(f"{called}({v.name})", *last.shape)
    if last.shape == v.shape and w.maybe(0.4):
        w.source.has_repeats = True
        w.let(f"{called}({new.name})", *last.shape)


@idiom()
def static_method(w: Writer) -> None:
    v = w.pick()
    name = w.name("squash")
    w.methods.append(["@staticmethod", f"def {name}(t, low, high=1.0):", "    return torch.clamp(t, low, high)"])
    w.let(f"self.{name}({v.name}, -1)", *v.shape)
