"""Recording the operators of a model while it runs."""

from __future__ import annotations

import os
from contextlib import ExitStack

from torch import nn

from horizon_plugin_pytorch.analysis.quant_analysis.op_infos import OpInfoManager
from horizon_plugin_pytorch.errors import require_module
from horizon_plugin_pytorch.watch.watch import Watch


class ModelProfiler:
    """Writes down what each operator of a model takes and gives, in every forward inside of ``with``.

    The last forward is what is kept: ``op_infos/<module>_<index>.opinfo`` for each call, which `torch.load` reads as a
    dictionary (``input``, ``output``, ``loc``, ``op_states``), ``statistic.txt`` and ``statistic.csv``. The model runs
    as it does without it.

    Args:
        model: of any stage.
        out_dir: the folder of the files.

    >>> import tempfile, torch
    >>> net, folder = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), tempfile.mkdtemp()
    >>> with ModelProfiler(net, folder) as profiler:
    ...     _ = net(torch.ones(1, 2))
    >>> [info.op_type for info in profiler.get_info_manager()]
    ['torch.nn.modules.linear.Linear', 'torch.nn.modules.activation.ReLU']
    """

    def __init__(self, model: nn.Module, out_dir: str | os.PathLike = "./horizon_quant_analysis") -> None:
        require_module(model, "ModelProfiler")
        self._model = model
        self._manager = OpInfoManager(out_dir)
        self._stack = ExitStack()

    def __enter__(self) -> ModelProfiler:
        self._stack.enter_context(Watch(self._model, self._manager.add))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._manager.write_statistics()

    def get_info_manager(self) -> OpInfoManager:
        """What was written: `table` prints it."""
        return self._manager
