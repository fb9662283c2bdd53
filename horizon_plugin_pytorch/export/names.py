"""Names of the inputs and outputs of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from horizon_plugin_pytorch.errors import ExportError

Path = tuple[Any, ...]


def port_names(paths: Sequence[Path], kind: str, wanted: Sequence[str] | None, taken: Sequence[str] = ()) -> list[str]:
    """Names of inputs or outputs: those that the user gave, else the keys and fields that lead to each tensor.

    Args:
        paths: what leads to each tensor among the arguments or results.
        kind: ``input`` or ``output``; tensors without keys are called ``input_0``, ``input_1`` and so on.
        wanted: the user's names.
        taken: names that others have.

    >>> port_names([(0,), (1, "boxes", 0), (1, "boxes", 1)], "input", None)
    ['input_0', 'boxes_0', 'boxes_1']
    >>> port_names([(0, "image"), (1, "image")], "output", None, ["image"])
    ['output_0_image', 'output_1_image']
    >>> port_names([("8",), ("16",), ("",)], "output", None)
    ['8', '16', 'output_']
    """
    if isinstance(wanted, str):
        raise ExportError(f"{kind}_names must be a list of names, got {wanted!r}: write [{wanted!r}].")
    if wanted is not None:
        return _checked(list(wanted), len(paths), kind, taken)
    short = [_short(path, index, kind, len(paths)) for index, path in enumerate(paths)]
    counts, used, names = Counter(short), set(taken), []
    for name, path in zip(short, paths, strict=True):
        base = "_".join(map(str, (kind, *path))) if not name or name in used or counts[name] > 1 else name
        name, count = base, 0
        while name in used:
            count += 1
            name = f"{base}_{count}"
        used.add(name)
        names.append(name)
    return names


def _checked(names: list[str], count: int, kind: str, taken: Sequence[str]) -> list[str]:
    if len(names) != count:
        raise ExportError(f"{kind}_names has {len(names)} names, but the model has {count} {kind}s.")
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if wrong:
        raise ExportError(f"{kind}_names: {wrong[0]!r} is no name; expected a string that is not empty.")
    for all_names, what in ((names, f"{kind}_names"), ([*taken, *names], "input_names and output_names")):
        twice = sorted(name for name, times in Counter(all_names).items() if times > 1)
        if twice:
            raise ExportError(f"{what}: {', '.join(map(repr, twice))} is given twice; names must differ.")
    return names


def _short(path: Path, index: int, kind: str, count: int) -> str:
    """The keys from the first that is no position on; without one, the position among all."""
    first = next((i for i, key in enumerate(path) if not isinstance(key, int)), None)
    if first is not None:
        return "_".join(map(str, path[first:]))
    return f"{kind}_{index}" if count > 1 else kind
