"""``python -m benchmarks.peers.worker TOOLKIT FOLDER``: measures one toolkit in its environment, prints JSON.

Speed on networks with random weights, interleaved with the float model in the same process; accuracy and exactness on
trained ones.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.data import DATA
from benchmarks.accuracy.nets import NETS
from benchmarks.peers.toolkits import TOOLKITS, Forward, Toolkit
from benchmarks.run import build, interleaved, training_step
from horizon_plugin_pytorch.fixed_point import integer_kernels

ABOUT = "about"  # beside the networks, what they ran on
SPEED_NETS = ("ResNet18", "MobileNetV2")
ROUNDS, BATCH, PIXELS = 7, 8, 128
CALIBRATION_BATCHES, TEST_BATCH = 10, 100
STEPS = 127  # outputs are compared as integers of so many steps on each side, whatever grid a toolkit has


def _without_stubs(model: nn.Module) -> nn.Module:
    model.quant, model.dequant = nn.Identity(), nn.Identity()
    return model


def _said(job: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, Any]:
    """What a job finds, or why it finds nothing: a toolkit may refuse a network."""
    try:
        return job(*arguments)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        said = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        return {f"{job.__name__} refused": f"{type(error).__name__}: {said[:300]}"}


def training(toolkit: Toolkit, name: str, images: Tensor) -> dict[str, float]:
    """A step of training on the integer grid over one in float."""
    labels = torch.randint(0, 1000, (len(images),))
    steps = {
        "float": training_step(_without_stubs(build(name)).train(), images, labels),
        "theirs": training_step(toolkit.training(_without_stubs(build(name)).eval(), images), images, labels),
    }
    return {"training": interleaved(steps, ROUNDS, f"{name} training", time.process_time)["theirs"]}


def calibration(toolkit: Toolkit, name: str, images: Tensor) -> dict[str, float]:
    """A batch of calibration over a float forward."""
    model = _without_stubs(build(name)).eval()
    with torch.no_grad():
        seconds = toolkit.calibration_seconds(_without_stubs(build(name)).eval(), images)
        ratios = [next(seconds) / _float_seconds(model, images) for _ in range(ROUNDS + 1)]
    return {"calibration": median(ratios[1:])}


def _float_seconds(model: nn.Module, images: Tensor) -> float:
    start = time.process_time()
    model(images)
    return time.process_time() - start


def forward(toolkit: Toolkit, name: str, images: Tensor) -> dict[str, float]:
    """The deployed form over a float forward in torch, and where it differs from the simulated one."""
    model = _without_stubs(build(name)).eval()
    with torch.no_grad():
        simulated, deployed = toolkit.quantized(_without_stubs(build(name)).eval(), [images])
        jobs: dict[str, Forward] = {"float": model, "simulated": simulated, "deployed": deployed}
        calls = {title: lambda run=run: run(images) for title, run in jobs.items()}
        found = interleaved(calls, ROUNDS, f"{name} forward", time.process_time)
        return {title: found[title] for title in ("simulated", "deployed")} | {
            "differing": _differing(simulated(images), deployed(images))
        }


def _differing(simulated: Tensor, deployed: Tensor) -> float:
    """Percent of outputs whose integers differ."""
    step = simulated.abs().max() / STEPS
    return 100 * float(((simulated / step).round() != (deployed / step).round()).float().mean())


def accuracy(toolkit: Toolkit, net: str, file: Path) -> dict[str, float]:
    """Percent of test images that float, the simulated and the deployed form get right, after calibration alone."""
    model = NETS[net]()
    model.load_state_dict(torch.load(file, weights_only=True))
    images = DATA["fashion"]().images
    batches = list(images.train_images.split(TEST_BATCH)[:CALIBRATION_BATCHES])
    with torch.no_grad():
        float_net = _without_stubs(model).eval()
        wanted = _logits(float_net, images.test_images)
        simulated, deployed = (_logits(form, images.test_images) for form in toolkit.quantized(float_net, batches))
    right = {
        title: 100 * float((logits.argmax(1) == images.test_labels).float().mean())
        for title, logits in (("float", wanted), ("simulated", simulated), ("deployed", deployed))
    }
    return right | {"differing": _differing(simulated, deployed)}


def _logits(form: Forward, images: Tensor) -> Tensor:
    return torch.cat([form(batch) for batch in images.split(TEST_BATCH)])


def versions(toolkit: type[Toolkit]) -> dict[str, str]:
    """Of torch, of what the toolkit is installed with, and of the engine, as they are in this environment."""
    names = ["torch", *(re.split("[<=>]", requirement)[0] for requirement in toolkit.requirements)]
    names += ["onnxruntime"] * (toolkit.deployed_in == "ONNX Runtime")
    return {name: version(name) for name in names}


def surroundings() -> dict[str, Any]:
    """When and on what it runs, and how many other jobs wait for the processor."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    name, flags = re.search(r"model name\s*:\s*(.+)", text), set(text.split())
    widest = next((name for name in ("avx512f", "avx2") if name in flags), "no AVX2")
    dots = next((name for name in ("avx512_vnni", "avx_vnni") if name in flags), "no VNNI")
    return {
        "date": str(datetime.date.today()),
        "processor": f"{name[1].strip() if name else platform.processor()}, {widest}, {dots}",
        "integer kernels": integer_kernels(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def results(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything about one toolkit, part by part."""
    toolkit, start = TOOLKITS[name](), time.monotonic()
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    yield ABOUT, surroundings() | {"versions": versions(TOOLKITS[name])}
    for net in SPEED_NETS:
        for job in (training, calibration, forward):
            yield net, _said(job, toolkit, net, images)
    for file in sorted(folder.glob("fashion-*-0.pt")):
        net = file.stem.split("-")[1]
        yield f"{net} on Fashion-MNIST", _said(accuracy, toolkit, net, file)
    yield ABOUT, {"load at the end": surroundings()["load"], "minutes": round((time.monotonic() - start) / 60, 1)}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for title, values in results(sys.argv[1], Path(sys.argv[2])):
        found.setdefault(title, {}).update(values)
        print("found:" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
