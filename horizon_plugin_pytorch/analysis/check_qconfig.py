"""The number formats of a prepared model, operator by operator, and those that deserve a look."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.calls import Recording, record_calls
from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.report import messages_text
from horizon_plugin_pytorch.analysis.rows import (
    Message,
    OutQConfig,
    WeightQConfig,
    messages,
    out_qconfig,
    shown,
    weight_qconfigs,
)
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, HorizonError, require_module
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.stubs import DeQuantStub
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.operator_call import OperatorCall

QCONFIG_FILE = "qconfig_info.txt"


@dataclass(frozen=True)
class QConfigCheck:
    """The rows of ``qconfig_info.txt``."""

    out_qconfigs: tuple[OutQConfig, ...]
    weight_qconfigs: tuple[WeightQConfig, ...]
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """The three tables, as the guide prints them."""
        outs = [[r.name, str(r.type), shown(r.input_dtypes), shown(r.out_dtypes), r.ch_axis] for r in self.out_qconfigs]
        weights = [[r.name, str(r.type), r.dtype, r.ch_axis] for r in self.weight_qconfigs]
        out_table = Table(["Module Name", "Module Type", "Input dtype", "out dtype", "ch_axis"], outs).text("psql")
        weight_table = Table(["Module Name", "Module Type", "weight dtype", "ch_axis"], weights)
        return (
            f"Each layer out qconfig:\n{out_table}\n\n"
            f"Weight qconfig:\n{weight_table.text('psql', aligns_numbers=True)}\n\n"
            f"{messages_text(self.messages)}\n"
        )


def check_qconfig(
    model: nn.Module,
    example_inputs: Any,
    prefixes: Sequence[str] = (),
    types: Sequence[type] = (),
    custom_check_func: Callable[[nn.Module, Any, Any], Any] | None = None,
    out_dir: str | os.PathLike | None = None,
) -> QConfigCheck:
    """Show the number formats of each operator of a prepared model: of inputs, outputs and weights.

    They are written to ``qconfig_info.txt``. What deserves a look is printed too: outputs that are not quantized, fixed
    scales, weights that are not int8, operators that give another format than they take.

    Args:
        model: a calibration or QAT model; it is not changed.
        example_inputs: the model's arguments, as `prepare` takes them.
        prefixes, types: show only operators whose name starts with one of these, and those of one of these classes; a
            float class means what has become of its modules.
        custom_check_func: ``func(module, input, output)``, called for each operator that is shown, when it has run in
            eval mode; the input is the tuple of its arguments. An error that it raises ends the check.
        out_dir: the folder of the file; None is the current one.

    Returns:
        The rows of the three tables.

    Raises:
        CheckError: when the model fails on these inputs, or the file cannot be written.

    >>> import tempfile, torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Linear(4, 2)), {"": get_default_qconfig()})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check = check_qconfig(qat, torch.ones(3, 4), out_dir=folder)
    Please check if these OPs qconfigs are expected..
    +---------------+---------------+-------+
    | Module Name   | Module Type   | Msg   |
    |---------------+---------------+-------|
    +---------------+---------------+-------+
    >>> [(row.name, row.out_dtypes) for row in check.out_qconfigs]
    [('quant', ('qint8',)), ('module', ('qint8',))]
    """
    require_module(model, "check_qconfig", "a calibration or QAT model")
    if not any(isinstance(m, QATModule) for m in model.modules()):
        raise HorizonError(
            f"check_qconfig takes a calibration or QAT model, and `{type(model).__name__}` has no QAT modules: give it "
            "the result of `prepare`, `prepare_qat_fx` or `prepare_qat`, before conversion."
        )
    checker = QConfigChecker(prefixes, types, custom_check_func)
    return checker.check(model, example_inputs, record_calls(model, example_inputs), out_dir)


class QConfigChecker:
    """Makes a check of a run that is recorded.

    Args:
        prefixes, types, custom_check_func: as of `check_qconfig`.
    """

    def __init__(
        self,
        prefixes: Sequence[str] = (),
        types: Sequence[type] = (),
        custom_check_func: Callable[[nn.Module, Any, Any], Any] | None = None,
    ) -> None:
        func = custom_check_func
        if func is not None and not callable(func):
            raise TypeError(f"check_qconfig: custom_check_func is called as func(module, input, output), got {func!r}.")
        self._func, self._chosen = func, Chosen("check_qconfig", prefixes, types)

    def check(
        self, model: nn.Module, example_inputs: Any, recording: Recording, out_dir: str | os.PathLike | None
    ) -> QConfigCheck:
        """Write the tables, print what deserves a look, and give the rows.

        Raises:
            CheckError: the model failed. An error of the user's function comes as it is.
        """
        recording.require_end("check_qconfig")
        self._chosen.tell_unused(model)
        if self._func is not None:
            _Asked(self._func, self._chosen).run(model, example_inputs)
        calls = [call for call in recording.calls if self._chosen.has(call.path, call.module)]
        names = {call.name for call in calls}
        check = QConfigCheck(
            tuple(out_qconfig(call) for call in calls if not isinstance(call.module, DeQuantStub)),
            tuple(weight_qconfigs(calls)),
            tuple(row for row in messages(recording) if row.name in names),
        )
        write_report(check.text, out_dir, QCONFIG_FILE, "check_qconfig")
        print(messages_text(check.messages))
        return check


class _Asked:
    """Gives each operator that is shown to the user's function, whose errors are not the model's."""

    def __init__(self, func: Callable[[nn.Module, Any, Any], Any], chosen: Chosen) -> None:
        self._func, self._chosen = func, chosen
        self._error: Exception | None = None

    def run(self, model: nn.Module, example_inputs: Any) -> None:
        """Run the model as it is, rounded where it rounds: a recorded run has the values of the float model."""
        try:
            WatchedRun(model, example_inputs, None, "check_qconfig").watch(self)
        except CheckError:
            if self._error is not None:
                raise self._error from None
            raise

    def __call__(self, call: OperatorCall) -> None:
        if call.module is None or not self._chosen.has(call.path, call.module):
            return
        try:
            self._func(call.module, call.args, call.output)
        except Exception as error:
            self._error = error
            raise


show_at("utils.quant_profiler", check_qconfig)
