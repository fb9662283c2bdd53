"""Two stages of a deployed model that should give the same numbers: do they, and where do they begin to differ?"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.comparison import ComparedCall, Comparison
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import BadCases
from horizon_plugin_pytorch.analysis.quant_analysis.layers import LayerRow
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import GivenMetric
from horizon_plugin_pytorch.analysis.quant_analysis.quant_analysis import QuantAnalysis
from horizon_plugin_pytorch.errors import CheckError, ExportError, QuantizationConfigError, require_module
from horizon_plugin_pytorch.export.second_opinion import values_in_onnx_runtime
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, operator_name
from horizon_plugin_pytorch.runtime.arguments import data_arguments
from horizon_plugin_pytorch.tables import Table

OUT_DIR = "./horizon_consistency_analysis"
MODES = ("pre_export", "export", "convert")
SENSITIVE_FILE, ENGINE_FILE = "consistency_sensitive_ops", "compare_with_onnx_runtime"
_WHO = "ConsistencyAnalyzer"


class ConsistencyAnalyzer:
    """Compares two stages of a model on its way to the chip, which should give the same numbers.

    Here QAT in the VALIDATION state, the converted model, the integer graph and its ONNX file in ONNX Runtime give the
    same integers, so every difference that this finds is worth a look: a model in another state, a checkpoint of
    another day, other preprocessing. The documents name the class, its arguments and methods; this is what they do.

    Args:
        models: the earlier stage, a model, and the later one: what `hbdk4.pre_export` gives for ``pre_export``, the
            integer graph of `hbdk4.export` (or its `HbirModuleWrapper`) for ``export``, a converted model, its integer
            graph or the path of its ``.onnx`` file for ``convert``.
        example_inputs: the arguments of the models, as `prepare` takes them.
        infer_func: runs a stage on inputs, ``infer_func(model, inputs)``, and gives what is compared; None calls it
            with them. A file is given as a function of tensors.
        mode: ``pre_export``, ``export`` or ``convert``.
        metric: of the outputs: Cosine, MSE, L1, KL, SQNR, or a function of two tensors.
        out_dir: the folder of the files.

    >>> import copy, tempfile
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import FakeQuantState, QuantWrapper, convert_fx, get_default_qconfig
    >>> from horizon_plugin_pytorch.quantization import prepare_qat_fx, set_fake_quantize
    >>> set_march(March.NASH_E)
    >>> x = torch.randn(2, 4)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Linear(4, 4)).eval(), {"": get_default_qconfig()})
    >>> _ = qat(x)
    >>> set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    >>> analyzer = ConsistencyAnalyzer((qat, convert_fx(copy.deepcopy(qat))), x, out_dir=tempfile.mkdtemp())
    >>> analyzer.auto_find_bad_case().worst["0"]["L1"]
    [(0, 0.0)]
    """

    def __init__(
        self,
        models: Sequence[Any] | Mapping[str, Any],
        example_inputs: Any,
        infer_func: Callable[[Any, Any], Any] | None = None,
        mode: str = "convert",
        metric: GivenMetric = "L1",
        out_dir: str | os.PathLike = OUT_DIR,
    ) -> None:
        if mode not in MODES:
            raise QuantizationConfigError(f"{_WHO}: mode is one of {', '.join(MODES)}; got {mode!r}.")
        stages = list(models.values() if isinstance(models, Mapping) else models)
        if len(stages) != 2:
            raise TypeError(f"{_WHO}: models are two stages, the earlier one first; got {len(stages)}.")
        require_module(stages[0], _WHO)
        self._earlier, self._later = stages
        self._inputs, self._metric, self.out_dir = example_inputs, metric, os.fspath(out_dir)
        later, flatten = self._later, None
        if isinstance(later, (str, os.PathLike)):
            later, flatten = _runner(_OnnxFile(later), self._earlier, infer_func), tensors_of
        self._analysis = QuantAnalysis(
            self._earlier, later, mode, post_process=flatten, out_dir=out_dir, infer_func=infer_func
        )
        self._analysis.set_bad_case(example_inputs)

    def auto_find_bad_case(self, dataloader: Iterable[Any] | None = None, num_steps: int | None = None) -> BadCases:
        """Find the batches on which the outputs differ most; see `QuantAnalysis.auto_find_bad_case`.

        Args:
            dataloader: None is the example inputs alone.
        """
        data = [self._inputs] if dataloader is None else dataloader
        return self._analysis.auto_find_bad_case(data, num_steps, self._metric)

    def compare_per_layer(self, prefixes: Sequence[str] = (), types: Sequence[type] = ()) -> list[LayerRow]:
        """Compare the stages operator by operator; see `QuantAnalysis.compare_per_layer`.

        An integer graph is also computed by ONNX Runtime, operator by operator, on the example inputs:
        ``compare_with_onnx_runtime.txt`` says where its values differ from the graph's own.
        """
        self._analysis.run()
        rows = self._analysis.compare_per_layer(prefixes, types)
        program = getattr(self._later, "program", None)
        if isinstance(program, Program):
            table = engine_table(program, data_arguments(self._earlier, self._inputs))
            write_report(f"{table.text('psql')}\n", self.out_dir, f"{ENGINE_FILE}.txt", _WHO)
            write_report(table.csv(), self.out_dir, f"{ENGINE_FILE}.csv", _WHO)
        return rows

    def sensitivity(self, prefixes: Sequence[str] = (), types: Sequence[type] = ()) -> list[list[Any]]:
        """Which operators differ by themselves: each in both forms on the same inputs, the largest difference first.

        Writes ``consistency_sensitive_ops.txt`` and ``.pt``. It is for two models; an integer graph has no operators
        that could run on other inputs.

        Returns:
            Rows ``[op_name, op_type, error, scale]``; the error is in steps of the scale, None where it is not known.
        """
        who = "sensitivity"
        if not isinstance(self._later, nn.Module) or isinstance(getattr(self._later, "program", None), Program):
            raise CheckError(
                f"{_WHO}: {who} runs operators of both stages on the same inputs; give the converted model as the "
                "later one."
            )
        chosen, rows = Chosen(who, prefixes, types), list[list[Any]]()
        chosen.tell_unused(self._earlier)

        def note(call: ComparedCall) -> None:
            if chosen.has(call.one.path, call.one.module):
                rows.append([call.name, call.type, call.same_input_error, call.scale])

        comparison = Comparison(self._earlier, self._later, self._inputs, None, who)
        comparison.run(note, restart=rows.clear)
        comparison.tell_not_comparable()
        rows.sort(key=lambda row: -1.0 if row[2] is None else row[2], reverse=True)
        table = Table(["op_name", "op_type", "error (steps)", "scale"], rows)
        write_report(f"{table.text(aligns_numbers=True)}\n", self.out_dir, f"{SENSITIVE_FILE}.txt", who)
        buffer = io.BytesIO()
        torch.save(rows, buffer)
        write_atomically(buffer.getvalue(), os.path.join(self.out_dir, f"{SENSITIVE_FILE}.pt"))
        return rows


def engine_table(program: Program, args: Sequence[Any]) -> Table:
    """The values of an integer graph in torch and in ONNX Runtime, node by node.

    >>> from horizon_plugin_pytorch.program import record_program
    >>> table = engine_table(record_program(nn.ReLU(), torch.zeros(2)), (torch.ones(2),))
    >>> print(table.text())
    node    mod_name    operator    shape      differing    largest difference
    ------  ----------  ----------  -------  -----------  --------------------
    relu                aten::relu  (2,)               0                   0.0
    """
    theirs = values_in_onnx_runtime(program, args)
    rows = []
    for node, value in program.run(*args):
        if node.name in theirs and isinstance(value, Tensor):
            mine = value.detach().double()
            difference = (mine - theirs[node.name].double().reshape(mine.shape)).abs().nan_to_num()
            count, largest = int((difference > 0).sum()), float(difference.max()) if difference.numel() else 0.0
            rows.append([node.name, note_of(node).path, operator_name(node), str(tuple(mine.shape)), count, largest])
    return Table(["node", "mod_name", "operator", "shape", "differing", "largest difference"], rows)


def _runner(file: _OnnxFile, like: nn.Module, infer: Callable[[Any, Any], Any] | None) -> Callable[[Any], Any]:
    """A file as a function of a batch."""

    def run(batch: Any) -> Any:
        return file(*data_arguments(like, batch)) if infer is None else infer(file, batch)

    run.__name__ = file.__name__
    return run


class _OnnxFile:
    """A file as a function of tensors: it gives its outputs in their order."""

    def __init__(self, path: str | os.PathLike) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ExportError(
                f"{_WHO}: a file runs in ONNX Runtime: pip install 'horizon-plugin-pytorch[onnx]'."
            ) from error
        self.__name__ = os.fspath(path)
        try:
            self._session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportError(f"{_WHO}: `{os.fspath(path)}` cannot be opened by ONNX Runtime: {error}") from error

    def __call__(self, *args: Any) -> list[Tensor]:
        ports, given = self._session.get_inputs(), tensors_of(args)
        if len(ports) != len(given):
            names = ", ".join(port.name for port in ports)
            raise ExportError(f"`{self.__name__}` takes {len(ports)} tensors ({names}), got {len(given)}.")
        feed = {port.name: x.detach().cpu().numpy() for port, x in zip(ports, given, strict=True)}
        return [torch.from_numpy(np.array(x)) for x in self._session.run(None, feed)]
