"""Making a library of C source with the system's compiler, and keeping it in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("passes.c")
# No step may be left out, joined or reordered: the numbers are those of torch's operators.
_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 120


class CannotBuildError(Exception):
    """There is no library, and the message says why."""


def library(source: Path = SOURCE, folder: Path | None = None) -> ctypes.CDLL:
    """The library of a C file: the one of an earlier process, or else a new one.

    Args:
        folder: where libraries are kept; the user's cache folder if not given.

    Raises:
        CannotBuildError: there is no compiler, it fails, or the folder is not the user's own.
    """
    compiler = _compiler()
    folder = _own_folder(cache_folder() if folder is None else folder)
    text = source.read_bytes()
    made_of = (text, " ".join((*compiler, *_FLAGS)).encode(), _version(compiler[0]), _processor())
    name = f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}"
    try:
        path = _whole(folder, name) or _build(compiler, source, folder, name)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuildError(f"{folder / name} cannot be made or loaded: {error}") from error


def cache_folder() -> Path:
    """Where libraries are kept: a folder of ``XDG_CACHE_HOME``, or of ``~/.cache``.

    Raises:
        CannotBuildError: neither is the path of a folder from the root on.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~")) / ".cache"
    if not base.is_absolute():
        raise CannotBuildError("there is no home folder to keep a library in; set XDG_CACHE_HOME to a folder")
    return base / "horizon_plugin_pytorch"


def _compiler() -> list[str]:
    """The command of the C compiler: the environment variable ``CC``, or else cc, gcc or clang."""
    if sys.platform == "win32":
        raise CannotBuildError("not supported on Windows")
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CannotBuildError(f"CC is {os.environ['CC']!r}, which is no command: {error}") from error
    names = [asked] if asked else [["cc"], ["gcc"], ["clang"]]
    for command in names:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    raise CannotBuildError(f"there is no C compiler ({', '.join(command[0] for command in names)})")


def _own_folder(folder: Path) -> Path:
    """The folder, made if it is not there, if nobody else can write to it: what lies in it is run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise CannotBuildError(f"the cache folder cannot be made: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotBuildError(f"the cache folder {folder} can be written by others; `chmod 700` mends that")
    return folder


def _version(compiler: str) -> str:
    """What tells this compiler from another that may be in its place later."""
    found = os.stat(os.path.realpath(compiler))
    return f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}"


def _processor() -> str:
    """What the library may use: homes are shared by machines, and instructions are not."""
    facts = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        facts += [platform.processor(), platform.node()]
    return "\n".join(facts)


def _whole(folder: Path, name: str) -> Path | None:
    """The library of an earlier process, if it is as it was made: one that is cut off would end this process."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.stem == f"{name}-{_digest(path)}":
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _build(compiler: list[str], source: Path, folder: Path, name: str) -> Path:
    """Compile to a file of its own, which takes its name when it is whole: other processes may do the same."""
    errors = ""
    for tuning in (["-march=native"], []):  # not every compiler knows the machine that it runs on
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as place:
            made = Path(place) / "made.so"
            command = [*compiler, *_FLAGS, *tuning, str(source), "-o", str(made), "-lm"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CannotBuildError(f"{compiler[0]} does not run: {error}") from error
            if done.returncode == 0 and made.exists():
                path = folder / f"{name}-{_digest(made)}.so"
                os.replace(made, path)
                return path
            said = done.stderr.strip() or done.stdout.strip()
            errors = said.splitlines()[0] if said else f"code {done.returncode}, and there is no library"
    raise CannotBuildError(f"{compiler[0]} fails: {errors}")
