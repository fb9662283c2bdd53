"""Work that goes on only as far as it is asked to, and stands still in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

_DEVICES = ("cuda", "cpu")


class HeldRun:
    """Work in a thread of its own: one of the two threads runs at a time, so that nothing needs a lock.

    The work has torch's settings of the thread that began it, and random numbers as if it ran alone.

    Args:
        work: calls `pause` where it is to stand until it is asked to go on.

    Attributes:
        result: what the work gave, when it is over.

    >>> def work():
    ...     for number in (1, 2):
    ...         seen.append(number)
    ...         run.pause()
    >>> seen, run = [], HeldRun(work)
    >>> run.go_on(), seen
    (True, [1])
    >>> run.stop()
    >>> seen
    [1]
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self._work = work
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = self._is_over = False
        self._error: BaseException | None = None
        self._random, self._settings = _random_state(), _Settings()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self) -> bool:
        """Let the work run to its next pause; False if it has come to its end. Its errors are raised here."""
        if not self._is_over:
            mine = _random_state()
            _set_random_state(self._random)
            self._asked.release()
            self._answered.acquire()
            self._random = _random_state()
            _set_random_state(mine)
        if self._error is not None:
            raise self._error
        return not self._is_over

    def pause(self) -> None:
        """Stand still until somebody asks to go on: called by the work."""
        self._answered.release()
        self._asked.acquire()
        if self._is_stopped:
            raise _Stopped

    def stop(self) -> None:
        """End the work where it stands."""
        self._is_stopped = True
        if not self._is_over:
            self._asked.release()
        self._thread.join()

    def _run(self) -> None:
        self._asked.acquire()
        try:
            if not self._is_stopped:
                with self._settings:
                    self.result = self._work()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._answered.release()


class _Stopped(BaseException):
    """Nobody waits for the work any more."""


class _Settings:
    """What torch keeps for each thread: gradients, autocast, the number of threads."""

    def __init__(self) -> None:
        self._has_gradients, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._threads = torch.get_num_threads()
        self._autocast = {d: torch.get_autocast_dtype(d) for d in _DEVICES if torch.is_autocast_enabled(d)}
        self._stack = ExitStack()

    def __enter__(self) -> None:
        torch.set_num_threads(self._threads)
        self._stack.enter_context(torch.inference_mode(self._is_inference))
        self._stack.enter_context(torch.set_grad_enabled(self._has_gradients))
        for device, dtype in self._autocast.items():
            self._stack.enter_context(torch.autocast(device, dtype))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _random_state() -> tuple:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_random_state(state: tuple) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
