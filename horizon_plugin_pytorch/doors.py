"""The paths under which modules and classes are known outside, where they differ from where the code lives.

The paths of the vendor are files that only import (`quantization/`, `fx/`, `utils/`). What is behind them prints, and
is pickled, under these paths. Pickles of older versions of this package also name modules that were never
documented: `MOVED` says where these are now.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

MOVED = {
    "deploy.check_model": "analysis.limits",
    "deploy.compiler": "export.compiler",
    "deploy.onnx_aten": "export.onnx_aten",
    "deploy.onnx_attention": "export.onnx_attention",
    "deploy.onnx_colour": "export.onnx_colour",
    "deploy.onnx_comparison": "export.onnx_comparison",
    "deploy.onnx_detection": "export.onnx_detection",
    "deploy.onnx_export": "export.onnx_export",
    "deploy.onnx_fixed_point": "export.onnx_fixed_point",
    "deploy.onnx_float": "export.onnx_float",
    "deploy.onnx_graph": "export.onnx_graph",
    "deploy.onnx_normalization": "export.onnx_normalization",
    "deploy.onnx_reduction": "export.onnx_reduction",
    "deploy.onnx_sampling": "export.onnx_sampling",
    "deploy.onnx_selection": "export.onnx_selection",
    "deploy.onnx_tables": "export.onnx_tables",
    "deploy.recorder": "program.recorder",
    "fx.absent": "capture.absent",
    "fx.arguments": "runtime.arguments",
    "fx.call_site": "runtime.call_site",
    "fx.chance": "runtime.stochastic",
    "fx.children": "runtime.children",
    "fx.container_writes": "capture.container_writes",
    "fx.dispatch": "runtime.dispatch",
    "fx.float_parts": "runtime.float_parts",
    "fx.given": "capture.given",
    "fx.memory": "capture.memory",
    "fx.packing": "capture.packing",
    "fx.proxies": "capture.proxies",
    "fx.reach": "capture.reach",
    "fx.recording": "capture.recording",
    "fx.results": "runtime.results",
    "fx.tracer": "capture.tracer",
    "fx.wrapped": "runtime.wrapped",
    "hooks": "runtime.hooks",
    "nn.arguments": "operators.arguments",
    "nn.compiled": "runtime.compiled",
    "nn.finite": "operators.finite",
    "nn.layer_support": "operators.layer_support",
    "nn.leaf": "runtime.leaf",
    "nn.max_pool": "operators.max_pool",
    "nn.pass_through": "operators.pass_through",
    "nn.placed": "runtime.located",
    "nn.plain_model": "capture.plain_model",
    "nn.plain_weights": "capture.plain_weights",
    "nn.real_tensor": "runtime.real_tensor",
    "nn.stub_input": "runtime.stub_input",
    "nn.support": "operators.support",
    "nn.unfinished": "runtime.unfinished",
    "quantization.batches": "calibration.batches",
    "quantization.bias_correction": "calibration.bias_correction",
    "quantization.bn_reestimation": "calibration.bn_reestimation",
    "quantization.cache": "statistics.cache",
    "quantization.calibration": "calibration.calibrate",
    "quantization.calibration_state": "calibration.state",
    "quantization.captured": "capture.captured",
    "quantization.channel_pairs": "calibration.channel_pairs",
    "quantization.checkpoint": "workflow.checkpoint",
    "quantization.choice": "config.choice",
    "quantization.clipping": "statistics.clipping",
    "quantization.equalization": "calibration.equalization",
    "quantization.fake_quantize_base": "fake_quant.base",
    "quantization.fingerprint": "calibration.fingerprint",
    "quantization.first_generation": "workflow.first_generation",
    "quantization.fuse_mode": "passes.fuse_mode",
    "quantization.fusion": "passes.fusion_rules",
    "quantization.fx.split": "workflow.split",
    "quantization.graph_text": "capture.graph_text",
    "quantization.inspection.calls": "analysis.calls",
    "quantization.inspection.check": "analysis.check",
    "quantization.inspection.float_run": "analysis.float_run",
    "quantization.inspection.report": "analysis.report",
    "quantization.inspection.rows": "analysis.rows",
    "quantization.layers": "calibration.layers",
    "quantization.observer_base": "statistics.observer_base",
    "quantization.partial": "statistics.partial",
    "quantization.passes.batches": "passes.batches",
    "quantization.passes.configure": "config.resolve",
    "quantization.passes.correct": "config.correct",
    "quantization.passes.dropout": "passes.dropout",
    "quantization.passes.fuse": "passes.fuse",
    "quantization.passes.graph_view": "config.graph_view",
    "quantization.passes.hybrid": "passes.hybrid",
    "quantization.passes.inplace": "passes.inplace",
    "quantization.passes.inputs": "passes.inputs",
    "quantization.passes.left_out": "passes.skipped",
    "quantization.passes.numbers": "capture.numbers",
    "quantization.passes.own_scales": "passes.own_scales",
    "quantization.passes.read_tensors": "passes.read_tensors",
    "quantization.passes.region": "capture.region",
    "quantization.passes.replace": "passes.replace",
    "quantization.passes.states": "passes.states",
    "quantization.passes.stub_links": "passes.stub_links",
    "quantization.passes.successors": "passes.successors",
    "quantization.passes.swap": "passes.swap",
    "quantization.passes.tied_scales": "passes.tied_scales",
    "quantization.passes.torch_fused": "passes.torch_fused",
    "quantization.passes.unmet": "passes.unmet",
    "quantization.passes.unread": "passes.unread",
    "quantization.passes.wrapped": "capture.wrapped",
    "quantization.processes": "statistics.processes",
    "quantization.rounding": "fake_quant.rounding",
    "quantization.sketch": "statistics.sketch",
    "quantization.wrapped": "passes.late_modules",
}


def show_at(door: str, *members: Any) -> None:
    """Let classes and functions print and be pickled under the path that users know.

    Args:
        door: a module that imports them, without the name of the package.
        members: what it imports.

    >>> from horizon_plugin_pytorch.nn.stubs import QuantStub
    >>> QuantStub
    <class 'horizon_plugin_pytorch.quantization.stubs.QuantStub'>
    """
    for member in members:
        member.__module__ = f"{_PACKAGE}.{door}"


class _Forwarding(MetaPathFinder, Loader):
    """Imports a module that has moved under its old name; asked last, when there is no such file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or (name not in MOVED and not any(old.startswith(f"{name}.") for old in MOVED)):
            return None
        return ModuleSpec(fullname, self, is_package=name not in MOVED)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        moved = MOVED.get(module.__name__.partition(".")[2])
        if moved is not None:
            sys.modules[module.__name__] = importlib.import_module(f"{_PACKAGE}.{moved}")


def forward_old_paths() -> None:
    """Let files of pickle of older versions find their classes."""
    if not any(isinstance(finder, _Forwarding) for finder in sys.meta_path):
        sys.meta_path.append(_Forwarding())
