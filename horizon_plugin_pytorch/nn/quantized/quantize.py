"""In and out of the integer world."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor, taken
from horizon_plugin_pytorch.running import runs_unseen_code
from horizon_plugin_pytorch.runtime.stub_input import refuse_export, require_tensor


class Quantize(QuantizedModule):
    """Real numbers to integers; integers pass, or get this scale and format where `prepare` asks for it."""

    def configure(self, mod: Any) -> None:
        self.axis, self.requantizes = mod.activation_post_process.ch_axis, mod.requantizes

    def forward(self, x: Tensor) -> QTensor:
        refuse_export(self.place)
        if isinstance(x, QTensor):
            return self.output(self.on_output_grid(x)) if self.requantizes else x
        require_tensor(x, self.place)
        assert self.scale is not None
        out = self.output(fp.quantize(x.detach().float(), self.scale, self.axis, self.low, self.high))
        return taken(out, x, f"`{type(self).__name__}` {self.place}{calling_line()}") if runs_unseen_code() else out


def _dequantized(x: Any, has_booleans: bool) -> Any:
    if not isinstance(x, QTensor):
        return x
    if x.dtype == qbool and has_booleans:
        return x.shared("")
    if x.dtype == qbool or not x.is_integer:
        return x.dequantize()
    return fp.dequantize(x.plain(), x.scale, x.q_per_channel_axis())


class DeQuantize(QuantizedModule):
    """Integers to real numbers; real numbers pass. An operator of the CPU gets booleans as such."""

    gives_booleans: bool = False

    def configure(self, mod: Any) -> None:
        self.gives_booleans = mod.is_before_cpu

    def forward(self, x: Any) -> Any:  # also tuples, lists and dictionaries of tensors
        return pytree.tree_map(lambda x: _dequantized(x, self.gives_booleans), x)

    def extra_repr(self) -> str:
        return ""
