"""What each chip takes of layers with weights, from the published tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from horizon_plugin_pytorch.operators.support import INT8, INTS, WIDE, Limit, Support, Use, at_most, between, on


def _pairs(use: Use, *names: str) -> list[tuple[float, ...]]:
    """The numbers of several attributes, axis by axis."""
    return list(zip(*(use.numbers(name) for name in names), strict=False))


def _axes(text: str, names: str, holds: Callable[..., bool], advice: str = "") -> Limit:
    """A limit that compares attributes of the same axis."""
    parts = names.split()
    return Limit(
        text,
        lambda use: all(holds(*values) for values in _pairs(use, *parts)),
        lambda use: ", ".join(f"{name} {use.numbers(name)}" for name in parts),
        advice,
    )


def _one_of(name: str, *allowed: int) -> Limit:
    text = f"{name} {' or '.join(map(str, allowed))}"
    return Limit(text, lambda use: set(use.numbers(name)) <= set(allowed), lambda use: f"{name} {use.numbers(name)}")


def _batch(most: int) -> Limit:
    """The size of the first axis, whatever the rank."""
    return Limit(
        f"N <= {most}", lambda use: all(x.shape[0] <= most for x in use.inputs if x.shape), advice="use a smaller batch"
    )


def _per_group(use: Use) -> float:
    return next(iter(use.numbers("in_channels")), 0) / next(iter(use.numbers("groups")), 1)


def _taps(use: Use) -> float:
    taps = _per_group(use)
    for size in use.numbers("kernel_size"):
        taps *= size
    return taps


def _is_added(use: Use) -> bool:
    return sum(x.format in WIDE for x in use.inputs) > 1


_UNDILATED = "use dilation 1, or stride 1"
_DILATED = _axes("dilation 1, or stride 1", "dilation stride", lambda d, s: d == 1 or s == 1, _UNDILATED)
_ADDED = Limit(
    "stride 1 or 2, the same on both axes, where a tensor is added",
    lambda use: not _is_added(use) or set(use.numbers("stride")) in ({1}, {2}),
    lambda use: f"stride {use.numbers('stride')}",
    "put an Identity between the layer and the add",
)
_NO_REFLECT = Limit(
    "padding_mode is not reflect",
    lambda use: use.attributes.get("padding_mode") != "reflect",
    lambda use: "reflect",
    "pad with zeros or `replicate`",
)


def _is_narrow(use: Use) -> bool:
    is_inside = any(x.is_read for x in use.outputs)
    return all(c <= (8192 if is_inside else 16384) for c in use.numbers("out_channels"))


_OUT = Limit(
    "out_channels <= 8192, as output of the model 16384",
    _is_narrow,
    lambda use: f"out_channels {', '.join(map(str, use.numbers('out_channels')))}",
    "split it into several layers",
)
_CONV2D_BERNOULLI2 = (
    at_most("kernel_size", 7), _one_of("dilation", 1, 2, 4), _DILATED, _NO_REFLECT,
    Limit("weights of an output channel <= 32768", lambda use: _taps(use) <= 32768, lambda use: f"{_taps(use):.0f}"),
    Limit("channels of a group <= 2048", lambda use: _per_group(use) <= 2048, lambda use: f"{_per_group(use):.0f}"),
)  # fmt: skip
_CONV2D_BAYES = (
    at_most("in_channels", 8192), _OUT, at_most("kernel_size", 31), at_most("padding", 256), at_most("dilation", 16),
    _DILATED, _ADDED, _NO_REFLECT,
    Limit("weights of an output channel < 65535", lambda use: _taps(use) < 65535, lambda use: f"{_taps(use):.0f}"),
)  # fmt: skip
# NASH chips also take int16 weights. Their own list of limits breaks off before the layers.
_NASH = Support(INTS, WIDE, weights=INTS, note="int16 input and weight together from OE 3.5 on")
_BAYES_CONV2D = Support(
    INTS, WIDE, weights=INT8, limits=_CONV2D_BAYES, note="sums of int16 inputs must fit int32; real outputs as qint32"
)

CONV2D = on(
    bernoulli2=Support(INT8, ("qint8", "qint32"), weights=INT8, limits=_CONV2D_BERNOULLI2),
    bayes=_BAYES_CONV2D,
    nash=_NASH,
)
# Not in the tables: a Conv2d of height 1.
CONV1D = on(bayes=_BAYES_CONV2D, nash=_NASH)
CONV3D = on(
    bayes=Support(
        INT8, WIDE, weights=INT8,
        limits=(
            _batch(128),
            Limit("kernel D and H <= 9, W <= 8191",
                  lambda use: all(k <= most for k, most in zip(use.numbers("kernel_size"), (9, 9, 8191), strict=False)),
                  lambda use: f"kernel_size {use.numbers('kernel_size')}"),
            Limit("stride 1 or 2, the same on all axes", lambda use: set(use.numbers("stride")) in ({1}, {2}, set()),
                  lambda use: f"stride {use.numbers('stride')}"),
            _axes("padding <= kernel_size / 2", "padding kernel_size", lambda p, k: p <= k / 2),
            _one_of("groups", 1), _one_of("dilation", 1),
        ),
    ),
    nash=_NASH,
)  # fmt: skip
_TRANSPOSED_BAYES = Support(
    INT8, INT8, weights=INT8,
    limits=(
        _batch(128), at_most("in_channels", 2048), at_most("out_channels", 2048), between("kernel_size", 2, 14),
        between("stride", 1, 14), _one_of("dilation", 1), _one_of("output_padding", 0, 1),
        _axes("kernel_size >= stride", "kernel_size stride", lambda k, s: k >= s),
        _axes("padding <= kernel_size / stride", "padding kernel_size stride", lambda p, k, s: p <= k / s),
    ),
)  # fmt: skip
CONV_TRANSPOSE2D = on(
    bernoulli2=Support(
        INT8, INT8, weights=INT8,
        limits=(
            at_most("in_channels", 2048), at_most("out_channels", 2048), between("kernel_size", 2, 14),
            between("stride", 2, 4), _one_of("dilation", 1),
            _axes("padding <= (kernel_size - 1) / 2", "padding kernel_size", lambda p, k: p <= (k - 1) / 2),
        ),
    ),
    bayes=_TRANSPOSED_BAYES,
    nash=_NASH,
)  # fmt: skip
# Not in the tables either; one axis runs as two.
CONV_TRANSPOSE1D = on(bayes=_TRANSPOSED_BAYES, nash=_NASH)
CONV_TRANSPOSE3D = on(bayes=replace(_TRANSPOSED_BAYES, note="not in the published tables"), nash=_NASH)
LINEAR = on(
    bayes=Support(INT8, INT8, weights=INT8, limits=(at_most("in_features", 8192), at_most("out_features", 8192))),
    nash=_NASH,
)
# Alone it runs as a convolution with one weight a channel.
BATCH_NORM = on(
    bernoulli2=Support(INT8, INT8, limits=(at_most("num_features", 2048),)),
    bayes=Support(INT8, INT8, limits=(at_most("num_features", 8192),)),
    nash=Support(),
)
BATCH_NORM1D = on(bayes=BATCH_NORM["bayes"], nash=Support())
