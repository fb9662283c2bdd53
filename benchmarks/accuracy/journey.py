"""One network, one set of images, one seed: float, calibrated in every way, trained, converted, in ONNX Runtime."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy.data import DATA, Data
from benchmarks.accuracy.nets import NETS, RepVGG
from demo.common import count_mismatches, in_onnx_runtime, in_torch, progress, save_state
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QconfigSetter,
    auto_calibrate,
    calibrate,
    convert,
    get_default_qconfig,
    parameter_groups,
    prepare,
    set_fake_quantize,
    weight_reconstruction,
)
from horizon_plugin_pytorch.quantization.observer_v2 import MSEObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
)
from horizon_plugin_pytorch.statistics.observer_names import range_methods
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

BATCH, CALIBRATION_BATCHES, TEST_BATCH = 100, 10, 500
AUTO_IMAGES = 40  # of each batch
OBSERVERS = (*range_methods(), "histogram")
# How the scales of int8 weights are found, beside the documented max / 127.5.
WEIGHTS = {"max / 127": {"unclipped": True}, "mse": {"observer": MSEObserver}}
FORMATS = ("int8", "mixed", "int16")
FORMS = ("QAT", "quantized", "ONNX Runtime")


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        steps: batches.
        rate: the highest learning rate, of AdamW.
    """

    steps: int
    rate: float


@dataclass(frozen=True)
class Training:
    """How scales are found while training.

    Args:
        fake_quant: ``"fake_quant"`` or ``"lsq"``.
        activations, weights: arguments of their fake quantizers.
    """

    fake_quant: str
    activations: dict[str, Any]
    weights: dict[str, Any]


FLOAT_RATE = 4e-3
QAT = Recipe(600, 1e-4)  # this and the scales of TRAININGS chosen by `benchmarks.accuracy.choose`
# Of the slow networks, in formats in which calibration alone comes to float.
SHORT_QAT = dict.fromkeys(itertools.product(("Swin", "ViT"), ("mixed", "int16")), Recipe(200, 1e-4))
_LEARNED = {"use_grad_scaling": True, "averaging_constant": 1.0}
TRAININGS = {
    "STE": Training("fake_quant", {"averaging_constant": 0}, {"averaging_constant": 1}),  # activations as calibrated
    "LSQ": Training("lsq", _LEARNED, _LEARNED),
}


def titles(fmt: str) -> list[str]:
    """The rows of a format, in order."""
    if fmt == "float":
        return ["float"]
    weights = [f"mse, weights {name}" for name in WEIGHTS] if fmt == "int8" else []
    trained = [f"{form}, {training}" for training in TRAININGS for form in FORMS]
    return [*OBSERVERS, *weights, "auto_calibrate", "mse + AdaRound", *trained]


@dataclass(frozen=True)
class Task:
    """What to run.

    Args:
        data, net: names in `DATA` and `NETS`.
        seed: of the weights and of the order of the images.
    """

    data: str
    net: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.net}-{self.seed}"


def setter(
    fmt: str,
    observer: str,
    fake_quant: str = "fake_quant",
    activations: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
) -> QconfigSetter:
    """The rules for a format: int8; int16 with int16 weights; or int8 for what multiplies and int16 for the rest."""
    bits = qint16 if fmt == "int16" else qint8
    qconfig = get_default_qconfig(
        activation_fake_quant=fake_quant,
        weight_fake_quant=fake_quant,
        activation_observer=observer,
        activation_qkwargs={"dtype": bits} | (activations or {}),
        weight_qkwargs={"dtype": bits} | (weights or {}),
    )
    templates: list[Any] = []
    if fmt == "mixed":
        templates = [ModuleNameTemplate({"": qint16}), ConvDtypeTemplate(qint8, qint8), MatmulDtypeTemplate(qint8)]
    return QconfigSetter(qconfig, templates, save_dir=None)


def distance(logits: Tensor, wanted: Tensor) -> Tensor:
    """How far logits are from the wanted ones, as distributions over the classes."""
    return F.kl_div(logits.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean")


class Results:
    """What was found of one task, kept in a file row by row: an interrupted run goes on where it stopped.

    Args:
        file: where the rows are.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, fmt: str, title: str) -> bool:
        return title in self.rows.get(fmt, {})

    def add(self, fmt: str, title: str, **values: float) -> None:
        self.rows.setdefault(fmt, {})[title] = values
        write_atomically(json.dumps(self.rows, indent=1).encode(), str(self.file))
        said = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        print(f"{self.file.stem}, {fmt}, {title}: {said}", flush=True)


class Journey:
    """The forms of one network, and the accuracy of each.

    Args:
        task: which network, data and seed.
        folder: where trained networks and results are kept.
        data: other than the task's own.
    """

    def __init__(self, task: Task, folder: Path, data: Data | None = None) -> None:
        self.task, self.folder = task, folder
        self.data = data or DATA[task.data]()
        self.images = self.data.images
        self.batches = list(self.images.train_images.split(BATCH)[:CALIBRATION_BATCHES])
        self.results = Results(folder / f"{task.name}.json")

    def run(self) -> None:
        """Make the journey, and write what is found."""
        net = self.float_net()
        self._add("float", "float", lambda: net)
        for fmt in FORMATS:
            recipe = SHORT_QAT.get((self.task.net, fmt), QAT)
            for observer in OBSERVERS:
                self._add(fmt, observer, lambda fmt=fmt, observer=observer: self.calibrated(net, fmt, observer))
            for name, weights in WEIGHTS.items() if fmt == "int8" else ():
                title = f"mse, weights {name}"
                self._add(fmt, title, lambda weights=weights: self.calibrated(net, "int8", "mse", weights))
            self._add(fmt, "auto_calibrate", lambda fmt=fmt: self.auto_calibrated(net, fmt))
            self._add(fmt, "mse + AdaRound", lambda fmt=fmt: self._reconstructed(net, fmt))
            for title, training in TRAININGS.items():
                arguments = net, fmt, training, recipe
                self._add_deployed(fmt, title, lambda arguments=arguments: self.qat(*arguments))

    def float_net(self) -> nn.Module:
        torch.manual_seed(self.task.seed)
        net, file = NETS[self.task.net](), self.folder / f"{self.task.name}.pt"
        if file.exists():
            net.load_state_dict(torch.load(file, weights_only=True))
        else:
            steps = self.data.epochs * len(self.images.train_images) // BATCH
            self._train(net, Recipe(steps, FLOAT_RATE), "train float")
            save_state(net, file)
        return (net.merged() if isinstance(net, RepVGG) else net).eval()

    def _train(self, model: nn.Module, recipe: Recipe, title: str, teacher: nn.Module | None = None) -> None:
        """AdamW; the learning rate rises in the first steps and falls to zero.

        Args:
            teacher: the network whose outputs are to be met, instead of the labels.
        """
        images, labels = self.images.train_images, self.images.train_labels
        generator = torch.Generator().manual_seed(self.task.seed)
        groups = parameter_groups(model, recipe.rate, weight_decay=1e-3)
        optimizer = torch.optim.AdamW(groups)
        rates, rising = [group["lr"] for group in groups], max(0.1, 2 / recipe.steps)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, recipe.steps, pct_start=rising)
        model.train()
        order = torch.empty(0, dtype=torch.long)
        for _ in progress(range(recipe.steps), f"{self.task.name}: {title}", recipe.steps):
            if len(order) < BATCH:
                order = torch.randperm(len(images), generator=generator)
            chosen, order = order[:BATCH], order[BATCH:]
            batch = self.data.vary(images[chosen], generator)
            out = model(batch)
            if teacher is None:
                loss = F.cross_entropy(out, labels[chosen])
            else:
                with torch.no_grad():
                    wanted = teacher(batch)
                loss = distance(out, wanted)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()

    def calibrated(self, net: nn.Module, fmt: str, observer: str, weights: dict | None = None) -> nn.Module:
        chosen = setter(fmt, observer, weights=weights)
        model = prepare(net, (self.batches[0],), qconfig_setter=chosen, out_dir=None)
        calibrate(model, self.batches, patience=0, progress=False)
        return model

    def auto_calibrated(self, net: nn.Module, fmt: str) -> nn.Module:
        model = prepare(net, (self.batches[0],), qconfig_setter=setter(fmt, "mse"), out_dir=None)
        auto_calibrate(model, [batch[:AUTO_IMAGES] for batch in self.batches])
        return model

    def _reconstructed(self, net: nn.Module, fmt: str) -> nn.Module:
        model = self.calibrated(net, fmt, "mse")
        weight_reconstruction(model, self.batches)
        return model

    def qat(self, net: nn.Module, fmt: str, training: Training, recipe: Recipe) -> nn.Module:
        """Trained on the integer grid, towards the float network's outputs."""
        chosen = setter(fmt, "min_max", training.fake_quant, training.activations, training.weights)
        model = prepare(net, (self.batches[0],), qconfig_setter=chosen, out_dir=None)
        model.load_state_dict(self.calibrated(net, fmt, "mse").state_dict())
        set_fake_quantize(model, FakeQuantState.QAT)
        self._train(model, recipe, f"{fmt}, {training.fake_quant}", teacher=net)
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        return model

    def _add(self, fmt: str, title: str, make: Callable[[], nn.Module]) -> None:
        if not self.results.has(fmt, title):
            start = time.perf_counter()
            model = make()
            seconds = time.perf_counter() - start
            self.results.add(fmt, title, accuracy=self._accuracy(self.logits(in_torch(model))), seconds=seconds)

    def _add_deployed(self, fmt: str, title: str, make: Callable[[], nn.Module]) -> None:
        """A trained model, converted and exported, and how many logits differ, bit for bit, from its own."""
        trained, *deployed = [f"{form}, {title}" for form in FORMS]
        if self.results.has(fmt, deployed[-1]):
            return
        start = time.perf_counter()
        model = make()
        seconds = time.perf_counter() - start
        wanted = self.logits(in_torch(model))
        self.results.add(fmt, trained, accuracy=self._accuracy(wanted), seconds=seconds)
        quantized = convert(model)
        file = self.folder / f"{self.task.name}-{fmt}-{title}.onnx"
        export_quantized_onnx(quantized, self.images.test_images[:TEST_BATCH], file)
        for form, run in zip(deployed, (in_torch(quantized), in_onnx_runtime(file)), strict=True):
            logits = self.logits(run)
            self.results.add(fmt, form, accuracy=self._accuracy(logits), differing=count_mismatches(wanted, logits))
        file.unlink()

    def logits(self, run: Callable[[Tensor], list[Tensor]]) -> Tensor:
        return torch.cat([run(batch)[0] for batch in self.images.test_images.split(TEST_BATCH)])

    def _accuracy(self, logits: Tensor) -> float:
        return 100 * float((logits.argmax(1) == self.images.test_labels).double().mean())
