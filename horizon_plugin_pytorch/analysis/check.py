"""The check of a prepared model, from running it to the file."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.calls import Recording, record_calls
from horizon_plugin_pytorch.analysis.report import CHECK_FAILED, render
from horizon_plugin_pytorch.analysis.rows import ModelCheck, check_recording
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.files import write_atomically

RESULT_FILE = "model_check_result.txt"


def inspect_model(
    model: nn.Module,
    example_inputs: Any,
    out_dir: str | os.PathLike | None = None,
    kwargs: dict[str, Any] | None = None,
) -> ModelCheck:
    """Run a prepared model, and give the rows of its check.

    Args:
        example_inputs: the model's arguments, as `prepare` takes them.
        out_dir: where to write the file; None does not write it.
        kwargs: keyword arguments of the model.

    Raises:
        CheckError: when the model fails; the file has what ran before, and says where it ended.
    """
    return inspect_recording(record_calls(model, example_inputs, kwargs), out_dir)


def inspect_recording(recording: Recording, out_dir: str | os.PathLike | None = None) -> ModelCheck:
    """The rows of the check of a model that has run; arguments and errors as those of `inspect_model`."""
    check = check_recording(recording)
    if out_dir is not None:
        write_atomically(render(check).encode(), os.path.join(out_dir, RESULT_FILE))
    if recording.failure is not None:
        raise CheckError(
            f"{CHECK_FAILED}: {check.failure} Give the check inputs that the model takes in eval mode, or change the "
            "model at that place."
        ) from recording.failure.error
    return check
