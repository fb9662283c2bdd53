"""How cost grows with work: `python -m benchmarks.growth` draws `docs/growth.svg` and prints the figures.

Each curve is processor time on one thread. The networks are chains of small convolutions, so that what grows is the
number of modules; for batch and resolution the network stays and the data grow. A curve is straight if its cost is
proportional to the work: the last column of the table is the exponent, the slope between the two largest sizes in a
picture with logarithmic axes.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.run import build
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    auto_calibrate,
    calibrate,
    convert_fx,
    correct_bias,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
    weight_reconstruction,
)

Curve = list[tuple[int, float]]
PICTURE = Path(__file__).parent.parent / "docs" / "growth.svg"
COLORS = ("#1f6fb4", "#d95f02", "#2ca25f", "#7b3294", "#c51b7d", "#666666")


def chain(depth: int) -> nn.Module:
    """As many convolutions as modules are wanted, half of the modules being activations."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(depth // 2):
        layers += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.ReLU()]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    return QuantWrapper(nn.Sequential(*layers)).eval()


def images(count: int = 2, batch: int = 2, size: int = 8) -> list[Tensor]:
    """Batches of noise."""
    torch.manual_seed(1)
    return [torch.randn(batch, 3, size, size) for _ in range(count)]


def seconds(work: Callable[[], Any], rounds: int = 1) -> float:
    """Processor time, the least of several rounds."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def prepared(net: nn.Module) -> nn.Module:
    """By tracing."""
    return prepare_qat_fx(net, {"": get_default_qconfig(activation_observer="mse")})


def calibrated(net: nn.Module) -> nn.Module:
    """Ready for the methods."""
    model = prepared(net)
    calibrate(model, images(), progress=False)
    return model


def by_depth(depths: Sequence[int], most: int) -> dict[str, Curve]:
    """Verbs and methods, by the number of modules.

    Args:
        most: the largest network for the methods that go through the layers one by one.
    """
    curves: dict[str, Curve] = {}
    steps = {"num_steps": 5}
    weight_reconstruction(
        calibrated(chain(4)), images(), custom_config_dict=steps
    )  # the first call of all takes longer
    for depth in depths:
        net, data = chain(depth), images()
        jobs: dict[str, Callable[[], Any]] = {
            "prepare_qat_fx": lambda net=net: prepared(net),
            "prepare by running": lambda net=net, data=data: prepare(
                net, (data[0],), qconfig_dict={"": get_default_qconfig()}, out_dir=None
            ),
        }
        model = prepared(net)
        jobs["calibrate"] = lambda model=model, data=data: calibrate(model, data, progress=False)
        if depth <= most:
            ready = calibrated(net)
            jobs["auto_calibrate"] = lambda net=net, data=data: auto_calibrate(
                prepared(net), data, observer_list=("min_max", "mse")
            )
            jobs["weight_reconstruction"] = lambda ready=ready, data=data: weight_reconstruction(
                copy.deepcopy(ready), data, custom_config_dict=steps
            )
            jobs["correct_bias"] = lambda ready=ready, data=data: correct_bias(copy.deepcopy(ready), data)
        for name, job in jobs.items():
            curves.setdefault(name, []).append((depth, seconds(job)))
            print(f"{name}, {depth} modules: {curves[name][-1][1]:.2f} s", flush=True)
    return curves


@torch.no_grad()
def by_data(sizes: Sequence[tuple[int, int]]) -> dict[str, Curve]:
    """Forwards of ResNet18, by the number of pixels: of more images, and of larger ones."""
    net = build("ResNet18").eval()
    model = prepared(net)
    calibrate(model, images(size=64), progress=False)
    observing = prepared(net)
    set_fake_quantize(observing, FakeQuantState.CALIBRATION)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    forms = {"float": net, "calibration": observing, "VALIDATION": model, "converted": convert_fx(copy.deepcopy(model))}
    curves: dict[str, Curve] = {}
    for batch, size in sizes:
        [x] = images(1, batch, size)
        for name, form in forms.items():
            form.eval()(x)
            curves.setdefault(name, []).append((batch * size**2, seconds(lambda form=form, x=x: form(x), 2)))
    return curves


def by_processes(counts: Sequence[int], depth: int = 50, batch: int = 16) -> dict[str, Curve]:
    """Calibration in several processes, by their number: the time of one of them, the slowest.

    Each has a whole batch, or the processes share one. What a process waits for the others takes no processor time.
    """
    curves: dict[str, Curve] = {}
    for count in counts:
        for name, size in (("a batch each", batch), ("a batch shared", batch // count)):
            with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(count) as pool:
                jobs = [(f"{folder}/store", rank, count, depth, size) for rank in range(count)]
                found = pool.map(_calibrate_together, jobs, chunksize=1)
            curves.setdefault(name, []).append((count, max(found)))
            print(f"{name}, {count} processes: {curves[name][-1][1]:.2f} s", flush=True)
    return curves


def _calibrate_together(job: tuple[str, int, int, int, int]) -> float:
    """What each process does; the second calibration counts, as the first one of all takes longer."""
    store, rank, count, depth, batch = job
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    set_march(March.NASH_E)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    model, data = prepared(chain(depth)), images(batch=batch, size=32)
    calibrate(model, data, progress=False)
    took = seconds(lambda: calibrate(model, data, progress=False))
    dist.destroy_process_group()
    return took


def exponent(curve: Curve) -> float:
    """The slope between the two largest sizes in logarithms: 1 is proportional, 2 the square."""
    (x, y), (more, cost) = sorted(curve)[-2:]
    return math.log(cost / y) / math.log(more / x)


def drawn(panels: dict[str, dict[str, Curve]]) -> str:
    """The curves as SVG, one panel beside the other, with logarithmic axes."""
    width, height, gap = 440, 320, 60
    parts = []
    for place, (title, curves) in enumerate(panels.items()):
        left = gap + place * (width + gap)
        points = [point for curve in curves.values() for point in curve]
        (low, high), (least, most) = ((math.log10(min(v)), math.log10(max(v))) for v in zip(*points, strict=True))

        def at(x: float, y: float, left=left, low=low, high=high, least=least, most=most) -> tuple[float, float]:
            across = (math.log10(x) - low) / (high - low or 1)
            up = (math.log10(y) - least) / (most - least or 1)
            return left + across * (width - 120), 30 + (1 - up) * (height - 70)

        parts.append(f'<text x="{left}" y="18" font-weight="bold">{title}</text>')
        parts.append(
            f'<rect x="{left}" y="30" width="{width - 120}" height="{height - 70}" fill="none" stroke="#bbb"/>'
        )
        for size in sorted({x for x, _ in points}):
            x, _ = at(size, 10**least)
            parts.append(f'<text x="{x:.0f}" y="{height - 22}" text-anchor="middle">{size:,}</text>')
        for power in range(math.ceil(least), math.floor(most) + 1):
            _, y = at(10**low, 10**power)
            parts.append(f'<path d="M{left} {y:.0f}h{width - 120}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g} s</text>')
        for number, (name, curve) in enumerate(curves.items()):
            color, places = COLORS[number % len(COLORS)], [at(*point) for point in sorted(curve)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<text x="{left + width - 114}" y="{44 + 16 * number}" fill="{color}">{name}</text>')
    size = f'width="{len(panels) * (width + gap) + gap}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">' + (
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Measure, print a table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[50, 100, 200, 500, 1000, 2000])
    parser.add_argument("--most", type=int, default=500, help="modules for the methods that treat layers one by one")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    set_march(March.NASH_E)
    panels = {
        "modules, a chain of convolutions": by_depth(options.depths, options.most),
        "pixels: images of 64 x 64, ResNet18": by_data([(batch, 64) for batch in (1, 2, 4, 8, 16)]),
        "pixels: two square images, ResNet18": by_data([(2, size) for size in (32, 64, 128, 256)]),
        "processes that calibrate": by_processes(options.processes),
    }
    rows = [
        [title, name, f"{curve[0][1]:.3g}", f"{curve[-1][1]:.3g}", f"{exponent(curve):.2f}"]
        for title, curves in panels.items()
        for name, curve in curves.items()
    ]
    headers = ["what grows", "what runs", "least, s", "most, s", "exponent at the end"]
    print(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))
    write_atomically(drawn(panels).encode(), options.picture)
    print(f"torch {torch.__version__}, one thread, processor time; drawn to {options.picture}")


if __name__ == "__main__":
    main()
