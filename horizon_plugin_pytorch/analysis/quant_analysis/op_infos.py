"""What each operator of a run took and gave, in files, and the table of it."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.same_input import real_of
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.statistics.moments import moments
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.operator_call import OperatorCall

FOLDER, STATISTIC = "op_infos", "statistic"
_HEADERS = ("", "mod_name", "op_type", "attr", "shape", "dtype", "scale", "min", "max", "mean", "var")


@dataclass(frozen=True)
class Statistic:
    """What one tensor of a call holds; numbers are None where it has none that are finite."""

    attr: str
    shape: tuple[int, ...]
    dtype: str
    scale: float | None
    low: float | None
    high: float | None
    mean: float | None
    var: float | None

    @classmethod
    def of(cls, attr: str, x: Tensor) -> Statistic:
        """That of a tensor."""
        real, scale, dtype = real_of(x), scale_of(x), str(x.dtype)
        finite = real if not real.is_floating_point() or bool(real.isfinite().all()) else real[real.isfinite()]
        if not finite.numel() or finite.is_complex():
            return cls(attr, tuple(x.shape), dtype, scale, None, None, None, None)
        mean, var, count = moments(finite)
        low, high = finite.min(), finite.max()
        return cls(attr, tuple(x.shape), dtype, scale, float(low), float(high), mean, var if count > 1 else 0.0)

    @property
    def cells(self) -> list[str]:
        """As the table shows them."""
        numbers = (self.scale, self.low, self.high, self.mean, self.var)
        shown = ["" if number is None else f"{number:.7f}" for number in numbers]
        return [self.attr, str(torch.Size(self.shape)), self.dtype, *shown]


@dataclass(frozen=True)
class OpInfo:
    """A call of an operator, whose tensors are in a file.

    Args:
        index: its position in the run.
        name: as tables show it: ``conv``, ``conv(1)`` for a second call, ``block[reshape]`` for a function. The method
            of a FloatFunctional is in the type.
        path: of its module; of a function, the module that calls it.
        op_type: the class, the method of a FloatFunctional, or the function, with its path.
        file: `torch.load` gives a dictionary with ``input``, ``output``, ``loc`` and ``op_states``.
        statistics: of its inputs and outputs.
    """

    index: int
    name: str
    path: str
    op_type: str
    line: str
    file: str
    statistics: tuple[Statistic, ...]

    def load(self) -> dict[str, Any]:
        """What the file holds.

        Raises:
            CheckError: it cannot be read.
        """
        try:
            return torch.load(self.file, weights_only=True)
        except Exception as error:
            raise CheckError(
                f"`{self.file}`, which a run of the model wrote, cannot be read: {error}. Call `run` again."
            ) from error


class OpInfoManager:
    """The operators of one forward.

    Args:
        out_dir: has ``op_infos/`` and ``statistic.txt``.
    """

    def __init__(self, out_dir: str | os.PathLike, who: str = "ModelProfiler") -> None:
        self.out_dir, self._who = os.fspath(out_dir), who
        self.infos: list[OpInfo] = []

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[OpInfo]:
        return iter(self.infos)

    def named(self, name: str) -> list[OpInfo]:
        """The calls of an operator: by its name in the table, or by the path of its module."""
        return [info for info in self.infos if name in (info.name, info.path)]

    def statistics(self) -> Table:
        """All numbers, a row for each tensor."""
        rows = [
            [info.index, info.name, info.op_type, *statistic.cells]
            for info in self.infos
            for statistic in info.statistics
        ]
        return Table(_HEADERS, rows)

    def write_statistics(self) -> None:
        """Write ``statistic.txt`` and ``statistic.csv``."""
        table = self.statistics()
        write_report(f"{table.text('psql')}\n", self.out_dir, f"{STATISTIC}.txt", self._who)
        write_report(table.csv(), self.out_dir, f"{STATISTIC}.csv", self._who)

    def table(self) -> str:
        """Print the numbers of all operators; they are in ``statistic.txt`` and ``statistic.csv``, too."""
        self.write_statistics()
        text = self.statistics().text("psql")
        print(text)
        return text

    def add(
        self, call: OperatorCall, op_type: str | None = None, states: Callable[[], Mapping[str, Tensor]] | None = None
    ) -> OpInfo:
        """Write down a call; the first call of a forward is the beginning of all that is kept."""
        if call.index == 0:
            self._clear()
        inputs = [(("input", *path), x) for path, x in located(call.args)]
        inputs += [(("input", *path), x) for path, x in located(call.kwargs)]
        outputs = [(("output", *path), x) for path, x in located(call.output)]
        with_scale = next((x for _, x in outputs if isinstance(x, QTensor)), None)
        contents = {
            "mod_name": mod_name(call),
            "loc": call.line,
            "input": [_saved(x) for _, x in inputs],
            "output": [_saved(x) for _, x in outputs],
            "qscale": None if with_scale is None else with_scale.scale.detach().cpu().clone(),
            "quant_dtype": format_of(call),
            "op_states": dict(states() if states is not None else _states(call.module)),
        }
        stem = re.sub(r"[^\w.\-\[\]()]", "_", call.path or "model")
        path = os.path.join(self.out_dir, FOLDER, f"{stem[-180:]}_{call.index}.opinfo")
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        try:
            write_atomically(buffer.getvalue(), path)
        except OSError as error:
            raise CheckError(
                f"{self._who}: what `{call.name}` gave cannot be written to `{path}`: {error}. Give an out_dir with "
                "room for all results of the model on one batch."
            ) from error
        found = tuple(Statistic.of("-".join(map(str, name)), x) for name, x in (*inputs, *outputs))
        info = OpInfo(call.index, mod_name(call), call.path, op_type or type_of(call), call.line, path, found)
        self.infos.append(info)
        return info

    def _clear(self) -> None:
        self.infos = []
        folder = os.path.join(self.out_dir, FOLDER)
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith(".opinfo"):
                os.unlink(os.path.join(folder, name))


def _saved(x: Tensor) -> Tensor:
    """A copy of the real numbers, which shares no memory."""
    return real_of(x).cpu().clone().contiguous()


def _states(module: nn.Module | None) -> dict[str, Tensor]:
    states = {} if module is None else module.state_dict()
    return {name: x.detach().cpu().clone() for name, x in states.items() if type(x) in (Tensor, nn.Parameter)}


def scale_of(x: Any) -> float | None:
    """The scale of a tensor; None without one, and for one scale per channel."""
    return float(x.scale) if isinstance(x, QTensor) and x.dtype != qbool and x.scale.numel() == 1 else None


def format_of(call: OperatorCall) -> str:
    """The number format of what a call gave."""
    outputs: Sequence[Tensor] = call.outputs
    cast = getattr(call.module, "activation_post_process", None)
    text = str(outputs[0].dtype) if outputs else ""
    return str(cast.dtype) if isinstance(cast, FakeCast) and text == "torch.float32" else text


def type_of(call: OperatorCall) -> str:
    """What was called, as the tables have it: ``torch.nn.modules.conv.Conv2d``, ``...FloatFunctional.add``.

    >>> type_of(OperatorCall(0, "conv", module=nn.Conv2d(1, 1, 1)))
    'torch.nn.modules.conv.Conv2d'
    """
    if call.module is not None:
        return class_path(type(call.module)) + (f".{call.method}" if call.method else "")
    function = call.function
    module = getattr(function, "__module__", None) or "torch"
    return f"{module}.{call.operator}"


def mod_name(call: OperatorCall) -> str:
    """The name of an operator in the tables of the guide: the path of its module, of which a method is no part.

    >>> mod_name(OperatorCall(0, "add", repetition=1, module=nn.Identity(), method="add"))
    'add(1)'
    """
    return call.name if call.module is None else f"{call.path}{f'({call.repetition})' if call.repetition else ''}"


def class_path(cls: type) -> str:
    """A class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
