"""The idioms: each adds a few lines to a class, and often a value to those that are alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.writer import Value, Writer

IDIOMS: list[Callable[[Writer], None]] = []


def idiom(weight: int = 1, is_traceable: bool = True) -> Callable[[Any], Any]:
    """Register an idiom; what tracing cannot follow stands in wrapped code and in models prepared by running."""

    def register(f: Any) -> Any:
        f.is_traceable = is_traceable
        IDIOMS.extend([f] * weight)
        return f

    return register


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
def depthwise(w: Writer) -> None:
    v = w.pick()
    conv = w.module(_convolution(w, v, v.channels, 3, f", groups={v.channels}"), "dw")
    w.let(f"{conv}({v.name})", *v.shape)


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


@idiom()
def gate(w: Writer) -> None:
    v = w.pick()
    conv = w.module(f"nn.Conv2d({v.channels}, {v.channels}, 1)", "gate")
    pooled = w.choose(
        "F.adaptive_avg_pool2d({x}, 1)", "{x}.mean((2, 3), keepdim=True)", "{x}.mean(dim=[-2, -1], keepdim=True)"
    ).format(x=v.name)
    w.let(f"{v.name} * torch.sigmoid({conv}({pooled}))", *v.shape)


@idiom(2)
def numbers(w: Writer) -> None:
    v = w.pick()
    way = w.random.randrange(7)
    if way == 0:
        w.let(
            f"{v.name} * {w.choose('2.0', '0.5', 'np.float32(0.5)', 'np.float64(1.5)', '1 / math.sqrt(8)')}", *v.shape
        )
    elif way == 1:
        w.let(f"{v.name} + {w.choose('1.0', 'np.float32(0.25)', '1')}", *v.shape)
    elif way == 2:
        name = w.name("factor")
        w.made.append(f'self.register_buffer("{name}", torch.tensor({w.choose("2.0", "0.5", "[1.5]")}))')
        w.let(f"{v.name} {w.choose('*', '/')} self.{name}", *v.shape)
    elif way == 3:
        name = w.name("two")
        w.made.append(f'self.register_buffer("{name}", torch.tensor(2.0))')
        w.let(f"torch.pow({v.name}, self.{name})", *v.shape)
    elif way == 4:
        w.made.append(f"self.{(n := w.name('ff'))} = FloatFunctional()")
        w.let(f"self.{n}.mul_scalar({v.name}, {w.choose('0.5', 'np.float32(2)')})", *v.shape)
    elif way == 5:
        w.let(f"{v.name}.pow(2)", *v.shape)
    else:
        w.let(f"1.0 - {v.name}", *v.shape)


@idiom()
def pools_of_numpy_sizes(w: Writer) -> None:
    v = w.pick()
    if v.height < 4:
        return
    name = w.name("size")
    w.made.append(f"self.{name} = np.array([2, 2], np.int32)")
    size = w.choose(
        f"(self.{name}[0], self.{name}[1])", f"tuple(self.{name})", f"int(self.{name}[0])", f"self.{name}[0]"
    )
    size = size if not w.maybe(0.3) else f"self.{name}.tolist()"
    pool = w.choose("F.avg_pool2d", "F.max_pool2d")
    w.let(f"{pool}({v.name}, {size})", v.channels, v.height // 2, v.width // 2)


@idiom()
def resize(w: Writer) -> None:
    v = w.pick()
    if v.height > 8:
        return
    where = w.choose(
        "scale_factor=2.0, mode='bilinear', align_corners=False",
        "scale_factor=2",
        "size=({h}, {w})",
        "size=(np.int64({h}), np.int64({w})), mode='bilinear', align_corners=False",
        "size=tuple(np.array([{h}, {w}]))",
        "size=[{x}.shape[2] * 2, {x}.shape[3] * 2]",
    ).format(h=v.height * 2, w=v.width * 2, x=v.name)
    w.let(f"F.interpolate({v.name}, {where})", v.channels, v.height * 2, v.width * 2)


@idiom(2)
def attention(w: Writer) -> None:
    v = w.pick()
    c = v.channels
    if v.height > 8:
        return
    q, k, u = (w.module(f"nn.Linear({c}, {c})", n) for n in ("q", "k", "v"))
    t = w.name("t")
    w.line(
        w.choose(
            f"{t} = {v.name}.flatten(2).transpose(1, 2)",
            f"{t} = {v.name}.flatten(2).permute(0, 2, 1)",
            f"{t} = {v.name}.reshape({v.name}.shape[0], {c}, -1).transpose(-1, -2)",
            f"{t} = {v.name}.view({v.name}.size(0), {c}, np.prod(({v.height}, {v.width}))).permute(0, 2, 1)",
        )
    )
    if w.maybe(0.4):
        norm = w.module(f"nn.LayerNorm({c})", "norm")
        w.line(f"{t} = {norm}({t})")
    a = w.name("a")
    scores = w.choose(
        f"{q}({t}) @ {k}({t}).transpose(1, 2)",
        f"torch.matmul({q}({t}), {k}({t}).transpose(-2, -1))",
        f"torch.bmm({q}({t}), {k}({t}).permute(0, 2, 1))",
        f'torch.einsum("bic,bjc->bij", {q}({t}), {k}({t}))',
    )
    w.line(f"{a} = F.softmax(({scores}) * {w.choose('0.35', f'{c} ** -0.5')}, dim=-1)")
    w.line(f"{t} = {w.choose(f'{a} @ {u}({t})', f'torch.matmul({a}, {u}({t}))')}")
    w.let(f"{t}.transpose(1, 2).reshape(-1, {c}, {v.height}, {v.width})", *v.shape)


@idiom()
def linear_last(w: Writer) -> None:
    v = w.pick()
    out = _channels(w)
    fc = w.module(f"nn.Linear({v.channels}, {out})", "fc")
    w.let(f"{fc}({v.name}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)", out, v.height, v.width)


@idiom()
def split_and_join(w: Writer) -> None:
    v = w.pick()
    a, b = w.name("a"), w.name("b")
    w.line(f"{a}, {b} = " + w.choose(f"{v.name}.chunk(2, 1)", f"torch.split({v.name}, {v.channels // 2}, dim=1)",
                                     f"{v.name}.split([{v.channels // 2}, {v.channels // 2}], 1)"))  # fmt: skip
    w.let(w.choose(f"torch.cat([{b}, {a}], dim=1)", f"torch.cat([{a}.relu(), {b}], 1)"), *v.shape)


@idiom()
def stack_and_reduce(w: Writer) -> None:
    v = w.pick()
    other = w.alike(v) or v
    reduced = w.choose("mean(0)", "sum(0)", "sum(dim=0)", "amax(0)", "max(0)[0]")
    w.let(f"torch.stack([{v.name}, {other.name}]).{reduced}", *v.shape)


@idiom()
def pad_and_pool(w: Writer) -> None:
    v = w.pick()
    w.let(f"F.max_pool2d(F.pad({v.name}, (1, 1, 1, 1)), 3, 1)", *v.shape)


@idiom()
def slices(w: Writer) -> None:
    v = w.pick()
    half = v.channels // 2
    index = w.choose(
        f"[slice(None), slice(0, {half})]",
        f":, :{half}",
        f"..., :{half}, :, :",
        f":, np.arange({half})",
        f":, list(range({half}))",
        f"(slice(None), slice(0, {half}))",
    )
    part = w.name("part")
    w.line(f"{part} = {v.name}[{index}]")
    w.let(f"torch.cat([{part}, {part}], 1)", *v.shape)


@idiom()
def statement_in_place(w: Writer) -> None:
    v = w.pick()
    conv = w.module(f"nn.Conv2d({v.channels}, {v.channels}, 1)", "conv")
    new = w.let(f"{conv}({v.name})", *v.shape)
    w.line(new.name + w.choose(".clamp_(-0.5, 0.5)", ".mul_(0.5)", ".relu_()", ".add_(0.25)", ".sigmoid_()"))


@idiom()
def activation_in_place(w: Writer) -> None:
    v = w.pick()
    conv = w.module(f"nn.Conv2d({v.channels}, {v.channels}, 1)", "conv")
    act = w.module(w.choose("nn.SiLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.Hardswish(inplace=True)"), "act")
    new = w.let(f"{conv}({v.name})", *v.shape)
    w.line(f"second = {new.name}")
    w.let(f"{act}({new.name}) + second", *v.shape)


@idiom()
def position(w: Writer) -> None:
    v = w.pick()
    name = w.name("pos")
    made = w.choose("zeros", "randn")
    w.made.append(f"self.{name} = nn.Parameter(torch.{made}(1, {v.channels}, {v.height}, {v.width}))")
    w.let(f"{v.name} + self.{name}", *v.shape)


@idiom()
def zero_branch(w: Writer) -> None:
    v = w.pick()
    name = w.name("zero")
    w.made.append(f"self.{name} = nn.Conv2d({v.channels}, {v.channels}, 1)")
    w.prepared.append(f"nn.init.zeros_(self.{name}.weight)")
    w.prepared.append(f"nn.init.{w.choose('zeros_(self.{n}.bias)', 'uniform_(self.{n}.bias, -2, 2)').format(n=name)}")
    w.let(f"{v.name} + self.{name}({v.name})", *v.shape)


@idiom()
def weight_is_read(w: Writer) -> None:
    v = w.pick()
    name = w.name("conv")
    w.made.append(f"self.{name} = nn.Conv2d({v.channels}, {v.channels}, 1)")
    read = w.choose(
        f"{v.name}.to(self.{name}.weight.dtype)",
        f"{v.name}.to(self.{name}.weight.device)",
        f"{v.name}.reshape(-1, self.{name}.weight.shape[1], {v.height}, {v.width})",
        f"{v.name}.view({v.name}.shape[0], self.{name}.in_channels, {v.height}, {v.width})",
    )
    w.let(w.choose(f"self.{name}({read})", f"F.relu(self.{name}({read}))"), *v.shape)


@idiom(is_traceable=False)
def cached_grid(w: Writer) -> None:
    v = w.pick()
    name = w.name("grid")
    w.made.append(f"self.{name} = None")
    w.line(f"if self.{name} is None:")
    w.line(f"    lines = torch.linspace(-1, 1, {v.height}), torch.linspace(-1, 1, {v.width})")
    w.line(f'    self.{name} = torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1).unsqueeze(0)')
    w.let(f"F.grid_sample({v.name}, self.{name}.expand({v.name}.shape[0], -1, -1, -1), align_corners=True)", *v.shape)


@idiom()
def constant_grid(w: Writer) -> None:
    v = w.pick()
    name = w.name("grid")
    w.made.append(f'self.register_buffer("{name}", torch.rand(1, {v.height}, {v.width}, 2) * 2 - 1)')
    w.let(f"F.grid_sample({v.name}, self.{name}.expand({v.name}.shape[0], -1, -1, -1), align_corners=False)", *v.shape)


@idiom(is_traceable=False)
def branch_on_shape(w: Writer) -> None:
    v = w.pick()
    conv = w.module(f"nn.Conv2d({v.channels}, {v.channels}, 1)", "conv")
    new = w.let(f"{conv}({v.name})", *v.shape)
    w.line(f"if {new.name}.shape[-1] % 2 == 0 and {new.name}.dim() == 4:")
    w.line(f"    {new.name} = {new.name} * 0.5")


@idiom()
def branch_on_training(w: Writer) -> None:
    v = w.pick()
    new = w.let(f"{v.name} * 0.5", *v.shape)
    w.line("if self.training:")
    w.line(f"    {new.name} = F.dropout({new.name}, 0.1, training=True)")


@idiom()
def levels(w: Writer) -> None:
    v = w.pick()
    heads, level = w.name("heads"), w.name("level")
    w.made.append(f"self.{heads} = nn.ModuleList(nn.Conv2d({v.channels}, {v.channels}, 1) for _ in range(2))")
    w.made.append(f"self.{level} = nn.Parameter(torch.{w.choose('randn', 'zeros')}(2, {v.channels}))")
    outs = w.name("outs")
    w.source.has_repeats = True
    w.line(f"{outs} = []")
    w.line(f"for i, head in enumerate(self.{heads}):")
    w.line(f"    {outs}.append(head({v.name}) + self.{level}[i].view(1, -1, 1, 1))")
    w.let(w.choose(f"{outs}[0] * {outs}[1]", f"sum({outs})", f"torch.stack({outs}).sum(0)"), *v.shape)


@idiom()
def features_in_a_dict(w: Writer) -> None:
    v = w.pick()
    feats = w.name("feats")
    w.line(f'{feats} = {{"a": {v.name}, "b": [{v.name}]}}')
    w.let(f'F.relu({feats}["a"])', *v.shape)


@idiom()
def table(w: Writer) -> None:
    v = w.pick()
    f = w.choose(
        "torch.tanh({x})", "{x}.sigmoid()", "F.gelu({x})", "F.leaky_relu({x}, 0.2)", "F.elu({x})", "F.softplus({x})",
        "torch.exp({x} * 0.2)", "torch.sin({x})", "torch.abs({x})", "F.hardtanh({x}, -1.0, 1.0)", "torch.clamp({x}, 0)",
        "torch.clamp({x}, min=-1.0, max=np.float32(1))", "F.relu6(input={x})",
    )  # fmt: skip
    w.let(f.format(x=v.name), *v.shape)


@idiom()
def masked(w: Writer) -> None:
    v = w.pick()
    name = w.name("mask")
    w.made.append(f'self.register_buffer("{name}", torch.rand({v.height}, {v.width}) > 0.5)')
    fill = w.choose(f"torch.zeros_like({v.name})", f"{v.name} * 0.5", "0.0")
    w.let(w.choose(f"torch.where(self.{name}, {v.name}, {fill})", f"{v.name}.masked_fill(self.{name}, 0.0)"), *v.shape)


@idiom()
def moved(w: Writer) -> None:
    v = w.pick()
    f = w.choose(
        "torch.roll({x}, (1, 1), (2, 3))",
        "{x}.flip(3)",
        "{x}.transpose(2, 3).contiguous()",
        "{x}.unsqueeze(1).squeeze(1)",
        "{x}.clone()",
    )
    w.let(f.format(x=v.name), *v.shape)


@idiom()
def shuffled(w: Writer) -> None:
    v = w.pick()
    name = w.name("order")
    w.made.append(f'self.register_buffer("{name}", torch.randperm({v.channels}))')
    w.let(w.choose(f"{v.name}[:, self.{name}]", f"{v.name}.index_select(1, self.{name})"), *v.shape)


@idiom()
def functional_layer(w: Writer) -> None:
    v = w.pick()
    name = w.name("kernel")
    w.made.append(f"self.{name} = nn.Parameter(torch.randn({v.channels}, {v.channels}) * 0.3)")
    w.let(f"F.linear({v.name}.permute(0, 2, 3, 1), self.{name}).permute(0, 3, 1, 2)", *v.shape)


@idiom()
def norms(w: Writer) -> None:
    v = w.pick()
    c = v.channels
    made = w.choose(f"nn.BatchNorm2d({c})", f"nn.GroupNorm(2, {c})", f"nn.InstanceNorm2d({c})", "layer")
    if made == "layer":
        w.let(f"F.layer_norm({v.name}, ({v.width},))", *v.shape)
        return
    w.let(f"{w.module(made, 'norm')}({v.name})", *v.shape)


@idiom()
def pruned(w: Writer) -> None:
    v = w.pick()
    name = w.name("sparse")
    w.made.append(f"self.{name} = nn.Conv2d({v.channels}, {v.channels}, 1)")
    w.prepared.append(f'prune.l1_unstructured(self.{name}, "weight", 0.5)')
    w.let(f"self.{name}({v.name})", *v.shape)


@idiom()
def hooked(w: Writer) -> None:
    v = w.pick()
    name = w.name("hooked")
    w.made.append(f"self.{name} = nn.Conv2d({v.channels}, {v.channels}, 1)")
    w.prepared.append(
        w.choose(
            f"self.{name}.register_forward_hook(lambda m, a, o: None)",
            f"self.{name}.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)",
            f"self.{name}.register_forward_pre_hook(lambda m, a: None)",
            f"self.{name}.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)",
        )
    )
    w.let(f"self.{name}({v.name})", *v.shape)


@idiom()
def called_twice(w: Writer) -> None:
    v = w.pick()
    layer = w.module(_convolution(w, v, v.channels), "twice")
    w.let(f"{layer}({layer}({v.name}))", *v.shape)


@idiom()
def member_used_elsewhere(w: Writer) -> None:
    v = w.pick()
    conv, bn = w.module(_convolution(w, v, v.channels), "conv"), w.module(f"nn.BatchNorm2d({v.channels})", "bn")
    raw = w.let(f"{conv}({v.name})", *v.shape)
    w.let(f"F.relu({bn}({raw.name})) + {raw.name}", *v.shape)


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
def layers_by_name(w: Writer) -> None:
    v = w.pick()
    stem = w.name("stage")
    w.made.append("for i in range(2):")
    w.made.append(
        f'    setattr(self, f"{stem}_{{i}}", nn.Sequential(nn.Conv2d({v.channels}, {v.channels}, 1), nn.ReLU()))'
    )
    new = w.let(v.name, *v.shape)
    w.line("for i in range(2):")
    w.line(f'    {new.name} = getattr(self, f"{stem}_{{i}}")({new.name})')


@idiom()
def function_inside(w: Writer) -> None:
    v = w.pick()
    f = w.name("f")
    if w.maybe():
        w.line(f"{f} = lambda t: t.sigmoid() * t")
    else:
        w.line(f"def {f}(t, gain=0.5):")
        w.line("    return F.relu(t) * gain")
    w.let(f"{f}({v.name})", *v.shape)


@idiom()
def static_method(w: Writer) -> None:
    v = w.pick()
    name = w.name("squash")
    w.methods.append(["@staticmethod", f"def {name}(t, low, high=1.0):", "    return torch.clamp(t, low, high)"])
    w.let(f"self.{name}({v.name}, -1)", *v.shape)


@idiom()
def upsampled(w: Writer) -> None:
    v = w.pick()
    if v.height > 8:
        return
    up = w.module(
        w.choose(
            "nn.Upsample(scale_factor=2)",
            'nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)',
            "horizon.nn.Interpolate(scale_factor=2, recompute_scale_factor=True)",
            'horizon.nn.Interpolate(scale_factor=(2, 2), mode="bilinear", recompute_scale_factor=True)',
        ),
        "up",
    )
    w.let(f"{up}({v.name})", v.channels, v.height * 2, v.width * 2)


@idiom()
def windows(w: Writer) -> None:
    v = w.pick()
    part = w.name("windows")
    w.line(f"{part} = HF.window_partition({v.name}.permute(0, 2, 3, 1), 2)")
    w.let(f"HF.window_reverse({part}, 2, {v.height}, {v.width}).permute(0, 3, 1, 2)", *v.shape)


@idiom()
def multi_head(w: Writer) -> None:
    v = w.pick()
    if v.height > 4:
        v = w.let(f"F.max_pool2d({v.name}, {v.height // 4})", v.channels, 4, 4)
    mha = w.module(f"nn.MultiheadAttention({v.channels}, 2, batch_first=True)", "mha")
    t = w.name("t")
    w.line(f"{t} = {v.name}.flatten(2).transpose(1, 2)")
    call = w.choose("({t}, {t}, {t})", "(query={t}, key={t}, value={t})", "({t}, {t}, {t}, need_weights=False)")
    w.line(f"{t} = {mha}{call.format(t=t)}[0]")
    w.let(f"{t}.transpose(1, 2).reshape(-1, {v.channels}, 4, 4)", *v.shape)


@idiom()
def recurrent(w: Writer) -> None:
    v = w.pick()
    if v.height > 4:
        v = w.let(f"F.avg_pool2d({v.name}, {v.height // 4})", v.channels, 4, 4)
    cell = w.module(f"nn.{w.choose('GRU', 'LSTM')}({v.channels}, {v.channels}, batch_first=True)", "cell")
    t = w.name("t")
    w.line(f"{t}, _ = {cell}({v.name}.mean(3).transpose(1, 2))")
    w.let(f"{v.name} * {t}.transpose(1, 2).unsqueeze(-1)", *v.shape)


@idiom()
def zipped_levels(w: Writer) -> None:
    v = w.pick()
    a, b = w.name("lateral"), w.name("smooth")
    c = v.channels
    w.source.has_repeats = True
    w.made.append(f"self.{a} = nn.ModuleList([nn.Conv2d({c}, {c}, 1), nn.Conv2d({c}, {c}, 1)])")
    w.made.append(f"self.{b} = nn.ModuleList([nn.Conv2d({c}, {c}, 3, padding=1), nn.Identity()])")
    outs = w.name("outs")
    w.line(f"{outs} = [s(F.relu(l({v.name}))) for l, s in zip(self.{a}, self.{b})]")
    w.let(
        w.choose(f"{outs}[0] + {outs}[1]", f"torch.cat({outs}, 1)[:, :{c}]", f"torch.max({outs}[0], {outs}[1])"),
        *v.shape,
    )


@idiom()
def best_scores(w: Writer) -> None:
    v = w.pick()
    values, order = w.name("best"), w.name("where")
    w.line(f"{values}, {order} = {v.name}.flatten(2).topk(4, dim=-1)")
    w.let(f"{v.name} * {values}.mean(-1).reshape(-1, {v.channels}, 1, 1)", *v.shape)


@idiom()
def sums(w: Writer) -> None:
    v = w.pick()
    way = w.choose(
        "{x} - {x}.mean(1, keepdim=True)",
        "{x} + {x}.sum(dim=(2, 3), keepdim=True) * 0.02",
        "{x} * {x}.amax(1, keepdim=True)",
        "{x} + torch.mean(input={x}, dim=(-1,), keepdim=True)",
        "torch.sub({x}, {x}.max(dim=1, keepdim=True)[0])",
        "{x} - {x}.min(1, keepdim=True).values",
    )
    w.let(way.format(x=v.name), *v.shape)


@idiom(is_traceable=False)
def guarded(w: Writer) -> None:
    v = w.pick()
    new = w.name("x")
    w.line("try:")
    w.line(f"    {new} = {v.name} * 0.5")
    w.line("except KeyError:")
    w.line(f"    {new} = {v.name}")
    w.line(f"assert {new}.shape == {v.name}.shape, f'{{{new}.shape}}'")
    w.values.append(Value(new, *v.shape))
