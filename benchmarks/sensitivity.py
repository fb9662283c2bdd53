"""The probe next to the documented sensitivity: how much of the error its first sites have, and in how much time.

python -m benchmarks.sensitivity                    all networks, some minutes
python -m benchmarks.sensitivity --nets swin        one of them
python -m benchmarks.sensitivity --seeds 5          the mass is the least of so many draws of signs
python -m benchmarks.sensitivity --draws 2 3 4      the probe of tune by itself, with so many backwards

`QuantAnalysis.sensitivity` runs both ways on a batch of four images, as a user calls it. ResNet-50, a Swin and a
detector (DETR on a ResNet) have random weights of ordinary size; EfficientNet-Lite0 and Lite1 are pretrained, on the
photographs of the demo. Mass is the share of the documented error of the first 20 % of the sites that the first 20 %
by the estimate have, of the worst output. Times are of the processor, of the estimate the median of three, before and
after the measurement. AIMET's QuantAnalyzer is run where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from tabulate import tabulate
from torch import Tensor, nn

from demo.imagenet.data import load_photographs
from demo.imagenet.model import load_net
from horizon_plugin_profiler.model_profilerv2 import QuantAnalysis
from horizon_plugin_pytorch.analysis.quant_analysis.estimate import estimate
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, run
from horizon_plugin_pytorch.analysis.tuning.probe import measure, probe
from horizon_plugin_pytorch.analysis.tuning.sites import MixedModel, Site
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, calibrate, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
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
    config = hf.SwinConfig(
        image_size=64, patch_size=2, window_size=4, embed_dim=48, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16],
        num_labels=100,
    )  # fmt: skip
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


def mass_of(exact: Mapping[Any, float], found: Mapping[Any, float]) -> tuple[float, float]:
    """The share of the error of the first sites that the first by an estimate have, and of these sites themselves."""
    count = max(1, round(TOP * len(exact)))
    first, mine = (sorted(of, key=lambda site, of=of: -of[site])[:count] for of in (exact, found))
    total = sum(exact[site] for site in first)
    return sum(exact[site] for site in mine) / total if total else 1.0, len(set(first) & set(mine)) / count


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds of the processor."""
    start = time.process_time()
    found = run()
    return found, time.process_time() - start


def analyse(name: str, seeds: int) -> list[Any]:
    """One network through `QuantAnalysis`, both ways; the mass of several seeds is the least."""
    net, data = NETS[name]()
    model = prepare(net, (data[0],), default_calibration_qconfig_setter, out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        qa = QuantAnalysis(net, model, "fake_quant", out_dir=folder)
        qa.set_bad_case(data[0])
        runs = [timed(lambda: qa.sensitivity(use_sensitivity_v2=True)) for _ in range(2)]
        exact, reference = timed(lambda: qa.sensitivity("MSE"))
        runs += [timed(lambda: qa.sensitivity(use_sensitivity_v2=True)) for _ in range(2)]
        others = [of_seed(qa, data[0], seed) for seed in range(1, seeds)]
    taken = statistics.median(seconds for _, seconds in runs[1:])  # the first one warms up
    first = {output: {(row[0], row[1]): row[3] for row in rows} for output, rows in runs[0][0].items()}
    shares = [
        mass_of({(row[0], row[1]): row[3] for row in rows}, found[output])
        for output, rows in exact.items()
        for found in (first, *others)
    ]
    mass, overlap = min(shares)
    sites = len(next(iter(exact.values())))
    row = [name, sites, len(exact), f"{mass:.2%}", f"{overlap:.2f}", f"{taken:.1f}", f"{reference:.1f}"]
    row += [f"1/{reference / taken:.1f}", quant_analyzer(net, data[0])]
    print("  ", *row, flush=True)
    return row


def of_seed(qa: QuantAnalysis, batch: Tensor, seed: int) -> dict[str, dict[tuple[str, str], float]]:
    """What the estimate is with other signs."""
    found = estimate(qa._baseline, qa._analysis, batch, None, None, "benchmark", seed=seed)
    errors: dict[str, dict[tuple[str, str], float]] = {}
    for site, (_, by_output) in found.items():
        for output, values in by_output.items():
            errors.setdefault(output, {})[(site.operator, site.kind)] = values["MSE"]
    return errors


def quant_analyzer(net: nn.Module, batch: Tensor) -> str:
    """Seconds of the processor that AIMET (2.x, `pip install aimet-torch`) takes to enable one layer after another.

    That part of its QuantAnalyzer asks what the documented sensitivity asks; its whole report takes longer.
    Stubs are nothing to it; modules that it does not know it is told to leave in float, as its message says.
    """
    try:
        from aimet_torch import nn as aimet_nn
        from aimet_torch.common.utils import CallbackFunc
        from aimet_torch.quant_analyzer import QuantAnalyzer
        from aimet_torch.quantsim import QuantizationSimModel
    except ImportError:
        return "not installed"
    bare = copy.deepcopy(net)
    for path, module in list(bare.named_modules()):
        if isinstance(module, (QuantStub, DeQuantStub)):
            bare.set_submodule(path, nn.Identity())
    known = aimet_nn.QuantizationMixin.cls_to_qcls
    for module in bare.modules():
        if not list(module.children()) and type(module) not in known:
            aimet_nn.QuantizationMixin.ignore(type(module))
    with torch.no_grad():
        wanted = tensors_of(net(batch))

    @torch.no_grad()
    def show(model: nn.Module, _: Any) -> None:
        model(batch)

    @torch.no_grad()
    def score(model: nn.Module, _: Any) -> float:
        pairs = zip(tensors_of(model(batch)), wanted, strict=True)
        return -float(sum((x - y).square().mean() for x, y in pairs))

    with tempfile.TemporaryDirectory() as folder:
        try:
            analyzer = QuantAnalyzer(bare, batch, CallbackFunc(show), CallbackFunc(score))
            simulation = QuantizationSimModel(bare, batch, default_param_bw=8, default_output_bw=8)
            simulation.compute_encodings(show, None)
            found, taken = timed(
                lambda: analyzer.perform_per_layer_analysis_by_enabling_quant_wrappers(simulation, folder)
            )
        except Exception as error:  # it does not take every network
            return f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}"
    return f"{taken:.1f} ({len(found)} layers)"


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
    rows = []
    for number in draws:
        found, taken = timed(lambda number=number: probe(mixed, data, wanted, number))
        mass, overlap = mass_of(exact, {site: value.error for site, value in found.items()})
        row = [name, len(exact), number, f"{mass:.2%}", f"{overlap:.2f}", f"{taken:.1f}", f"{reference:.1f}"]
        rows.append([*row, f"1/{reference / taken:.0f}"])
        print("  ", *rows[-1], flush=True)
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", nargs="*", type=int, default=[])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    set_march(March.NASH_M)
    if arguments.draws:
        rows = [row for name in arguments.nets for row in compare(name, arguments.draws)]
        headers = ["network", "sites", "draws", "mass", "overlap", "probe s", "documented s", "time"]
    else:
        rows = [analyse(name, arguments.seeds) for name in arguments.nets]
        headers = ["network", "sites", "outputs", "mass", "overlap", "estimate s", "documented s", "time", "AIMET s"]
    print("", tabulate(rows, headers, tablefmt="pipe", disable_numparse=True), sep="\n\n")


if __name__ == "__main__":
    main()
