"""Accuracy on real images of what this package makes of five networks; hours on one core.

python -m benchmarks.accuracy                       everything; what an earlier run has done is not done again
python -m benchmarks.accuracy --data digits --net ViT --seeds 1
python -m benchmarks.accuracy --table               only the table of what there is

Rows are kept by their titles: after a change of what they measure, delete them, or give another folder (`--out`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import mean

import torch
from tabulate import tabulate

from benchmarks.accuracy.data import DATA
from benchmarks.accuracy.journey import FORMATS, Journey, Results, Task, titles
from benchmarks.accuracy.nets import NETS
from benchmarks.accuracy.page import publish
from demo.common import OUT
from horizon_plugin_pytorch.march import March, set_march

QAT_MAY_LOSE, INT16_MAY_LOSE = 0.1, 0.05  # points of accuracy, means over the seeds


Runs = list[dict[str, dict[str, dict[str, float]]]]


def found(folder: Path, data: str, nets: list[str]) -> dict[str, Runs]:
    """The results of all seeds of each network, as far as there are any."""
    runs = {net: [Results(file).rows for file in sorted(folder.glob(f"{data}-{net}-*.json"))] for net in nets}
    return {net: of_net for net, of_net in runs.items() if of_net}


def cell(runs: Runs, fmt: str, title: str) -> str:
    """The mean over the seeds: of float the accuracy, of everything else the difference to float, in points."""
    values = [run[fmt][title]["accuracy"] for run in runs if title in run.get(fmt, {})]
    base = [run["float"]["float"]["accuracy"] for run in runs if title in run.get(fmt, {})]
    if not values:
        return ""
    return f"{mean(values):.2f} %" if title == "float" else f"{mean(values) - mean(base):+.2f}"


def table(folder: Path, data: str, nets: list[str]) -> str:
    """All rows of all networks."""
    results = found(folder, data, nets)
    if not results:
        return ""
    rows = [
        [fmt, title, *(cell(runs, fmt, title) for runs in results.values())]
        for fmt in ("float", *FORMATS)
        for title in titles(fmt)
    ]
    headers = [data, "", *(f"{net} ({len(runs)})" for net, runs in results.items())]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def goals(folder: Path, data: str, nets: list[str]) -> list[list[str]]:
    """For each network, what was wanted and what there is."""
    rows = []
    for net, runs in found(folder, data, nets).items():
        differing = [row.get("differing", 0) for run in runs for rows_of in run.values() for row in rows_of.values()]
        wanted = (("int8", "ONNX Runtime, STE"), ("int8", "ONNX Runtime, LSQ"), ("int16", "mse"))
        rows.append([data, net, str(len(runs)), *(cell(runs, *goal) for goal in wanted), f"{sum(differing):.0f}"])
    return rows


def report(folder: Path, datasets: list[str], nets: list[str]) -> str:
    """All tables, as Markdown."""
    parts = [table(folder, data, nets) for data in datasets]
    headers = [
        "data", "net", "seeds", f"int8 after QAT, STE (wanted >= -{QAT_MAY_LOSE})", "LSQ",
        f"int16 calibrated (wanted +-{INT16_MAY_LOSE})", "logits that differ: QAT, quantized, ONNX Runtime (wanted 0)",
    ]  # fmt: skip
    rows = [row for data in datasets for row in goals(folder, data, nets)]
    parts.append(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))
    return "\n\n".join(part for part in parts if part)


def run_all(tasks: list[Task], folder: Path, jobs: int) -> None:
    """Each task in a process with one thread, `jobs` of them at a time."""
    waiting = list(tasks)
    running: dict[Task, subprocess.Popen] = {}
    failed = []
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            choice = ["--data", task.data, "--net", task.net, "--only-seed", str(task.seed), "--out", str(folder)]
            command = [sys.executable, "-m", "benchmarks.accuracy", *choice]
            running[task] = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        for task, process in list(running.items()):
            if process.poll() is not None:
                del running[task]
                failed += [task.name] if process.returncode else []
        time.sleep(0.2)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    """Read the command line, run what is missing, print and store the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, nargs="+", default=list(DATA))
    parser.add_argument("--net", choices=NETS, nargs="+", default=list(NETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="networks at a time, one thread each")
    parser.add_argument("--out", type=Path, default=OUT / "accuracy", help="folder for networks and results")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, help="a page into which the tables go, between its marks")
    parser.add_argument("--only-seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only_seed is not None:
        torch.set_num_threads(1)
        set_march(March.NASH_E)
        warnings.simplefilter("ignore")  # of int16 times int16, whose sums may not fit the chip's accumulator
        Journey(Task(arguments.data[0], arguments.net[0], arguments.only_seed), arguments.out).run()
        return
    if not arguments.table:
        for data in arguments.data:
            DATA[data]()  # fetched once, before the processes start
        order = itertools.product(range(arguments.seeds), arguments.data, arguments.net)
        run_all([Task(data, net, seed) for seed, data, net in order], arguments.out, arguments.jobs)
    text = report(arguments.out, arguments.data, arguments.net)
    publish(text, arguments.out / "table.md", arguments.docs, "tables")


if __name__ == "__main__":
    main()
