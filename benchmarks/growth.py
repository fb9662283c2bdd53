"""How cost grows with work: `python -m benchmarks.growth` draws `docs/growth.svg` and prints the figures.

Each curve is processor time on one thread. The networks are chains of small convolutions, so that what grows is the
number of modules; for batch and resolution the network stays and the data grow. A curve is straight if its cost is
proportional to the work: the last column of the table is the exponent, the slope of a line through the points of a
picture with logarithmic axes. What other jobs do to a processor's caches moves it; ``--calls`` counts calls of
functions instead, which nothing moves, so that a square shows in networks of a few hundred modules. It counts some
verbs more than the picture has; its exponent is that between the two largest networks, which tells more of growth:

    python -m benchmarks.growth --calls                            every verb, of 100, 200 and 400 modules
    python -m benchmarks.growth --calls --verbs record_program --depths 50 100

Points are kept in a file as they are found: ``--panels`` and ``--verbs`` measure some of them, and the picture has all.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import functools
import io
import json
import math
import multiprocessing
import os
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.run import build
from demo.common import OUT
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.program import record_program
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
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

Curve = list[tuple[int, float]]
Panels = dict[str, dict[str, Curve]]
Keep = Callable[[str, int, float], None]  # is told what was measured, at which size, and its cost
PICTURE = Path(__file__).parent.parent / "docs" / "growth.svg"
KEPT = OUT / "growth.json"
COLORS = ("#1f6fb4", "#d95f02", "#2ca25f", "#7b3294", "#c51b7d", "#666666", "#8c5109", "#111111", "#e6ab02")
ACROSS = 2  # panels beside each other
LARGEST = {"auto_calibrate by running": 1000}  # modules; twice as many would take about five minutes
DEPTHS, COUNTED_DEPTHS = (50, 100, 200, 500, 1000, 2000), (100, 200, 400)


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


def prepared_by_running(net: nn.Module, example: Tensor, observer: str = "min_max") -> nn.Module:
    """By running: the model keeps its own forward."""
    qconfigs = {"": get_default_qconfig(activation_observer=observer)}
    return prepare(net, (example,), qconfig_dict=qconfigs, out_dir=None)


def calibrated(net: nn.Module) -> nn.Module:
    """Ready for the methods."""
    model = prepared(net)
    calibrate(model, images(), progress=False)
    return model


Verbs = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


def verbs(depth: int) -> Verbs:
    """What is done with a chain of so many modules: what it takes, which is not measured, and what is."""
    net, data, steps = chain(depth), images(), {"num_steps": 5}
    observers = {"observer_list": ("min_max", "mse")}
    ready = functools.cache(lambda: calibrated(net))
    return {
        "prepare_qat_fx": (lambda: net, prepared),
        "prepare by running": (lambda: net, lambda m: prepared_by_running(m, data[0])),
        "calibrate": (lambda: prepared(net), lambda m: calibrate(m, data, progress=False)),
        "weight_reconstruction": (
            lambda: copy.deepcopy(ready()),
            lambda m: weight_reconstruction(m, data, custom_config_dict=steps),
        ),
        "correct_bias": (lambda: copy.deepcopy(ready()), lambda m: correct_bias(m, data)),
        "convert_fx": (lambda: copy.deepcopy(ready()), convert_fx),
        "record_program": (lambda: convert_fx(copy.deepcopy(ready())), lambda m: record_program(m, data[0])),
        "auto_calibrate": (lambda: prepared(net), lambda m: auto_calibrate(m, data, **observers)),
        "auto_calibrate by running": (
            lambda: prepared_by_running(net, data[0], "mse"),
            lambda m: auto_calibrate(m, data, **observers),
        ),
    }


def counted_verbs(depth: int) -> Verbs:
    """Those of the picture, and some that are too short for a clock. Forwards are later ones, which have their plans.

    Every model is made anew, so that no figure depends on which other verbs are counted.
    """
    data = images()
    ready = functools.cache(lambda: calibrated(chain(depth)))

    def validating() -> nn.Module:
        model = copy.deepcopy(ready()).eval()
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        return model

    @torch.no_grad()
    def warm(model: nn.Module) -> nn.Module:
        for _ in range(2):  # the second run of a layer finds what later ones use
            model(data[0])
        return model

    def checked(model: nn.Module) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            check_qat_model(model, data[0], save_results=False)

    forward = torch.no_grad()(lambda m: m(data[0]))
    return verbs(depth) | {
        "record_program, later": (
            lambda: warm(convert_fx(copy.deepcopy(ready()))),
            lambda m: record_program(m, data[0]),
        ),
        "forward, converted": (lambda: warm(convert_fx(copy.deepcopy(ready()))), forward),
        "forward, VALIDATION": (lambda: warm(validating()), forward),
        "check_qat_model": (lambda: copy.deepcopy(ready()), checked),
        "export_quantized_onnx": (
            lambda: warm(convert_fx(copy.deepcopy(ready()))),
            lambda m: export_quantized_onnx(m, data[0], io.BytesIO()),
        ),
        "state_dict": (ready, lambda m: m.state_dict()),
        "load_state_dict": (
            lambda: (copy.deepcopy(ready()), ready().state_dict()),
            lambda pair: pair[0].load_state_dict(pair[1]),
        ),
    }


def function_calls(work: Callable[[], Any]) -> float:
    """How many calls of functions it makes, those of C among them."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return float(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def by_depth(
    keep: Keep,
    depths: Sequence[int],
    chosen: Sequence[str],
    measure: Callable[[Callable[[], Any]], float],
    of: Callable[[int], Verbs] = verbs,
) -> None:
    """Verbs and methods, by the number of modules.

    Args:
        chosen: names of verbs.
        measure: `seconds` or `function_calls`.
        of: `verbs` or `counted_verbs`.
    """
    for place, depth in enumerate((4, *depths)):  # the first call of all takes longer, and does not count
        for name, (need, work) in of(depth).items():
            if name in chosen and depth <= LARGEST.get(name, depth):
                model = need()
                cost = measure(lambda work=work, model=model: work(model))
                if place:
                    keep(name, depth, cost)


@torch.no_grad()
def by_data(keep: Keep, sizes: Sequence[tuple[int, int]]) -> None:
    """Forwards of ResNet18, by the number of pixels: of more images, and of larger ones."""
    net = build("ResNet18").eval()
    model = prepared(net)
    calibrate(model, images(size=64), progress=False)
    observing = prepared(net)
    set_fake_quantize(observing, FakeQuantState.CALIBRATION)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    forms = {"float": net, "calibration": observing, "VALIDATION": model, "converted": convert_fx(copy.deepcopy(model))}
    for batch, size in sizes:
        [x] = images(1, batch, size)
        for name, form in forms.items():
            form.eval()(x)
            keep(name, batch * size**2, seconds(lambda form=form, x=x: form(x), 3))


def by_processes(keep: Keep, counts: Sequence[int], depth: int = 50, batch: int = 16) -> None:
    """Calibration in several processes, by their number: the time of one of them, the slowest.

    Each has a whole batch, or the processes share one. What a process waits for the others takes no processor time.
    """
    for count in counts:
        for name, size in (("a batch each", batch), ("a batch shared", batch // count)):
            with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(count) as pool:
                jobs = [(f"{folder}/store", rank, count, depth, size) for rank in range(count)]
                found = pool.map(_calibrate_together, jobs, chunksize=1)
            keep(name, count, max(found))


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
    """The slope of the line that fits best in logarithms: 1 is proportional, 2 the square."""
    sizes, costs = ([math.log(value) for value in values] for values in zip(*curve, strict=True))
    return linear_regression(sizes, costs).slope


def keeping(panels: Panels, title: str, file: Path) -> Keep:
    """Points go into a panel and into a file, in which those of other runs stay."""

    def keep(name: str, size: int, cost: float) -> None:
        panels.clear()
        panels.update(read(file))
        curve = panels.setdefault(title, {}).setdefault(name, [])
        curve[:] = sorted([point for point in curve if point[0] != size] + [(size, cost)])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(json.dumps(panels, indent=1).encode(), file)
        print(f"{title}, {name}, {size:,}: {cost:.4g}", flush=True)

    return keep


def read(file: Path) -> Panels:
    """What was kept."""
    if not file.exists():
        return {}
    kept = json.loads(file.read_text())
    return {title: {name: list(map(tuple, curve)) for name, curve in of.items()} for title, of in kept.items()}


def drawn(panels: Panels) -> str:
    """The curves as SVG, two panels beside each other, with logarithmic axes; names in the order in which they end."""
    width, height, gap = 460, 320, 60
    parts = []
    for place, (title, curves) in enumerate(panels.items()):
        row, column = divmod(place, ACROSS)
        left, top = gap + column * (width + gap), row * height
        points = [point for curve in curves.values() for point in curve]
        (low, high), (least, most) = ((math.log10(min(v)), math.log10(max(v))) for v in zip(*points, strict=True))
        least = min(least, most - 1)  # a decade: less would make much of little

        def at(x: float, y: float, origin=(left, top), ends=(low, high, least, most)) -> tuple[float, float]:
            low, high, least, most = ends
            across = (math.log10(x) - low) / (high - low or 1)
            up = (math.log10(y) - least) / (most - least or 1)
            return origin[0] + across * (width - 140), origin[1] + 30 + (1 - up) * (height - 70)

        parts.append(f'<text x="{left}" y="{top + 18}" font-weight="bold">{title}</text>')
        parts.append(
            f'<rect x="{left}" y="{top + 30}" width="{width - 140}" height="{height - 70}" fill="none" stroke="#bbb"/>'
        )
        for size in sorted({x for x, _ in points}):
            x, _ = at(size, 10**least)
            parts.append(f'<text x="{x:.0f}" y="{top + height - 22}" text-anchor="middle">{size:,}</text>')
        for value in ticks(least, most):
            _, y = at(10**low, value)
            parts.append(f'<path d="M{left} {y:.0f}h{width - 140}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.0f}" text-anchor="end">{value:g} s</text>')
        ordered = sorted(curves, key=lambda name: -max(curves[name])[1])
        for name, color in zip(curves, COLORS[: len(curves)], strict=True):
            places = [at(*point) for point in sorted(curves[name])]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places]
            y = top + 44 + 16 * ordered.index(name)
            parts.append(f'<text x="{left + width - 134}" y="{y}" fill="{color}">{name}</text>')
    columns, rows = min(len(panels), ACROSS), -(-len(panels) // ACROSS)
    size = f'width="{columns * (width + gap) + gap}" height="{rows * height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">' + (
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def ticks(least: float, most: float) -> list[float]:
    """Values to be named on an axis between two powers of ten; within two decades twos and fives, too."""
    heads = (1,) if most - least >= 2 else (1, 2, 5)
    values = [head * 10.0**power for power in range(math.floor(least), math.ceil(most) + 1) for head in heads]
    return [value for value in values if least <= math.log10(value) <= most]


TITLES = {
    "depth": "modules, a chain of convolutions",
    "batch": "pixels: images of 64 x 64, ResNet18",
    "resolution": "pixels: two square images, ResNet18",
    "processes": "processes that calibrate",
}


def table(panels: Panels, digits: str = ".3g", at_the_end: bool = False) -> str:
    """The cost at every size, and the exponents.

    Args:
        digits: how costs are written.
        at_the_end: exponents are those between the two largest sizes.
    """
    parts = []
    title_of_exponent = "exponent at the end" if at_the_end else "exponent"
    for title, curves in panels.items():
        sizes = sorted({size for curve in curves.values() for size, _ in curve})
        rows = [
            [name, *(f"{dict(curve)[size]:{digits}}" if size in dict(curve) else "" for size in sizes)]
            + [f"{exponent(sorted(curve)[-2:] if at_the_end else curve):.2f}" if len(curve) > 1 else ""]
            for name, curve in curves.items()
        ]
        headers = [title, *(f"{size:,}" for size in sizes), title_of_exponent]
        parts.append(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print tables, and draw."""
    measured, counted = list(verbs(4)), list(counted_verbs(4))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", help=f"default {DEPTHS}, for --calls {COUNTED_DEPTHS}")
    parser.add_argument("--verbs", nargs="+", choices=counted, metavar="VERB", help="; ".join(counted))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--panels", nargs="*", choices=TITLES, default=list(TITLES))
    parser.add_argument("--calls", action="store_true", help="count calls of functions, by depth, and draw nothing")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where points are kept")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    depths = options.depths or (COUNTED_DEPTHS if options.calls else DEPTHS)
    names = options.verbs or (counted if options.calls else measured)
    if not options.calls and (only := [name for name in names if name not in measured]):
        parser.error(f"{', '.join(only)}: only --calls counts this")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    set_march(March.NASH_E)
    if options.calls:
        found: Panels = {"calls of functions, for modules": {}}
        by_depth(lambda *point: _count(found, *point), depths, names, function_calls, counted_verbs)
        print(table(found, ",.0f", at_the_end=True))
        return
    panels = read(options.kept)
    keep = {panel: keeping(panels, title, options.kept) for panel, title in TITLES.items()}
    work: dict[str, Callable[[], None]] = {
        "depth": lambda: by_depth(keep["depth"], depths, names, seconds),
        "batch": lambda: by_data(keep["batch"], [(batch, 64) for batch in (1, 2, 4, 8, 16)]),
        "resolution": lambda: by_data(keep["resolution"], [(2, size) for size in (32, 64, 128, 256)]),
        "processes": lambda: by_processes(keep["processes"], options.processes),
    }
    for panel in options.panels:
        work[panel]()
    panels = {title: panels[title] for title in TITLES.values() if title in panels}
    print(table(panels))
    write_atomically(drawn(panels).encode(), options.picture)
    print(f"torch {torch.__version__}, one thread, processor time in seconds; drawn to {options.picture}")


def _count(panels: Panels, name: str, size: int, cost: float) -> None:
    [curves] = panels.values()
    curves.setdefault(name, []).append((size, cost))
    print(f"{name}, {size:,}: {cost:,.0f} calls", flush=True)


if __name__ == "__main__":
    main()
