"""``python -m benchmarks.peers``: the table of peers, each in an environment of its own that sees this one's torch.

Rows are kept in a file: what is there is not measured again (``--again`` does).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.accuracy.journey import Journey, Task
from benchmarks.accuracy.page import publish
from benchmarks.peers.toolkits import TOOLKITS
from benchmarks.peers.worker import ABOUT, SPEED_NETS
from demo.common import OUT
from horizon_plugin_pytorch.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
ACCURACY_NETS = ("ResNet", "MobileNetV2", "ViT")
SECONDS = 7200  # for one toolkit, on a machine that has other work
NOT_MEASURED = {"MCT": "has no adapter here"}


def _home(name: str) -> Path:
    return OUT / "peers" / name.replace(" ", "-")


def _extensions(name: str) -> Path:
    """Where a toolkit compiles its kernels; locks of a run that was ended would let the next one wait for ever."""
    folder = _home(name) / "extensions"
    for lock in folder.rglob("lock"):
        lock.unlink()
    return folder


def environment(name: str) -> Path:
    """The Python of a toolkit's environment, made if it is not there: its packages, and everything of this one."""
    requirements = TOOLKITS[name].requirements
    if not requirements:
        return Path(sys.executable)
    folder = _home(name)
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        venv.create(folder, with_pip=True)
        own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(own, "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pinned = f"torch=={version('torch')}"  # as it is: another build could bring gigabytes
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pinned, *requirements]
        subprocess.run(command, check=True)
        (folder / ".installed").touch()
    return python


def measured(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What the worker finds; what it had found before it failed or took too long."""
    command = [str(environment(name)), "-m", "benchmarks.peers.worker", name, str(folder)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NNCF_EXTENSION_LOAD_TIMEOUT": "0"}
    variables["TORCH_EXTENSIONS_DIR"] = str(_extensions(name))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    lines = [line.removeprefix("found:") for line in output.splitlines() if line.startswith("found:")]
    return json.loads(lines[-1]) if lines else {}


def _number(values: dict[str, Any], key: str, digits: int) -> str:
    return f"{values[key]:.{digits}f}" if key in values else "-"


def report(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Two tables, speed and accuracy, and what was refused."""
    speed, right, refused = [], [], []
    for name, nets in found.items():
        for net, values in nets.items():
            if net == ABOUT:
                continue
            refused += [[name, f"{net}, {key}", f"`{text}`"] for key, text in values.items() if "refused" in key]
            if net in SPEED_NETS:
                columns = ("training", "calibration", "simulated", "deployed", "differing")
                cells = [_number(values, column, 2) for column in columns]
                speed.append([net, name, TOOLKITS[name].deployed_in, *cells])
            else:
                cells = [_number(values, column, 2) for column in ("float", "simulated", "deployed", "differing")]
                right.append([net.split()[0], name, *cells])
    names = {toolkit: TOOLKITS[toolkit].requirements for toolkit in found if TOOLKITS[toolkit].requirements}
    versions = [f"torch {version('torch')}", *(requirement[0] for requirement in names.values())]
    ratio = ["network", "toolkit", "deployed in", "training step", "calibration batch", "simulated", "deployed"]
    percent = ["network", "toolkit", "float %", "simulated %", "deployed %", "integers that differ %"]
    missing = {name: "not measured in this run" for name in TOOLKITS if name not in found} | NOT_MEASURED
    parts = [
        textwrap.fill(f"Written on {datetime.date.today()} with {', '.join(versions)}.", 120, break_on_hyphens=False),
        tabulate(
            _surroundings(found), ["toolkits", "date", "processor", "cores", "jobs that ran or waited, 1 min"], "github"
        ),
        tabulate(sorted(speed), [*ratio, "integers that differ %"], tablefmt="github", disable_numparse=True),
        tabulate(sorted(right), percent, tablefmt="github", disable_numparse=True),
        tabulate(
            [*refused, *([name, "not measured", why] for name, why in missing.items())],
            ["toolkit", "what is missing", "why"],
            tablefmt="github",
        ),
    ]
    return "\n\n".join(parts)


def _surroundings(found: dict[str, dict[str, dict[str, Any]]]) -> list[list[Any]]:
    """On what each toolkit was measured."""
    rows = []
    for name, nets in found.items():
        about = nets.get(ABOUT, {})
        loads = [str(about[key]) for key in ("load", "load at the end") if key in about]
        rows.append(
            [name, *(about.get(key, "not noted") for key in ("date", "processor", "cores")), " to ".join(loads)]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toolkits", nargs="+", choices=TOOLKITS, default=list(TOOLKITS))
    parser.add_argument("--again", action="store_true", help="measure what is known too")
    parser.add_argument("--page", type=Path, help="put the tables into this page, between its marks")
    options = parser.parse_args()
    folder, file = OUT / "accuracy", OUT / "peers" / "found.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    for net in ACCURACY_NETS:
        Journey(Task("fashion", net, 0), folder).float_net()
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in options.toolkits:
        if options.again or name not in found:
            print(name, flush=True)
            found[name] = measured(name, folder)
            write_atomically(json.dumps(found, indent=1).encode(), str(file))
    publish(report(found), OUT / "peers" / "table.md", options.page, "peers")


if __name__ == "__main__":
    main()
