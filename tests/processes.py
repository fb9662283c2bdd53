"""Real processes: scripts that run in one of their own, and such that find each other over gloo."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# One process imports torch, what optimizers import on their first step, and the package; the others are forked from it,
# which saves seconds for each.
START_METHOD = "forkserver"
_FORKS = multiprocessing.get_context(START_METHOD)
_FORKS.set_forkserver_preload(["torch.nn.parallel", "torch._dynamo", "tests.calibration.test_calibrate"])
_PATIENCE = 900  # seconds; nobody waits for less than they need on a busy machine


def _work(folder: Path, errors: str, arguments: Sequence[str]) -> None:
    """What a process does: the script in the folder, as if Python had been started with it."""
    os.chdir(folder)
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, str(folder))
    sys.argv = [str(folder / "worker.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_scripts(folder: Path, code: str, *arguments: Sequence[str]) -> list[subprocess.CompletedProcess]:
    """Run a script in processes side by side, one for each list of arguments."""
    (folder / "worker.py").write_text(code)
    with tempfile.TemporaryDirectory() as said:
        files = [f"{said}/{number}" for number in range(len(arguments))]
        workers = [
            _FORKS.Process(target=_work, args=(folder, file, words))
            for file, words in zip(files, arguments, strict=True)
        ]
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
        texts = [Path(file).read_text() for file in files]
    return [
        subprocess.CompletedProcess(words, end, stderr=text)
        for words, end, text in zip(arguments, ends, texts, strict=True)
    ]


def run_workers(folder: Path, code: str, *arguments: str, count: int = 2) -> list[subprocess.CompletedProcess]:
    """Run a script in two processes, with the arguments: its rank, where to find the other, and these.

    They find each other in a file, since a port that is free now may be taken when they ask for it.
    """
    with tempfile.TemporaryDirectory() as meeting:
        return run_scripts(folder, code, *([str(i), f"file://{meeting}/place", *arguments] for i in range(count)))
