"""Real processes that find each other over gloo."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_workers(folder: Path, code: str, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Run a script in two processes, with the arguments: its rank, a free port, and these."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = folder / "worker.py"
    script.write_text(code)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port), *arguments],
            cwd=folder, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return [
            subprocess.CompletedProcess(worker.args, worker.wait(), stderr=errors)
            for worker, (_, errors) in [(w, w.communicate(timeout=180)) for w in workers]
        ]
    finally:
        for worker in workers:
            worker.kill()
