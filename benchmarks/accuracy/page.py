"""Tables in a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from horizon_plugin_pytorch.files import write_atomically


def publish(text: str, kept: Path, page: Path | None, mark: str) -> None:
    """Keep a table in a file, put it into a page if one is given, and print it."""
    write_atomically(f"{text}\n".encode(), str(kept))
    if page:
        put_into(page, mark, text)
    print(text)


def put_into(page: Path, mark: str, text: str) -> None:
    """Put a text between ``<!-- mark -->`` and ``<!-- end of mark -->``, in place of what is there.

    Raises:
        ValueError: the page does not have both marks.
    """
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, begins, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise ValueError(f"{page} has no {begin} with {end} after it")
    write_atomically(f"{before}{begin}\n{text}\n\n{end}{after}".encode(), str(page))
