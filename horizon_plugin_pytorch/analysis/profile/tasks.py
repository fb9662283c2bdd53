"""What error is acceptable? That depends on what a model is for."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A kind of model.

    Args:
        name: as `Document.task` has it.
        error: the share of an operator's result that its error may be.
        chinese: the name in Chinese.
    """

    name: str
    error: float
    chinese: str

    @property
    def sqnr(self) -> float:
        """The same as the smallest ratio of signal to noise, in dB."""
        return -20 * math.log10(self.error)


GENERAL = Task("", 0.1, "通用")
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        GENERAL,
        Task("classification", 0.1, "分类"),
        Task("detection", 0.05, "检测"),
        Task("segmentation", 0.05, "分割"),
        Task("regression", 0.02, "回归"),
        Task("super-resolution", 0.001, "超分辨率"),
    )
}


def task_of(name: str) -> Task:
    """A task by its name.

    Raises:
        ValueError: for a name that nobody knows.

    >>> round(task_of("super-resolution").sqnr), round(task_of("").sqnr)
    (60, 20)
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; there are {', '.join(name for name in TASKS if name)}.")
    return TASKS[name]
