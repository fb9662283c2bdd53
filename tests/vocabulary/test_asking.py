"""All reading of frames and bytecode is in `asking/`, which needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import horizon_plugin_profiler
import horizon_plugin_pytorch
from horizon_plugin_pytorch.asking.functions import code_text

ROOTS = [Path(package.__file__).parent for package in (horizon_plugin_pytorch, horizon_plugin_profiler)]
FILES = [file for root in ROOTS for file in sorted(root.rglob("*.py")) if file.parent != ROOTS[0] / "asking"]

# Attributes of frames, code objects and tracebacks, and functions that give frames.
NAMES = frozenset(
    """
    _getframe currentframe getouterframes getinnerframes extract_stack walk_stack walk_tb extract_tb
    f_back f_code f_locals f_globals f_lineno f_lasti tb_frame tb_lineno gi_frame
    __code__ co_code co_filename co_names co_consts co_name co_qualname co_firstlineno co_positions
""".split()
)


def reads(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & NAMES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & NAMES
        elif isinstance(node, ast.Name):
            found |= {node.id} & NAMES
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {"dis"}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} & {"dis"} | {alias.name for alias in node.names} & NAMES
    return found


@pytest.mark.parametrize("source", [
    "import sys\nsys._getframe(1)", "frame.f_back", "from sys import _getframe", "import dis", "from dis import opmap",
    "getattr(function, '__code__', None)", "inspect.currentframe()", "error.__traceback__.tb_frame",
])  # fmt: skip
def test_a_read_of_frames_or_bytecode_is_seen(source: str) -> None:
    assert reads(source)


@pytest.mark.slow
def test_no_other_file_reads_frames_or_bytecode() -> None:
    found = {str(file): names for file in FILES if (names := reads(file.read_text()))}
    assert not found, "move these to horizon_plugin_pytorch/asking/"


def test_it_works_without_torch_on_this_python() -> None:
    alone = Path(__file__).parent / "asking_alone.py"
    done = subprocess.run([sys.executable, "-I", "-S", str(alone)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checks of asking/" in done.stdout


LIMIT, CALLS = 1, 0


def _above(x: int) -> bool:
    return x > LIMIT


class _Counter:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: int) -> int:
        return x * self.size


def _accuracy(factor: int, start: int = 0):
    count = start

    def accuracy(x: int) -> int:
        global CALLS
        nonlocal count
        CALLS, count = CALLS + 1, count + 1
        return factor * _above(x)

    return accuracy


def test_the_text_of_a_function_tells_what_it_does(monkeypatch) -> None:
    before = code_text(_accuracy(2))
    assert code_text(_accuracy(2)) == before != code_text(_accuracy(3))
    assert code_text(_Counter(1)) == code_text(_Counter(1)) != code_text(_Counter(2))
    assert code_text(_Counter(1).__call__) != code_text(_Counter(2).__call__)
    monkeypatch.setitem(globals(), "CALLS", 7)
    assert code_text(_accuracy(2, start=5)) == before  # what it counts by itself
    monkeypatch.setitem(globals(), "LIMIT", 2)
    assert code_text(_accuracy(2)) != before  # a function that it calls reads it
