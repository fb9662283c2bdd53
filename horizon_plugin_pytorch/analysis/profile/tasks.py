"""What error is acceptable? That depends on what a model is for."""

from __future__ import annotations

from dataclasses import dataclass

from horizon_plugin_pytorch.errors import QuantizationConfigError


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


ERROR_BAD = 2  # beyond so many times a task's limit, an error is bad; below, it deserves a look
METRIC_WATCH, METRIC_BAD = 0.01, 0.03  # the share of a metric whose loss deserves a look, and is bad
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
        QuantizationConfigError: for a name that nobody knows.

    >>> task_of("super-resolution").error, task_of("").error
    (0.001, 0.1)
    """
    if name not in TASKS:
        known = ", ".join(name for name in TASKS if name)
        raise QuantizationConfigError(f"There is no task {name!r}; there are {known}, and '' for any other.")
    return TASKS[name]
