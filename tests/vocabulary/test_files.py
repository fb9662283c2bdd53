"""Files are written whole or not at all, with the mode that the user wants."""

from __future__ import annotations

import ast
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horizon_plugin_pytorch import files
from horizon_plugin_pytorch.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["unnamed", "named"], autouse=True)
def way(request, monkeypatch) -> str:
    """Files without names, as Linux has them, and the way of other systems."""
    if request.param == "named":
        monkeypatch.setattr(files, "_UNNAMED", 0)
    return request.param


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)])
def test_a_new_file_has_the_mode_of_the_umask(mask, mode, umask, tmp_path) -> None:
    umask(mask)
    write_atomically(b"x", tmp_path / "a" / "b" / "file")
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == mode
    assert names(tmp_path / "a" / "b") == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640])
def test_an_old_file_keeps_its_mode_and_nothing_is_left_beside_it(mode, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"a longer old one")
    (tmp_path / "file").chmod(mode)
    write_atomically(b"new", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new" and names(tmp_path) == ["file"]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data/file")
    for content in (b"first", b"second"):
        write_atomically(content, tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "data" / "file").read_bytes() == content


def test_a_path_without_a_folder_is_in_the_current_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomically(b"x", "file")
    assert names(tmp_path) == ["file"]


def test_a_name_as_long_as_can_be(tmp_path) -> None:
    for content in (b"first", b"second"):
        write_atomically(content, tmp_path / ("x" * 255))
        assert (tmp_path / ("x" * 255)).read_bytes() == content


def test_a_pipe_is_written_to_and_not_replaced(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomically(b"x", tmp_path / "pipe")
    reader.join()
    assert read == [b"x"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fill(file, data, mode):
        file.write(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_fill", fill)
    for name in ("file", "other"):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / name}'"):
            write_atomically(b"new", tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("way", "broken"), [("unnamed", "replace"), ("unnamed", "link"), ("named", "replace")], indirect=["way"]
)
def test_an_interrupt_leaves_the_old_file(way, broken, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, broken, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(b"new", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_a_file_system_without_unnamed_files_or_links_is_served(tmp_path, monkeypatch) -> None:
    def refused(*args, **kwargs):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    for content in (b"first", b"second"):
        write_atomically(content, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == content and names(tmp_path) == ["file"]


def test_a_folder_is_refused(tmp_path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(b"x", tmp_path)
    assert not names(tmp_path)


def test_a_protected_file_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, right: False)  # which is never so for the superuser
    with pytest.raises(PermissionError, match="file"):
        write_atomically(b"new", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_a_protected_folder_is_refused_by_the_files_name(tmp_path, monkeypatch) -> None:
    def refused(path, *args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match=f"'{tmp_path / 'file'}'"):
        write_atomically(b"new", tmp_path / "file")


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path) -> None:
    contents = [bytes([i]) * 100_000 for i in range(8)]
    writers = [
        threading.Thread(target=lambda c=c: [write_atomically(c, tmp_path / "file") for _ in range(20)])
        for c in contents
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "file").read_bytes() in contents and names(tmp_path) == ["file"]


KILLED = """
import os, signal, sys
from importlib.machinery import SourceFileLoader
files = SourceFileLoader("files", sys.argv[1] + "/horizon_plugin_pytorch/files.py").load_module()
fill = files._fill

def killed(file, data, mode):
    fill(file, data[: len(data) // 2], mode)
    os.kill(os.getpid(), signal.SIGKILL)

files._fill = killed
files.write_atomically(b"x" * 100_000, sys.argv[2])
"""


@pytest.mark.skipif(not getattr(os, "O_TMPFILE", 0), reason="the system has no files without names")
@pytest.mark.parametrize("way", ["unnamed"], indirect=True)
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.processes
def test_a_process_that_is_killed_while_it_writes_leaves_nothing(is_old, way, tmp_path) -> None:
    if is_old:
        (tmp_path / "file").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(ROOT), str(tmp_path / "file")])
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == (["file"] if is_old else [])
    assert not is_old or (tmp_path / "file").read_bytes() == b"old"


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def is_careless(name: str, call: ast.Call) -> bool:
    """Does it write a file in pieces, or run what a file says?"""
    keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
    if name == "open":
        return not {"wb", "w", "a", "ab", "x", "xb"}.isdisjoint(
            a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)
        )
    if name in ("torch.load", "np.load", "numpy.load"):
        return (name == "torch.load" and "weights_only" not in keywords) or keywords.get("allow_pickle") == "True"
    return name in ("pickle.load", "pickle.loads", "pickle.Unpickler") or name.endswith((".write_text", ".write_bytes"))


@pytest.mark.slow
def test_the_package_writes_whole_files_and_trusts_none() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {name}"
        for path in (ROOT / "horizon_plugin_pytorch").rglob("*.py")
        for name, call in calls(ast.parse(path.read_text()))
        if path.name != "files.py" and is_careless(name, call)
    ]
    assert not found
    careless = "open(f, 'w'); torch.load(f); pickle.loads(b); np.load(f, allow_pickle=True); p.write_text(t)"
    assert sum(is_careless(name, call) for name, call in calls(ast.parse(careless))) == 5
