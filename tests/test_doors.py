"""Paths that users know, and where the code behind them lives."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_plugin_pytorch
from horizon_plugin_pytorch.doors import MOVED

PACKAGE = Path(horizon_plugin_pytorch.__file__).parent
PICKLES = Path(__file__).parent / "golden" / "pickles"
DOORS = [
    *(path for folder in ("quantization", "fx", "utils") for path in sorted((PACKAGE / folder).rglob("*.py"))),
    *(PACKAGE / name for name in ("functional.py", "jit.py", "qconfig.py", "annotation.py", "nn/operator_table.py")),
]
ROOMS = [
    "statistics", "fake_quant", "operators", "runtime", "nn", "capture", "config", "passes", "calibration", "analysis",
    "program", "export", "workflow",
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_doors_define_nothing(door: Path) -> None:
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert not [node for node in ast.walk(ast.parse(door.read_text())) if isinstance(node, defined)]


def _shown() -> Iterator[Any]:
    """What prints under the path of a door, with the module that defines it."""
    for door in DOORS:
        path = ".".join(door.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(door.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and "mxrecordio" not in path:
                home = importlib.import_module(node.module)
                values = [getattr(home, alias.name) for alias in node.names]
                yield from (
                    pytest.param(home, value, id=f"{path}.{value.__name__}")
                    for value in values
                    if getattr(value, "__module__", "") == path != node.module and hasattr(value, "__name__")
                )


@pytest.mark.parametrize(("home", "value"), _shown())
def test_examples_of_what_doors_show_run(home: Any, value: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """`--doctest-modules` would run them with the names of the door."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for test in doctest.DocTestFinder(exclude_empty=True).find(value, value.__name__, module=False, globs=vars(home)):
        report: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
        assert not result.failed, "".join(report)


@pytest.mark.parametrize("old", MOVED)
def test_modules_that_moved_are_found_under_their_old_names(old: str) -> None:
    package = horizon_plugin_pytorch.__name__
    assert importlib.import_module(f"{package}.{old}") is importlib.import_module(f"{package}.{MOVED[old]}")


def test_what_never_existed_is_not_found() -> None:
    for name in ("quantization.passes.nothing", "deploy.nothing", "nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{horizon_plugin_pytorch.__name__}.{name}")


@pytest.mark.parametrize("path", sorted(PICKLES.glob("*.pt")), ids=lambda path: path.stem)
def test_pickles_of_before_load_and_give_the_same_numbers(path: Path) -> None:
    """Written by commit a8b1666, in which all of this lay elsewhere."""
    model, wanted, data = torch.load(path, weights_only=False)
    with torch.no_grad():
        found = model(data)
    assert wanted is None or torch.equal(found, wanted)


@pytest.mark.processes
def test_importing_the_package_imports_no_rooms_above_the_arithmetic() -> None:
    names = ", ".join(f"'{horizon_plugin_pytorch.__name__}.{room}'" for room in [*ROOMS, "quantization"])
    code = f"import sys, horizon_plugin_pytorch; sys.exit(str([n for n in ({names}) if n in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.stderr.strip().strip("'"), done.stderr


@pytest.mark.processes
def test_each_room_can_be_imported_first() -> None:
    """In a process that has only torch: the order in which users import must not matter."""
    code = f"""
import importlib, os, sys, torch
failed = []
for room in {ROOMS}:
    child = os.fork()
    if child == 0:
        try:
            package = importlib.import_module(f"horizon_plugin_pytorch.{{room}}")
            for file in sorted(os.listdir(package.__path__[0]))[:3]:
                if file.endswith(".py") and file != "__init__.py":
                    importlib.import_module(f"horizon_plugin_pytorch.{{room}}.{{file[:-3]}}")
        except BaseException as error:
            print(room, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    failed += [room] if os.waitpid(child, 0)[1] else []
sys.exit(1 if failed else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("old", MOVED)
def test_old_names_of_modules_hide_nothing(old: str) -> None:
    """Importing `a.b` makes it an attribute of `a`, whatever was called so before."""
    parent, _, name = f"{horizon_plugin_pytorch.__name__}.{old}".rpartition(".")
    listed = getattr(sys.modules.get(parent), "__all__", ())
    assert name not in listed


@pytest.mark.processes
def test_users_imports_fill_every_table() -> None:
    """Rows and lowerings are registered by the files that have them; collecting tests imports all of these."""
    code = """
import importlib, pkgutil, sys
import horizon_plugin_pytorch.quantization, horizon_plugin_pytorch.utils.onnx_helper
from horizon_plugin_pytorch.export import onnx_aten, onnx_fixed_point
from horizon_plugin_pytorch.operators.table import rows

def count():
    return len(list(rows())), len(onnx_aten.ATEN), len(onnx_fixed_point.FIXED_POINT)

before = count()
for module in pkgutil.walk_packages(horizon_plugin_pytorch.__path__, "horizon_plugin_pytorch."):
    if not module.name.endswith("mxrecordio"):
        importlib.import_module(module.name)
sys.exit("" if count() == before else f"{before} became {count()}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.stderr.strip(), done.stderr
