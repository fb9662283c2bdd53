"""What the tools leave behind: files of text, and logs of tensorboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.files import write_atomically


def write_report(text: str, out_dir: str | os.PathLike | None, name: str, who: str) -> str:
    """Write a file of a tool into a folder; None is the current one.

    Returns:
        The path of the file.

    Raises:
        CheckError: it cannot be written.
    """
    folder = os.fspath(out_dir or ".")
    path = os.path.join(folder, name)
    try:
        write_atomically(text.encode(), path)
    except OSError as error:
        raise CheckError(
            f"{who} could not write {name} into `{folder}`: {error}. Give an out_dir that can be written to."
        ) from error
    return path


@contextmanager
def tensorboard_log(folder: str | os.PathLike | None, who: str) -> Iterator[Any]:
    """A writer of tensorboard's logs; None is the folder that tensorboard chooses, ``runs/``.

    Raises:
        CheckError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CheckError(
            f"{who}: with_tensorboard=True needs tensorboard, which is not installed: `pip install tensorboard`. All "
            "other results were written."
        ) from error
    with SummaryWriter(None if folder is None else os.fspath(folder)) as writer:
        yield writer
