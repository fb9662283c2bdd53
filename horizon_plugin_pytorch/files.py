"""Writing files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat

_UNNAMED = getattr(os, "O_TMPFILE", 0)  # Linux: a file without a name, which is gone if its process is
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def write_atomically(data: bytes, path: str | os.PathLike) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part, and a failure leaves the old one.

    Folders are made. A new file has the mode that the umask gives, an old one keeps its own; a link stays a link.
    What is no ordinary file, such as ``/dev/stdout``, is written to. A process that is killed while it writes leaves
    nothing behind where the system has files without names (Linux); elsewhere it may leave ``.<name>.<number>.new``.

    Raises:
        OSError: it cannot be written; nothing is changed.
    """
    path = os.path.realpath(path)
    mode = _mode_of(path)
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            file.write(data)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        if not _write_unnamed(data, path, mode):
            _write_named(data, path, mode)
    except OSError as error:
        if error.errno is not None:  # without a number, Python would print the names and lose the message
            error.filename, error.filename2 = path, None  # rather than that of the folder, or of a file that is gone
        raise


def _mode_of(path: str) -> int | None:
    """Type and mode of what is there; None if there is nothing.

    Raises:
        OSError: it may not be replaced.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not os.access(path, os.W_OK):  # replacing it would need the right to its folder only
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return mode


def _write_unnamed(data: bytes, path: str, mode: int | None) -> bool:
    """Write a file that has no name until it is whole; says whether the system could."""
    if not _UNNAMED:
        return False
    try:
        handle = os.open(os.path.dirname(path), _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError:
        return False  # the other way says what is wrong, if anything is
    with os.fdopen(handle, "wb") as file:
        _fill(file, data, mode)
        if mode is None:
            with contextlib.suppress(FileExistsError):  # another writer was faster: replace its file
                return _link(handle, path)
        temporary = _temporary_name(path)
        if not _link(handle, temporary):
            return False
    _move(temporary, path)
    return True


def _link(handle: int, path: str) -> bool:
    """Give a file a name; says whether the system could."""
    try:
        os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle)  # a folder, which is not used: it says to follow
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        return False
    return True


def _write_named(data: bytes, path: str, mode: int | None) -> None:
    temporary = _temporary_name(path)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, data, mode)
    except BaseException:
        os.unlink(temporary)
        raise
    _move(temporary, path)


def _fill(file: io.BufferedWriter, data: bytes, mode: int | None) -> None:
    if mode is not None and os.chmod in os.supports_fd:
        os.chmod(file.fileno(), stat.S_IMODE(mode))
    file.write(data)
    file.flush()


def _move(temporary: str, path: str) -> None:
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _temporary_name(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:60]}.{secrets.token_hex(4)}.new")
