"""What goes into and comes out of each operator of a model: the tensors, and statistics of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import tensorboard_log, write_report
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, require_module
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.nn.intrinsic.fused import FusedModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.statistics.moments import moments
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.flow import TensorNotes, state_of
from horizon_plugin_pytorch.watch.operator_call import OperatorCall

STATISTICS = "statistic"
_RECORD, _PROFILE = "get_raw_features", "profile_featuremap"
_HEADERS = (
    "Module Index", "Module Name", "Module Type", "Input/Output/Attr", "Min", "Max", "Mean", "Var", "Scale", "Dtype",
)  # fmt: skip


def get_raw_features(
    model: nn.Module,
    example_inputs: Any,
    prefixes: Sequence[str] = (),
    types: Sequence[type] = (),
    device: torch.device | str | None = None,
    preserve_int: bool = False,
    use_class_name: bool = False,
    skip_identity: bool = False,
) -> list[dict[str, Any]]:
    """Record the inputs, outputs and parameters of each operator in one forward, in eval mode.

    Tensors that are given by keyword are recorded too. Everything is held at once: choose operators of large models.

    Args:
        model: float, fused, calibration, QAT or quantized; it is not changed.
        example_inputs: the model's arguments, as `prepare` takes them.
        prefixes, types: record only operators whose name starts with one of these, and those of one of these classes; a
            float class means what has become of its modules.
        device: where to run; None leaves model and inputs where they are.
        preserve_int: give the integers of what has a scale, rather than real numbers.
        use_class_name: types are names of classes, ``Conv2d``, rather than classes as they print.
        skip_identity: leave `nn.Identity` out.

    Returns:
        In the order of the forward, a dictionary for each tensor. ``module_name``: the module; for a function, the one
        that calls it. ``attr``: ``input``, ``input-0-1`` (the second item of the first argument), ``input-mask`` (a
        keyword), ``output``, ``weight``, ... ``data``: a copy. ``scale``: None without one. ``ch_axis``: -1 without a
        scale for each channel. ``ff_method``: of a FloatFunctional, else None. And for `profile_featuremap`:
        ``module_index``, ``shown_name``, ``module_type`` and ``dtype``.

    Raises:
        CheckError: when the model fails on these inputs.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> [(row["module_name"], row["attr"]) for row in get_raw_features(net, torch.ones(1, 2), types=(nn.ReLU,))]
    [('1', 'input'), ('1', 'output')]
    """
    features: list[dict[str, Any]] = []
    require_module(model, _RECORD)
    recorder = _Recorder(features.append, _copy_of, prefixes, types, preserve_int, use_class_name, skip_identity)
    recorder.chosen.tell_unused(model)
    WatchedRun(model, example_inputs, device, _RECORD).watch(recorder)
    return features


class StatisticsStream:
    """What `profile_featuremap` writes of what `get_raw_features` gives, of a run that it is told of call by call.

    No tensor is held, and each is looked at once, however many operators take it; histograms for tensorboard need
    copies of what is alive. The files are written at the end, also if an error or an interrupt is the end.

    Args:
        model: that runs.
        record: settings of `get_raw_features`, but for model, inputs and device.
        show: settings of `profile_featuremap`.
        out_dir: the folder of the files; None is the current one.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Mapping[str, Any] | None = None,
        show: Mapping[str, Any] | None = None,
        out_dir: str | os.PathLike | None = None,
    ) -> None:
        self._model, self._stack, self._is_written = model, ExitStack(), False
        self._report = _Report(self._stack, **{**(show or {}), "out_dir": out_dir})
        keep = _copy_of if self._report.has_histograms else Summary.of
        self._recorder = _Recorder(self._report.add, keep, **(record or {}))
        self._recorder.chosen.tell_unused(model)

    def __enter__(self) -> StatisticsStream:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        with self._stack:
            if not self._is_written:
                self.write()
            if error is None:
                self._report.require_all()

    def __call__(self, call: OperatorCall) -> None:
        """Look at a call."""
        self._recorder(call)

    def watch(self, example_inputs: Any, device: torch.device | str | None = None) -> None:
        """Run the model for this alone."""
        WatchedRun(self._model, example_inputs, device, _RECORD).watch(self)

    def write(self) -> None:
        """Write the files now rather than at the end."""
        self._is_written = True
        self._report.write()


@dataclass(frozen=True)
class Summary:
    """Numbers of a tensor; NaN where there are too few for them."""

    low: float = math.nan
    high: float = math.nan
    mean: float = math.nan
    var: float = math.nan
    nans: int = 0
    infs: int = 0

    @classmethod
    def of(cls, data: Tensor) -> Summary:
        """Those of a tensor.

        >>> Summary.of(torch.tensor([1, 2, 3]))
        Summary(low=1.0, high=3.0, mean=2.0, var=1.0, nans=0, infs=0)
        """
        if not data.numel():
            return cls()
        low, high = (float(end) for end in torch.aminmax(data))
        mean, var, _ = moments(data)
        if not data.is_floating_point() or (math.isfinite(low) and math.isfinite(high)):
            return cls(low, high, mean, var)
        return cls(low, high, mean, var, int(data.isnan().sum()), int(data.isinf().sum()))


def _copy_of(data: Tensor) -> Tensor:
    return data.clone()


@dataclass(frozen=True)
class _Kept:
    """What was kept of a tensor, and its `state_of` then."""

    data: Any
    state: Any


class _Recorder:
    """Hands on what calls take and give.

    Args:
        give: is given the dictionaries of `get_raw_features`.
        keep: what is kept of a tensor's numbers, as ``data``.
    """

    def __init__(
        self,
        give: Callable[[dict[str, Any]], Any],
        keep: Callable[[Tensor], Any],
        prefixes: Sequence[str] = (),
        types: Sequence[type] = (),
        preserve_int: bool = False,
        use_class_name: bool = False,
        skip_identity: bool = False,
    ) -> None:
        self.chosen = Chosen(_RECORD, prefixes, types)
        self._give, self._keep, self._keeps_integers = give, keep, preserve_int
        self._use_class_name, self._skip_identity = use_class_name, skip_identity
        self._results = TensorNotes()

    def __call__(self, call: OperatorCall) -> None:
        is_left_out = self._skip_identity and isinstance(call.module, nn.Identity)
        is_shown = self.chosen.has(call.path, call.module) and not is_left_out
        if is_shown:
            outputs = {id(x) for x in call.outputs}
            for attr, x in _named("input", call.args, call.kwargs):
                self._add(call, attr, x, self._known(x, is_given_back=id(x) in outputs))
        for x in call.outputs:  # a later call may overwrite it, and show it as its input
            if is_shown or not isinstance(x, QTensor):
                self._results[x] = _Kept(self._kept(x), state_of(x))
        if is_shown:
            for attr, x in _named("output", call.output):
                self._add(call, attr, x, self._known(x, is_given_back=True))
            for attr, x in _parameters(call.module) if call.repetition == 0 and call.module is not None else ():
                self._add(call, attr, x, self._kept(x))

    def _known(self, x: Tensor, is_given_back: bool) -> Any:
        """What is kept of a tensor; of one that a call gives back, perhaps with other numbers, what it was before."""
        known = self._results.get(x)
        if known is not None and (is_given_back or known.state == state_of(x)):
            return known.data
        return self._kept(x)

    @torch.no_grad()
    def _kept(self, x: Tensor) -> Any:
        if isinstance(x, QTensor):
            return self._keep((x.int_repr() if self._keeps_integers else x.dequantize()).detach())
        return self._keep(x.detach())

    def _add(self, call: OperatorCall, attr: str, x: Tensor, data: Any) -> None:
        scale, axis = None, -1
        if isinstance(x, QTensor):
            scale, axis = x.q_scale().detach().clone(), x.q_per_channel_axis()
        if call.module is None:
            kind = call.operator if self._use_class_name else f"<function '{call.operator}'>"
        else:
            kind = type(call.module).__name__ if self._use_class_name else str(type(call.module))
        self._give(
            {
                "module_name": call.path,
                "attr": attr,
                "data": data,
                "scale": scale,
                "ch_axis": axis,
                "ff_method": call.method or None,
                "module_index": call.index,
                "shown_name": call.name,
                "module_type": kind,
                "dtype": str(x.dtype),
            }
        )


def _named(kind: str, args: Any, kwargs: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names: ``input``, or where there are several ``input-0``, ``input-0-1``, ``input-mask``."""
    positional, by_name = [*located(args)], [*located(kwargs or {})]
    for path, x in (*positional, *by_name):
        is_only = len(positional) == 1 and not by_name and len(path) <= 1
        yield (kind if is_only else "-".join([kind, *map(str, path)])), x


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a module has learnt; weights with the scale that they are, or will be, rounded with."""
    layer = module.conv if isinstance(module, FusedModule) else module
    for name in dict.fromkeys(("weight", "bias", *layer._parameters)):
        is_buffer = isinstance(layer, QuantizedModule) and name in ("weight", "bias")
        x = layer._buffers.get(name) if is_buffer else layer._parameters.get(name)
        if x is None:
            continue
        quantizer = getattr(layer, f"{name}_fake_quant", None)
        if not x.is_floating_point() and hasattr(layer, "weight_scale"):
            axis = layer.output_axis if layer.weight_scale.numel() > 1 else -1  # type: ignore[union-attr, operator]
            yield name, QTensor(x, layer.weight_scale, layer.weight_dtype, axis)  # type: ignore[arg-type]
        elif not x.is_floating_point():
            yield name, QTensor(x, layer.scale, layer.out_dtype)  # type: ignore[arg-type]
        elif isinstance(quantizer, FakeQuantize) and quantizer.scale.numel() in (1, x.shape[quantizer.ch_axis]):
            yield name, QTensor(x.detach(), quantizer.scale, quantizer.dtype, quantizer.ch_axis)
        else:
            yield name, x


@dataclass(frozen=True)
class FeatureRow:
    """Statistics of a tensor; ``var`` is NaN for a single number."""

    index: int
    name: str
    type: str
    attr: str
    min: float
    max: float
    mean: float
    var: float
    scale: str
    dtype: str
    nans: int = 0
    infs: int = 0

    @property
    def largest(self) -> float:
        """The largest magnitude: how far a symmetric range must reach."""
        sizes = [abs(x) for x in (self.min, self.max)]
        return math.inf if any(map(math.isnan, sizes)) else max(sizes)

    @property
    def cells(self) -> list[str]:
        """As the guide prints them."""
        numbers = [f"{x:.7f}" for x in (self.min, self.max, self.mean, self.var)]
        return [str(self.index), self.name, self.type, self.attr, *numbers, self.scale, self.dtype]


def profile_featuremap(
    featuremap: Sequence[Mapping[str, Any]],
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike | None = None,
    print_per_channel_scale: bool = False,
    show_per_channel: bool = False,
    out_dir: str | os.PathLike | None = None,
    file_name: str | None = None,
) -> list[FeatureRow]:
    """Write statistics of each tensor that `get_raw_features` gave: ``statistic.txt`` and ``statistic.html``.

    The text has the rows in the order of the forward, then by their range, the largest first. If there are NaN or
    infinities, a third table lists them; it is printed, too.

    Args:
        featuremap: of `get_raw_features`.
        with_tensorboard: write histograms for tensorboard.
        tensorboard_dir: where to; None is ``runs/``.
        print_per_channel_scale: show scales for each channel in the tables; else they are left empty.
        show_per_channel: write a histogram for each channel.
        out_dir: the folder of the files; None is the current one.
        file_name: of both files, in place of ``statistic``.

    Returns:
        The rows, in the order of the forward.

    Raises:
        CheckError: a file cannot be written, or tensorboard is not installed.

    >>> import tempfile
    >>> net = nn.Sequential(nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = profile_featuremap(get_raw_features(net, torch.tensor([-1.0, 3.0])), out_dir=folder)
    >>> [(row.name, row.attr, row.min, row.max, row.mean) for row in rows]
    [('0', 'input', -1.0, 3.0, 1.0), ('0', 'output', 0.0, 3.0, 1.5)]
    """
    if isinstance(featuremap, Mapping) or not all(isinstance(feature, Mapping) for feature in featuremap):
        raise TypeError(f"{_PROFILE} takes the list of dictionaries that get_raw_features gives.")
    with ExitStack() as stack:
        report = _Report(
            stack, with_tensorboard, tensorboard_dir, print_per_channel_scale, show_per_channel, out_dir, file_name
        )
        for feature in featuremap:
            report.add(feature)
        report.write()
        report.require_all()
    return report.rows


class _Report:
    """Makes rows of features, one by one, and histograms for tensorboard; then the files. See `profile_featuremap`."""

    def __init__(
        self,
        stack: ExitStack,
        with_tensorboard: bool = False,
        tensorboard_dir: str | os.PathLike | None = None,
        print_per_channel_scale: bool = False,
        show_per_channel: bool = False,
        out_dir: str | os.PathLike | None = None,
        file_name: str | None = None,
    ) -> None:
        self._shows_scales, self._shows_channels = print_per_channel_scale, show_per_channel
        self._out_dir = out_dir
        self._stem = STATISTICS if file_name is None else file_name.removesuffix(".txt").removesuffix(".html")
        self._log: Any = None
        self._missing: CheckError | None = None  # is raised when all else is written
        if with_tensorboard:
            try:
                self._log = stack.enter_context(tensorboard_log(tensorboard_dir, _PROFILE))
            except CheckError as error:
                self._missing = error
        self.rows: list[FeatureRow] = []

    @property
    def has_histograms(self) -> bool:
        """Does it need the tensors themselves?"""
        return self._log is not None

    def add(self, feature: Mapping[str, Any]) -> None:
        """Look at a feature."""
        row = _row(len(self.rows), feature, self._shows_scales)
        self.rows.append(row)
        if self._log is not None:
            _add_histograms(self._log, f"{row.name}/{row.attr}", feature, self._shows_channels)

    def write(self) -> None:
        """Write the files; print what has NaN or infinities."""
        abnormal = _abnormal_text(self.rows)
        write_report(_text(self.rows, abnormal), self._out_dir, f"{self._stem}.txt", _PROFILE)
        write_report(_page(self.rows), self._out_dir, f"{self._stem}.html", _PROFILE)
        if abnormal:
            print(abnormal)

    def require_all(self) -> None:
        """Raise what kept histograms from being written, when all else is."""
        if self._missing is not None:
            raise self._missing


def _row(number: int, feature: Mapping[str, Any], shows_channels: bool) -> FeatureRow:
    data, scale = feature["data"], feature.get("scale")
    method = f"[{feature['ff_method']}]" if feature.get("ff_method") else ""
    shown = ""
    if scale is not None and (shows_channels or scale.numel() == 1):
        shown = ", ".join(f"{x:.7f}" for x in scale.flatten().tolist())
    found = data if isinstance(data, Summary) else Summary.of(data.detach())
    return FeatureRow(
        int(feature.get("module_index", number)),
        str(feature.get("shown_name", feature["module_name"] + method)),
        str(feature.get("module_type", "")),
        str(feature["attr"]),
        found.low,
        found.high,
        found.mean,
        found.var,
        shown,
        str(feature.get("dtype", getattr(data, "dtype", ""))),
        found.nans,
        found.infs,
    )


def _text(rows: Sequence[FeatureRow], abnormal: str) -> str:
    ordered = sorted(rows, key=lambda row: -row.largest)
    by_forward, by_range = (Table(_HEADERS, [row.cells for row in some]).text("psql") for some in (rows, ordered))
    text = f"{by_forward}\n\nStatistics with quant range in descending order...\n{by_range}\n"
    return f"{text}\n{abnormal}\n" if abnormal else text


def _abnormal_text(rows: Sequence[FeatureRow]) -> str:
    """The tensors with NaN or infinities; empty if there are none."""
    found = [[*row.cells[:4], row.dtype, row.nans, row.infs] for row in rows if row.nans or row.infs]
    headers = [*_HEADERS[:4], "Dtype", "NaN", "Inf"]
    return f"Layers with NaN or inf, please check..\n{Table(headers, found).text('psql')}" if found else ""


def _page(rows: Sequence[FeatureRow]) -> str:
    shown = [row for row in rows if row.attr.startswith("output")]
    labels = [f"{r.index} {r.name} {r.attr}: min {r.min:.7g}, max {r.max:.7g}, mean {r.mean:.7g}" for r in shown]
    curves = [Curve(name, [getattr(row, name) for row in shown], labels) for name in ("max", "min", "mean")]
    return page(
        STATISTICS,
        chart(curves, "operators in the order of the forward"),
        Table(_HEADERS, [row.cells for row in rows]).html(),
    )


def _add_histograms(log: Any, tag: str, feature: Mapping[str, Any], shows_channels: bool) -> None:
    data = feature["data"].detach().float()
    data = data.cpu()
    finite = data[data.isfinite()]
    if finite.numel():
        log.add_histogram(tag, finite)
    if shows_channels and data.dim() > 1:
        axis = feature["ch_axis"] if feature.get("ch_axis", -1) >= 0 else 1
        for number, channel in enumerate(data.unbind(axis)):
            kept = channel[channel.isfinite()]
            if kept.numel():
                log.add_histogram(f"{tag}/{number}", kept)


show_at("utils.quant_profiler", get_raw_features, profile_featuremap)
