"""Is a prepared model what its user meant?"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.check import RESULT_FILE, inspect_model
from horizon_plugin_pytorch.analysis.report import message_table, messages_text
from horizon_plugin_pytorch.analysis.rows import ModelCheck
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, HorizonError, require_module
from horizon_plugin_pytorch.nn.qat.module import QATModule

__all__ = ["check_qat_model"]


def check_qat_model(
    model: nn.Module,
    example_inputs: Any,
    save_results: bool = True,
    out_dir: str | os.PathLike = ".",
    example_kw_inputs: dict[str, Any] | None = None,
) -> ModelCheck:
    """Check structure and number formats of a prepared model, by running it; the model is not changed.

    Written to ``model_check_result.txt``: patterns that could be fused, how often each module runs, statistics of
    number formats, formats and observers of outputs and weights, and what deserves a look. That last part is printed.

    Args:
        model: a prepared model, before it is converted.
        example_inputs: a tuple or list of the model's arguments; anything else is its only argument.
        save_results: write the file.
        out_dir: the file's folder.
        example_kw_inputs: keyword arguments of the model.

    Returns:
        The rows of the tables.

    Raises:
        CheckError: when the model fails on these inputs; the file says where, and has what ran before.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, prepare_qat_fx
    >>> from horizon_plugin_pytorch.quantization import default_qat_8bit_weight_32bit_out_fake_quant_qconfig as last
    >>> from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig as qconfig
    >>> set_march(March.BAYES)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Linear(4, 2)), {"": qconfig, "module_name": [("module", last)]})
    >>> check = check_qat_model(qat, torch.randn(3, 4), save_results=False)
    Please check if these OPs qconfigs are expected..
    +---------------+-------------------------------------------------------+------------------------------------+
    | Module Name   | Module Type                                           | Msg                                |
    |---------------+-------------------------------------------------------+------------------------------------|
    | module        | <class 'horizon_plugin_pytorch.nn.qat.linear.Linear'> | output activation is not quantized |
    +---------------+-------------------------------------------------------+------------------------------------+
    * output activation is not quantized: right for an output of the model (high precision); ...
    >>> [row.count for row in check.called_times]
    [1, 1, 1]
    """
    require_module(model, "check_qat_model")
    if not any(isinstance(m, QATModule) for m in model.modules()):
        raise HorizonError(
            f"check_qat_model: `{type(model).__name__}` has no QAT modules; it takes the result of prepare, before "
            "conversion. A converted model is checked with `quantization.check_model`."
        )
    try:
        check = inspect_model(model, example_inputs, out_dir if save_results else None, example_kw_inputs)
    except OSError as error:
        raise CheckError(
            f"check_qat_model could not write {RESULT_FILE} into `{os.fspath(out_dir)}`: {error}. Give an out_dir that "
            "can be written to, or save_results=False."
        ) from error
    if check.messages:
        print(messages_text(check.messages))
    if check.mistakes:
        print(f"Common mistakes:\n{message_table(check.mistakes)}")
    return check


show_at("utils.check_model", check_qat_model)
