"""``python -m horizon_plugin_pytorch``: what is installed here, what it runs on, and where to go next."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable

import torch

from horizon_plugin_pytorch import __version__, compiled, fixed_point
from horizon_plugin_pytorch.fixed_point.kernels import VARIABLE
from horizon_plugin_pytorch.march import March


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _setting(name: str) -> str:
    return f"{name}={os.environ[name]}" if name in os.environ else f"{name} is not set"


def _said(tell: Callable[[], str], wrong: list[ValueError]) -> str:
    """What it tells, or what is wrong with the environment."""
    try:
        return tell()
    except ValueError as error:
        wrong.append(error)
        return str(error)


def _facts(wrong: list[ValueError]) -> list[tuple[str, str]]:
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [
        ("version", __version__),
        ("marches", ", ".join(march.value for march in March)),
        ("integer kernels", _said(fixed_point.integer_kernels, wrong)),
        ("compiled passes", _said(compiled.compiled_passes, wrong)),
        ("environment", ", ".join(_setting(name) for name in (VARIABLE, compiled.VARIABLE))),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"),
        ("cuda device", cuda),
        *[(name, _version_of(name)) for name in ("numpy", "onnx", "onnxruntime")],
    ]


def main() -> int:
    """Print it; 1 if a variable of the environment has no value that it can have."""
    wrong: list[ValueError] = []
    facts = _facts(wrong)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")
    print(
        "\nNext: docs/quick-start.md takes a model to integers, `python -m horizon_plugin_profiler check` looks at"
        "\nyours, and docs/integer-kernels.md tells more about kernels."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
