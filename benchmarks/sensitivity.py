"""The probe next to the documented sensitivity: how much of the error its first sites have, and in how much time.

python -m benchmarks.sensitivity                    all networks, some minutes
python -m benchmarks.sensitivity --nets swin        one of them

ResNet-50, Swin-T and a detector (DETR on a ResNet) have random weights of ordinary size; EfficientNet-Lite0 and Lite1
are pretrained, on the photographs of the demo. Mass is the share of the documented error of the first 20 % of the sites
that the first 20 % by the probe have. Times are of the processor.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tabulate import tabulate
from torch import Tensor, nn

from demo.imagenet.data import load_photographs
from demo.imagenet.model import load_net
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, run
from horizon_plugin_pytorch.analysis.tuning.probe import measure, probe
from horizon_plugin_pytorch.analysis.tuning.sites import MixedModel, Site
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import calibrate, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from tests.zoo import architectures
from tests.zoo.wrappers import Wrapped

TOP = 0.2
Net = tuple[nn.Module, list[Tensor]]


def _random(make: Callable[[], nn.Module], size: int, name: str) -> Net:
    torch.manual_seed(0)
    architectures.ARCHITECTURES[name] = lambda: (Wrapped(make()), architectures.image(size))
    model, _ = architectures.build(name)
    return model, list(torch.randn(8, 3, size, size).split(4))


def resnet50() -> Net:
    """Random weights, statistics of data."""
    config = hf.ResNetConfig(num_labels=100)
    return _random(lambda: hf.ResNetForImageClassification(config), 64, "bench_resnet50")


def swin_t() -> Net:
    """Random weights."""
    config = hf.SwinConfig(image_size=64, patch_size=2, window_size=4, num_labels=100)
    return _random(lambda: hf.SwinForImageClassification(config), 64, "bench_swin")


def detector() -> Net:
    """DETR: boxes and classes of 20 queries, on a ResNet of 18 layers."""
    backbone = hf.ResNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", out_features=["stage4"]
    )
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=64,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, num_queries=20, num_labels=20,
    )  # fmt: skip
    torch.manual_seed(0)
    net = Wrapped(hf.DetrForObjectDetection(config), outputs=("logits", "pred_boxes"))
    architectures.ARCHITECTURES["bench_detector"] = lambda: (net, architectures.image(96))
    return architectures.build("bench_detector")[0], list(torch.randn(8, 3, 96, 96).split(4))


def efficientnet(size: int) -> Net:
    """Pretrained, on photographs."""
    images, _ = load_photographs(128)
    return load_net(size), list(images[:8].split(4))


NETS: dict[str, Callable[[], Net]] = {
    "resnet50": resnet50,
    "swin": swin_t,
    "detector": detector,
    "lite0": lambda: efficientnet(0),
    "lite1": lambda: efficientnet(1),
}


def mixed_model(net: nn.Module, data: list[Tensor]) -> MixedModel:
    """int8 and int16, calibrated on all of the data."""
    models = []
    for dtype in (qint8, qint16):
        rules = ModuleNameTemplate({"": {"weight": dtype, "output": dtype}})
        model = prepare(net, (data[0],), QconfigSetter(get_qconfig(), [rules], save_dir=None), out_dir=None)
        calibrate(model, data, patience=0, progress=False)
        models.append(model)
    return MixedModel(*models)


def compare(name: str, draws: list[int]) -> list[list[Any]]:
    """One network: a row for each number of draws."""
    net, data = NETS[name]()
    mixed = mixed_model(net, data)
    with mixed.in_float() as model:
        wanted = Wanted.of(run(model, data))
    mixed.raise_to(())
    start = time.process_time()
    exact: dict[Site, float] = {
        site: float(measure(mixed, site, data, wanted).double().square().sum()) for site in mixed.sites
    }
    reference = time.process_time() - start
    count = max(1, round(TOP * len(exact)))
    first = sorted(exact, key=lambda site: -exact[site])[:count]
    rows = []
    for number in draws:
        start = time.process_time()
        found = probe(mixed, data, wanted, number)
        taken = time.process_time() - start
        mine = sorted(found, key=lambda site: -found[site].error)[:count]
        mass = sum(exact[site] for site in mine) / sum(exact[site] for site in first)
        share = len(set(first) & set(mine)) / count
        row = [name, len(exact), number, f"{mass:.2%}", f"{share:.2f}", f"{taken:.1f}", f"{reference:.1f}"]
        rows.append([*row, f"1/{reference / taken:.0f}"])
        print("  ", *rows[-1], flush=True)
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument("--draws", nargs="*", type=int, default=[2, 3, 4])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    set_march(March.NASH_M)
    rows = [row for name in arguments.nets for row in compare(name, arguments.draws)]
    headers = ["network", "sites", "draws", "mass", "overlap", "probe s", "documented s", "time"]
    print("", tabulate(rows, headers, tablefmt="pipe", disable_numparse=True), sep="\n\n")


if __name__ == "__main__":
    main()
