"""Real processes that find each other over gloo."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_workers(folder: Path, code: str, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Run a script in two processes, with the arguments: its rank, where to find the other, and these.

    They find each other in a file, since a port that is free now may be taken when they ask for it; and nobody waits
    for less than they need on a busy machine.
    """
    script = folder / "worker.py"
    script.write_text(code)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as meeting:
        workers = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), f"file://{meeting}/place", *arguments],
                cwd=folder, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            return [
                subprocess.CompletedProcess(worker.args, worker.wait(), stderr=errors)
                for worker, (_, errors) in [(w, w.communicate(timeout=900)) for w in workers]
            ]
        finally:
            for worker in workers:
                worker.kill()
