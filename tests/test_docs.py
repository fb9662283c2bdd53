"""The documentation: its code runs, its generated page is fresh, the site builds."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from horizon_plugin_pytorch import errors

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
_BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(page: Path) -> list[tuple[str, str, int]]:
    """Language, text and first line of every block of Python in a page."""
    text = page.read_text()
    return [(m[1], m[2], text[: m.start(2)].count("\n") + 1) for m in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if code_blocks(p)], ids=lambda p: p.stem)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks of a page share one namespace and run in order; `pycon` blocks must print what they show."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for language, text, line in code_blocks(page):
        if language == "python":
            # Lines of the page, so that a traceback points into it.
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(text, namespace, page.name, str(page), line - 1)
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
        namespace.update(test.globs)
        assert result.attempted > 0
        assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.stem)
def test_prose_is_wrapped(page):
    """At 120 columns; tables, code, and what has no space to break at go on."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    is_code = False  # indented, after an empty line or more of it
    wide, before = [], ""
    for line in prose.splitlines():
        is_code = (
            line.startswith("    ") and (is_code or not before.strip()) and not re.match(r" *([*+-]|\d+\.) ", line)
        )
        if len(line) > 120 and not is_code and not line.lstrip().startswith("|") and " " in line.strip()[:120]:
            wide.append(line)
        before = line
    assert not wide


def test_operators_page_is_what_the_operator_table_gives():
    spec = importlib.util.spec_from_file_location("generate_operators", DOCS / "generate_operators.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = (DOCS / "operators.md").read_text()
    assert page == generator.page(), "run `python -m docs.generate_operators`"


def test_links_within_the_pages_lead_somewhere():
    def anchors(page: Path) -> set[str]:
        heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}

    dead = [
        f"{page.name}: {name}#{anchor}"
        for page in PAGES
        for name, anchor in re.findall(r"\]\(([\w-]*\.md)?#([\w-]+)\)", page.read_text())
        if anchor not in anchors(DOCS / name if name else page)
    ]
    assert dead == []


@pytest.mark.parametrize("row", [
    "| dequant | i8,i16,i32 → f32 |", "| quant | f32,i8,i16 → i8,i16 |", "| lt | - | i8,i16 → bool |",
    "| add_scalar | - | i8,i16 → i8,i16 |", "| to_integers | - | bool → int32,int64 |",
])  # fmt: skip
def test_formats_of_the_operators_page(row):
    page = (DOCS / "operators.md").read_text()
    assert row in page
    assert "bool,f16" not in page and " →  |" not in page


def test_every_error_and_warning_has_a_row():
    page = (DOCS / "errors.md").read_text()
    names = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, (Exception, Warning))}
    assert len(names) > 12 and {n for n in names - {"HorizonError"} if f"\n| `{n}` |" not in page} == set()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in PAGES if p.name not in navigation] == []


def test_the_sidebar_has_the_order_of_reading():
    used = (ROOT / "mkdocs.yml").read_text().partition("- Use:")[2].partition("- Look up:")[0]
    read = (DOCS / "index.md").read_text().partition("Read in this order")[2].partition("Look up:")[0]
    assert re.findall(r"[\w-]+\.md", used) == re.findall(r"\]\(([\w-]+\.md)\)", read)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "numerics" / "index.html").exists()


def test_every_room_is_in_the_contract_and_on_the_architecture_page():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = set(re.findall(r"horizon_plugin_pytorch\.(\w+)", " ".join(contracts[0]["layers"])))
    package = ROOT / "horizon_plugin_pytorch"
    rooms = {path.stem for path in package.iterdir() if path.name[0] != "_" and path.suffix in ("", ".py")}
    assert layered == rooms
    page = (DOCS / "architecture.md").read_text()
    assert [name for name in sorted(rooms) if not re.search(rf"\b{name}(\.py|/)", page)] == []
