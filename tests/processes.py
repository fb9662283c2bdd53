"""Real processes that find each other over gloo."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

# One process imports torch and the package; the others are forked from it, which saves seconds for each.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.nn.parallel", "tests.calibration.test_calibrate"])
_PATIENCE = 900  # seconds; nobody waits for less than they need on a busy machine


def _work(folder: Path, arguments: list[str]) -> None:
    """What a process does: the script in the folder, with what it says of its errors in a file."""
    os.chdir(folder)
    with open(_errors(folder, arguments[0]), "wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [str(folder / "worker.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _errors(folder: Path, rank: str) -> Path:
    return folder.parent / f"{folder.name}.{rank}.stderr"


def run_workers(folder: Path, code: str, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Run a script in two processes, with the arguments: its rank, where to find the other, and these.

    They find each other in a file, since a port that is free now may be taken when they ask for it.
    """
    (folder / "worker.py").write_text(code)
    with tempfile.TemporaryDirectory() as meeting:
        given = [[str(rank), f"file://{meeting}/place", *arguments] for rank in range(2)]
        workers = [_FORKS.Process(target=_work, args=(folder, words)) for words in given]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join(_PATIENCE)
            ends = [worker.exitcode for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if None in ends:
        raise subprocess.TimeoutExpired("worker.py", _PATIENCE)
    texts = [_errors(folder, words[0]).read_text() for words in given]
    return [
        subprocess.CompletedProcess(words, end, stderr=text)
        for words, end, text in zip(given, ends, texts, strict=True)
    ]
