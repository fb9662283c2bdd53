"""What a user meets first: the import, the metadata, and the example of the README."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import horizon_plugin_profiler
import horizon_plugin_pytorch

ROOT = Path(__file__).resolve().parents[1]
OF_TESTS = {"tests", "benchmarks", "demo", "docs"}  # what the packages import, the import contract checks
NOT_CORE = ("onnx", "onnxruntime", "matplotlib", "plotly", "scipy", "pandas", "torchvision", "IPython", "tensorboard")


def run_python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds this checkout's packages."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.processes
def test_import_prints_nothing() -> None:
    done = run_python("import horizon_plugin_pytorch, horizon_plugin_profiler")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.processes
def test_import_loads_only_the_core_dependencies() -> None:
    # What torch itself pulls in is not ours to judge: compare with a bare `import torch`.
    code = f"print(sorted(set({NOT_CORE!r}) & set(sys.modules)))"
    ours = run_python(f"import horizon_plugin_pytorch, horizon_plugin_profiler\n{code}")
    assert ours.stdout.strip() == "[]", ours.stderr


@pytest.mark.processes
def test_import_does_not_load_what_torch_is_removing() -> None:
    code = "print(sorted(m for m in sys.modules if m.startswith('torch.ao.quantization')))"
    bare, ours = run_python(f"import torch\n{code}"), run_python(f"import horizon_plugin_pytorch\n{code}")
    assert ours.stdout == bare.stdout


def test_version_is_three_plain_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", horizon_plugin_pytorch.__version__)
    assert horizon_plugin_pytorch.__version__ >= "2.3.4"  # as users' code compares it
    assert horizon_plugin_profiler.__version__ == horizon_plugin_pytorch.__version__


@pytest.fixture
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("horizon-plugin-pytorch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package runs from the source tree and is not installed; `make test` installs it")


def test_metadata_agrees_with_the_source(distribution: importlib.metadata.Distribution) -> None:
    assert distribution.version == horizon_plugin_pytorch.__version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


def test_the_package_declares_the_python_that_the_tests_run_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    declared = [c.rpartition(" ")[2] for c in project["project"]["classifiers"] if "Python :: 3." in c]
    assert declared == [running] and project["project"]["requires-python"] == f"=={running}.*"
    assert project["tool"]["mypy"]["python_version"] == running


def test_core_dependencies_are_four(distribution: importlib.metadata.Distribution) -> None:
    core = [r for r in distribution.requires or [] if "extra ==" not in r]
    assert sorted(re.split(r"[<>=!~ ]", r)[0] for r in core) == ["numpy", "tabulate", "torch", "tqdm"]


def test_changelog_and_license_speak_of_this_version() -> None:
    assert f"## {horizon_plugin_pytorch.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.processes
def test_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = run_python(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("different outputs: 0")
    assert (tmp_path / "net.onnx").stat().st_size > 0


def test_readme_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def _imported(path: Path) -> Iterator[str]:
    """What a file imports before its first function or class."""
    head = re.split(r"^(?:@|def |class )", path.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    for module, names in re.findall(r"^from ([\w.]+) import (\([^)]*\)|.*)", head, re.MULTILINE):
        yield from (f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", names))
    yield from re.findall(r"^import ([\w.]+)", head, re.MULTILINE)


def _file_of(name: str) -> Path | None:
    """The file of a module of ours, or of the module that a name is imported from."""
    for parts in (name.split("."), name.split(".")[:-1]):
        found = [path for path in (ROOT.joinpath(*parts, "__init__.py"), ROOT.joinpath(*parts).with_suffix(".py"))
                 if path.exists()]  # fmt: skip
        if found:
            return found[0]
    return None


def test_tests_are_collected_without_more_than_the_packages_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*extras["dependencies"], *(r for e in ("onnx", "test") for r in extras["optional-dependencies"][e])]
    allowed = {re.split(r"[\[<>=!~ ]", r)[0].replace("-", "_") for r in wanted} | sys.stdlib_module_names | OF_TESTS
    allowed |= {"horizon_plugin_pytorch", "horizon_plugin_profiler"}
    of_the_zoo = {ROOT / "tests" / "zoo" / f"{name}.py" for name in ("architectures", "wrappers", "torch_modules")}
    pending, seen, missing = set((ROOT / "tests").rglob("*.py")) - of_the_zoo, set(of_the_zoo), set()
    while pending:
        path = pending.pop()
        seen.add(path)
        for name in _imported(path):
            package = name.partition(".")[0]
            file = _file_of(name) if package in OF_TESTS else None
            if package not in allowed:
                missing.add((str(path.relative_to(ROOT)), package))
            elif file is not None and file not in seen:
                pending.add(file)
    assert not missing
