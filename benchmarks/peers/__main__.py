"""The table of peers, each in an environment of its own that sees this one's torch.

    make peers                                                   all of them, and the page
    python -m benchmarks.peers --toolkits NNCF --page docs/peers.md
    python -m benchmarks.peers --again --page docs/peers.md      measures anew what is known

What was found is kept in out/peers/found.json, with the date and the versions it was found with, and is not measured
again without --again. It needs Fashion-MNIST (Debian's package `dataset-fashion-mnist`, fetched by `apt-get download`
unless it is there) and trains three networks on it first, which are kept in out/accuracy.
"""

from __future__ import annotations

import argparse
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

Found = dict[str, dict[str, dict[str, Any]]]  # of each toolkit, for each network and ABOUT, by name

ROOT = Path(__file__).resolve().parents[2]
ACCURACY_NETS = ("ResNet", "MobileNetV2", "ViT")
SECONDS = 7200  # for one toolkit, on a machine that has other work
RATIOS = {  # over float, by the titles of their columns
    "training": "training step",
    "calibration": "calibration batch",
    "simulated": "simulated",
    "deployed": "deployed",
}
OURS = "ours, "  # how the names of our own rows begin


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


def report(found: Found) -> str:
    """On what each was measured, where we are behind, speed, accuracy, and what was refused."""
    speed, right, refused = [], [], []
    for name, nets in found.items():
        for net, values in nets.items():
            if net == ABOUT:
                continue
            refused += [[name, f"{net}, {key}", f"`{text}`"] for key, text in values.items() if "refused" in key]
            if net in SPEED_NETS:
                cells = [_number(values, column, 2) for column in (*RATIOS, "differing")]
                speed.append([net, name, TOOLKITS[name].deployed_in, *cells])
            else:
                cells = [_number(values, column, 2) for column in ("float", "simulated", "deployed", "differing")]
                right.append([net.split()[0], name, *cells])
    ratio = ["network", "toolkit", "deployed in", *RATIOS.values()]
    percent = ["network", "toolkit", "float %", "simulated %", "deployed %", "integers that differ %"]
    missing = {name: "not measured in this run" for name in TOOLKITS if name not in found}
    parts = [
        tabulate(_surroundings(found), SURROUNDINGS, tablefmt="github", disable_numparse=True),
        _kernels(found),
        _where_ours_is_slower(found),
        tabulate(sorted(speed), [*ratio, "integers that differ %"], tablefmt="github", disable_numparse=True),
        tabulate(sorted(right), percent, tablefmt="github", disable_numparse=True),
        tabulate(
            [*refused, *([name, "not measured", why] for name, why in missing.items())],
            ["toolkit", "what is missing", "why"],
            tablefmt="github",
        ),
    ]
    return "\n\n".join(part for part in parts if part)


SURROUNDINGS = ["toolkits", "date", "processor", "cores", "jobs that ran or waited, 1 min", "minutes", "versions"]


def _surroundings(found: Found) -> list[list[Any]]:
    """On what each toolkit was measured, when, and with which versions."""
    rows = []
    for name, nets in found.items():
        about = nets.get(ABOUT, {})
        loads = [str(about[key]) for key in ("load", "load at the end") if key in about]
        versions = ", ".join(f"{package} {number}" for package, number in about.get("versions", {}).items())
        on = [str(about.get(key, "not noted")) for key in ("date", "processor", "cores")]
        rows.append([name, *on, " to ".join(loads), str(about.get("minutes", "")), versions or "not noted"])
    return rows


def _kernels(found: Found) -> str:
    """Whether our integer kernels ran, which depends on the processor."""
    states: dict[str, list[str]] = {}
    for name, nets in found.items():
        if name.startswith(OURS) and "integer kernels" in (about := nets.get(ABOUT, {})):
            states.setdefault(about["integer kernels"], []).append(f'"{name}"')
    return "\n".join(_filled(f"Our integer kernels, {' and '.join(names)}: {said}.") for said, names in states.items())


def _where_ours_is_slower(found: Found) -> str:
    """The ratios of which a peer has a lower one than we have, and those."""
    lines = []
    for net in SPEED_NETS:
        for key, title in RATIOS.items():
            has = {name: nets[net][key] for name, nets in found.items() if key in nets.get(net, {})}
            ours = {name: ratio for name, ratio in has.items() if name.startswith(OURS)}
            peers = {name: ratio for name, ratio in has.items() if name not in ours}
            if ours and (faster := {name: ratio for name, ratio in peers.items() if ratio < min(ours.values())}):
                lines.append(_filled(f"* {net}, {title}: {_listed(ours)}, next to {_listed(faster)}", indent="  "))
    return "\n".join(("Where a peer is faster than both of our rows:\n", *lines)) if lines else ""


def _listed(ratios: dict[str, float]) -> str:
    ordered = sorted(ratios.items(), key=lambda item: (round(item[1], 2), item[0].lower()))
    return ", ".join(
        f"{name.removeprefix(OURS) + ' (ours)' * name.startswith(OURS)} {ratio:.2f}" for name, ratio in ordered
    )


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, subsequent_indent=indent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--toolkits", nargs="+", choices=TOOLKITS, metavar="TOOLKIT", default=list(TOOLKITS), help="; ".join(TOOLKITS)
    )
    parser.add_argument("--again", action="store_true", help="measure what is known, too; without it, such rows stay")
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
        else:
            about = found[name].get(ABOUT, {})
            print(f"{name}: known since {about.get('date', 'some day')}; --again measures it anew", flush=True)
    publish(report(found), OUT / "peers" / "table.md", options.page, "peers")


if __name__ == "__main__":
    main()
