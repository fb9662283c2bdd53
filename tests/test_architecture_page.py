"""The page for those who extend the package names its files, and the notes that passes leave on nodes, as they are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from horizon_plugin_pytorch.runtime.node_notes import Note, Notes

PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
PACKAGE = Path(__file__).parent.parent / "horizon_plugin_pytorch"
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def _spelt_out(name: str) -> list[str]:
    """``statistics/{cache,partial}.py`` as its files."""
    braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [f"{braces[1]}{part}{braces[3]}" for part in braces[2].split(",")] if braces else [name]


def _named() -> set[str]:
    """Files and folders that the page names."""
    names = re.findall(r"`([\w/{},]+(?:\.py|/))`", PAGE)
    return {part for name in names for part in _spelt_out(name)}


def test_files_on_the_page_are_there() -> None:
    ends = {*SOURCES, *(f"{folder}/" for path in SOURCES for folder in map(str, Path(path).parents))}
    named = [name for name in _named() if not (PACKAGE.parent / name).exists()]  # such as those of the tests
    missing = [name for name in named if not any(f"/{end}".endswith(f"/{name}") for end in ends)]
    assert not missing


def test_every_file_has_a_room() -> None:
    table = PAGE[PAGE.index("| room |") : PAGE.index("Two things are stated once")]
    named = {part for name in re.findall(r"`([\w/{},]+(?:\.py|/))`", table) for part in _spelt_out(name)}
    folders = tuple(name for name in named if name.endswith("/"))
    # Second names, and import paths of the guides, for what is elsewhere.
    doors = ("_version.py", "functional.py", "qconfig.py", "annotation.py", "utils/", "quantization/", "fx/")
    left = [
        path
        for path in SOURCES
        if path not in named and not path.startswith((*folders, *doors)) and not path.endswith("__init__.py")
    ]
    assert not left


def test_rooms_are_in_the_order_of_the_import_contract() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [layer.removeprefix("horizon_plugin_pytorch.") for layer in layers if ":" not in layer]
    assert rooms[0] == "horizon_plugin_profiler"
    assert re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE) == rooms[:0:-1]


def test_notes_on_nodes_are_on_the_page() -> None:
    table = PAGE[PAGE.index("| note | written by |") : PAGE.index("## Watching a run")]
    told = [key for row in table.splitlines() if "|" in row for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(name for name, note in vars(Notes).items() if isinstance(note, Note))
