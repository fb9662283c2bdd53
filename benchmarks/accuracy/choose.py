"""How to train on the integer grid, chosen by training images that are held back from it; the test images stay unseen.

python -m benchmarks.accuracy.choose --net MobileNetV2 --steps 200 --rates 1e-4 5e-4
python -m benchmarks.accuracy.choose --table        only the table of what there is

The float networks are those of `benchmarks.accuracy`, which must have trained them.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from pathlib import Path
from statistics import mean

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.accuracy.data import DATA
from benchmarks.accuracy.journey import TRAININGS, Journey, Recipe, Results, Task, Training, distance
from benchmarks.accuracy.nets import NETS
from benchmarks.accuracy.page import publish
from demo.common import OUT, in_torch
from horizon_plugin_pytorch.march import March, set_march

CALIBRATED = "calibrated by mse"
CHOICES = {"STE, activations observed": Training("fake_quant", {}, {})} | TRAININGS


def title(recipe: Recipe) -> str:
    """A recipe's name in files and tables."""
    return f"{recipe.steps} steps, rate {recipe.rate:g}"


def _numbers(recipe: str) -> tuple[float, ...]:
    """By what recipes' names are sorted."""
    steps, _, rate = recipe.partition(" steps, rate ")
    return (float(steps), float(rate)) if rate else ()


def try_out(task: Task, folder: Path, trainings: list[str], recipes: list[Recipe]) -> None:
    """Train in every way, and write how far each result is from the float network on images that it was not shown."""
    if not (folder / f"{task.name}.pt").exists():
        choice = f"--data {task.data} --net {task.net} --seeds {task.seed + 1}"
        raise SystemExit(f"there is no float network yet: python -m benchmarks.accuracy {choice}")
    results = Results(folder / f"choose-{task.name}.json")
    journey = Journey(task, folder, DATA[task.data]().held_back())
    net = journey.float_net()
    wanted = journey.logits(in_torch(net))

    def found(logits: Tensor) -> dict[str, float]:
        differing = (logits.argmax(1) != wanted.argmax(1)).double().mean()
        return {"distance": 1000 * float(distance(logits, wanted)), "differing": 100 * float(differing)}

    if not results.has(CALIBRATED, ""):
        results.add(CALIBRATED, "", **found(journey.logits(in_torch(journey.calibrated(net, "int8", "mse")))))
    for recipe, name in itertools.product(recipes, trainings):
        if not results.has(name, title(recipe)):
            model = journey.qat(net, "int8", CHOICES[name], recipe)
            results.add(name, title(recipe), **found(journey.logits(in_torch(model))))


def table(folder: Path, data: str, nets: list[str]) -> str:
    """The distance from float of every network, means over its seeds."""
    files = {net: sorted(folder.glob(f"choose-{data}-{net}-*.json")) for net in nets}
    runs = {net: [Results(file).rows for file in of_net] for net, of_net in files.items() if of_net}
    rows = []
    for name in (CALIBRATED, *CHOICES):
        recipes = {recipe for of_net in runs.values() for run in of_net for recipe in run.get(name, {})}
        for recipe in sorted(recipes, key=_numbers):
            cells = []
            for of_net in runs.values():
                there = [run[name][recipe] for run in of_net if recipe in run.get(name, {})]
                values = [mean(row[what] for row in there) for what in ("distance", "differing")] if there else []
                cells.append("{:.2f} ({:.2f} %)".format(*values) if there else "")
            rows.append([name, recipe, *cells])
    headers = [data, "", *(f"{net} ({len(of_net)})" for net, of_net in runs.items())]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Read the command line, try out what is missing, print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="fashion")
    parser.add_argument("--net", choices=NETS, nargs="+", default=list(NETS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trainings", choices=CHOICES, nargs="+", default=list(CHOICES))
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 600])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2e-4, 5e-4])
    parser.add_argument("--out", type=Path, default=OUT / "accuracy", help="folder of the trained networks")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, help="a page into which the table goes, between its marks")
    arguments = parser.parse_args()
    if not arguments.table:
        torch.set_num_threads(1)
        set_march(March.NASH_E)
        warnings.simplefilter("ignore")
        recipes = [Recipe(steps, rate) for steps in arguments.steps for rate in arguments.rates]
        for seed, net in itertools.product(range(arguments.seeds), arguments.net):
            try_out(Task(arguments.data, net, seed), arguments.out, arguments.trainings, recipes)
    text = table(arguments.out, arguments.data, arguments.net)
    publish(text, arguments.out / "choose.md", arguments.docs, "choices")


if __name__ == "__main__":
    main()
