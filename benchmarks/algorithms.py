"""What calibration methods give on networks that plain calibration hurts, trained on real digits.

python -m benchmarks.algorithms              two networks on digits, a few minutes
python -m benchmarks.algorithms --imagenet   weights of a pretrained EfficientNet-Lite0, a few minutes
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from demo.common import OUT, save_state
from demo.digits.__main__ import TEST_IMAGES, train
from demo.digits.data import Digits, load_digits
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    auto_calibrate,
    calibrate,
    correct_bias,
    equalize,
    get_default_qconfig,
    prepare,
    reestimate_bn,
    weight_reconstruction,
)
from horizon_plugin_pytorch.statistics.metrics import relative_error
from horizon_plugin_pytorch.statistics.observer_names import range_methods

BATCH, BATCHES = 50, 10
OBSERVERS = (*range_methods(), "histogram")


class MobileNetV1(nn.Module):
    """Depthwise and pointwise convolutions in turn: channels differ much in size."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        layers = [*_conv(1, 16, 3, 2)]
        for inputs, outputs, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
            layers += [*_conv(inputs, inputs, 3, stride, inputs), *_conv(inputs, outputs, 1)]
        self.features = nn.Sequential(*layers)
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.classifier(self.pool(self.features(self.quant(x))).flatten(1)))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


class RepBlock(nn.Module):
    """A 3x3 and a 1x1 convolution and the identity, each with a batch norm, added: one convolution after `merged`."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(*_conv(inputs, outputs, 3, stride)[:2])
        self.narrow = nn.Sequential(*_conv(inputs, outputs, 1, stride)[:2])
        self.identity = nn.BatchNorm2d(inputs) if stride == 1 and inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.wide(x) + self.narrow(x)
        return torch.relu(out if self.identity is None else out + self.identity(x))

    @torch.no_grad()
    def merged(self) -> nn.Sequential:
        conv = self.wide[0]
        plain = nn.Conv2d(conv.in_channels, conv.out_channels, 3, conv.stride, 1)
        one = torch.eye(conv.in_channels).reshape(conv.in_channels, -1, 1, 1)
        parts = [(conv.weight, self.wide[1]), (F.pad(self.narrow[0].weight, [1] * 4), self.narrow[1])]
        if self.identity is not None:
            parts.append((F.pad(one, [1] * 4), self.identity))
        gains = [bn.weight / (bn.running_var + bn.eps).sqrt() for _, bn in parts]
        plain.weight.copy_(sum(w * g.reshape(-1, 1, 1, 1) for (w, _), g in zip(parts, gains, strict=True)))
        plain.bias.copy_(sum(bn.bias - bn.running_mean * g for (_, bn), g in zip(parts, gains, strict=True)))
        return nn.Sequential(plain, nn.ReLU())


class RepVGG(nn.Module):
    """Blocks that are one convolution in deployment, whose weights have a wide range."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        sizes = ((1, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1))
        self.features = nn.Sequential(*[RepBlock(*size) for size in sizes])
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.classifier(self.pool(self.features(self.quant(x))).flatten(1)))

    def merged(self) -> RepVGG:
        plain = copy.deepcopy(self)
        plain.features = nn.Sequential(*[block.merged() for block in self.features])
        return plain


class Bench:
    """One network, and what its quantized forms give on the test images."""

    def __init__(self, name: str, net: nn.Module, data: Digits, weight_bits: int) -> None:
        self.net, self.data = net.eval(), data
        self.batches = list(data.train_images.split(BATCH)[:BATCHES])
        self.wanted = self.logits(net)
        self.limit = 2 ** (weight_bits - 1)
        self.rows: list[list[Any]] = []
        self.name = f"{name}, {weight_bits} bit weights"
        self.add("float", lambda: net)

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        return torch.cat([model(x) for x in self.data.test_images.split(BATCH)])

    def prepared(
        self, net: nn.Module | None = None, observer: str = "mse", weights: str = "min_max", unclipped: bool = False
    ) -> nn.Module:
        settings = {"quant_min": -self.limit, "quant_max": self.limit - 1, "unclipped": unclipped}
        made = get_default_qconfig(activation_observer=observer, weight_observer=weights, weight_qkwargs=settings)
        qconfig = {"": made, "module_name": {"classifier": made._replace(activation=None)}}
        example = (self.batches[0],)
        return prepare(self.net if net is None else net, example, qconfig_dict=qconfig, out_dir=None)

    def calibrated(self, *args: Any, **kwargs: Any) -> nn.Module:
        model = self.prepared(*args, **kwargs)
        calibrate(model, self.batches, patience=0, progress=False)
        return model

    def add(self, title: str, make: Callable[[], nn.Module]) -> None:
        start = time.perf_counter()
        model = make()
        seconds = time.perf_counter() - start
        found, labels = self.logits(model), self.data.test_labels
        accuracy = 100 * float((found.argmax(1) == labels).double().mean())
        error = 100 * relative_error(found, self.wanted)
        other = int((found.argmax(1) != self.wanted.argmax(1)).sum())
        self.rows.append([title, f"{accuracy:.2f}", other, f"{error:.2f}", f"{seconds:.1f}"])
        print("  ", *self.rows[-1], flush=True)

    def run(self) -> str:
        for observer in OBSERVERS:
            self.add(observer, lambda observer=observer: self.calibrated(observer=observer))
        self.add("mse, weights min_max without clipping", lambda: self.calibrated(unclipped=True))
        self.add("mse, weights mse", lambda: self.calibrated(weights="mse"))
        self.add("auto_calibrate", lambda: self._after(auto_calibrate, self.prepared()))
        self.add("mse + AdaRound", lambda: self._after(weight_reconstruction, self.calibrated()))
        self.add("mse + bias correction", lambda: self._after(correct_bias, self.calibrated()))
        self.add("equalize, mse", lambda: self.calibrated(self._after(equalize, copy.deepcopy(self.net))))
        if any(isinstance(m, nn.BatchNorm2d) for m in self.net.modules()):
            self.add("mse + BN re-estimation", self._reestimated)
        self.add("equalize, auto_calibrate, AdaRound, bias correction", self._everything)
        headers = [self.name, "accuracy, %", "other class than float", "logit error, %", "seconds"]
        return tabulate(self.rows, headers, tablefmt="pipe", disable_numparse=True)

    def _after(self, change: Callable[[nn.Module, list[Tensor]], Any], model: nn.Module) -> nn.Module:
        change(model, self.batches)
        return model

    def _reestimated(self) -> nn.Module:
        set_qat_mode(QATMode.WithBN)
        try:
            return self._after(reestimate_bn, self.calibrated())
        finally:
            set_qat_mode(QATMode.FuseBN)

    def _everything(self) -> nn.Module:
        model = self.prepared(self._after(equalize, copy.deepcopy(self.net)))
        for change in (auto_calibrate, weight_reconstruction, correct_bias):
            change(model, self.batches)
        return model


def trained(make: Callable[[], nn.Module], data: Digits, epochs: int, folder: Path) -> nn.Module:
    """The float network: from the file of an earlier run, or trained now."""
    net, file = make(), folder / f"{make.__name__}-{epochs}.pt"
    if file.exists():
        net.load_state_dict(torch.load(file, weights_only=True))
        return net
    torch.manual_seed(0)
    net = make()
    train(net, data, epochs, 4e-3, torch.Generator().manual_seed(0), f"train {make.__name__}")
    save_state(net, file)
    return net


def digits(epochs: int, folder: Path) -> list[str]:
    data = load_digits(TEST_IMAGES, torch.Generator().manual_seed(0))
    tables = []
    for make in (MobileNetV1, RepVGG):
        net: Any = trained(make, data, epochs, folder).eval()
        net = net.merged() if isinstance(net, RepVGG) else net
        for bits in (8, 4):
            print(make.__name__, bits, flush=True)
            tables.append(Bench(make.__name__, net, data, bits).run())
    return tables


def views(images: Tensor) -> Tensor:
    """Ten views of each photograph: whole, mirrored, and corners of two sizes."""
    found = [images, images.flip(3)]
    for size in (192, 208):
        rest = images.shape[-1] - size
        for top, left in ((0, 0), (0, rest), (rest, 0), (rest, rest)):
            part = images[:, :, top : top + size, left : left + size]
            found.append(F.interpolate(part, size=images.shape[2:], mode="bilinear"))
    return torch.cat(found)


def imagenet() -> list[str]:
    """How the weights' scale is found, on a pretrained network; calibrated on the twenty photographs."""
    from demo.imagenet.data import load_photographs
    from demo.imagenet.model import load_net

    images, labels = load_photographs()
    net, test, labels = load_net(), views(images), labels.repeat(10)

    @torch.no_grad()
    def logits(model: nn.Module) -> Tensor:
        return torch.cat([model(x) for x in test.split(20)])

    wanted = logits(net)
    rows: list[list[Any]] = []

    def add(title: str, found: Tensor) -> None:
        right = int((found.argmax(1) == labels).sum())
        other = int((found.argmax(1) != wanted.argmax(1)).sum())
        rows.append([title, right, other, f"{100 * relative_error(found, wanted):.2f}"])
        print("  ", *rows[-1], flush=True)

    add("float", wanted)
    for title, weights, settings in (
        ("min_max (max/127.5)", "min_max", {}),
        ("min_max without clipping (max/127)", "min_max", {"unclipped": True}),
        ("mse", "mse", {}),
    ):
        made = get_default_qconfig(activation_observer="mse", weight_observer=weights, weight_qkwargs=settings)
        qconfig = {"": made, "module_name": {"net._fc": made._replace(activation=None)}}
        model = prepare(net, (images[:5],), qconfig_dict=qconfig, out_dir=None)
        calibrate(model, list(images.split(5)), patience=0, progress=False)
        add(title, logits(model))
    headers = ["EfficientNet-Lite0, weights", f"right of {len(test)}", "other class than float", "logit error, %"]
    return [tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="of float training")
    parser.add_argument("--out", type=Path, default=OUT / "algorithms", help="folder for the trained networks")
    parser.add_argument("--imagenet", action="store_true")
    arguments = parser.parse_args()
    set_march(March.BAYES)
    tables = imagenet() if arguments.imagenet else digits(arguments.epochs, arguments.out)
    print("", *tables, sep="\n\n")


if __name__ == "__main__":
    main()
