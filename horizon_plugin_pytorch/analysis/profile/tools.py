"""What users may say to the tools that the profiler calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from horizon_plugin_pytorch.analysis.call_counts import get_module_called_count
from horizon_plugin_pytorch.analysis.check_qconfig import check_qconfig
from horizon_plugin_pytorch.analysis.features import get_raw_features, profile_featuremap
from horizon_plugin_pytorch.analysis.similarity import featuremap_similarity
from horizon_plugin_pytorch.analysis.unfused import check_unfused_operations
from horizon_plugin_pytorch.analysis.weights import compare_weights
from horizon_plugin_pytorch.errors import QuantizationConfigError

_CALLED: tuple[Callable[..., Any], ...] = (
    featuremap_similarity, get_raw_features, profile_featuremap, get_module_called_count, check_unfused_operations,
    compare_weights, check_qconfig,
)  # fmt: skip
_TOOLS = {tool.__name__: tool for tool in _CALLED}
_OURS = {
    "model", "model1", "model2", "float_model", "qat_quantized_model", "inputs", "example_inputs", "featuremap",
}  # fmt: skip


class ToolSettings:
    """The arguments of each tool, as the user gave them in ``kwargs_dict``.

    Raises:
        QuantizationConfigError: a tool or an argument is not known, or is the profiler's to give.

    >>> ToolSettings({"featuremap_similarity": {"similarity_func": "MSE"}}).of("featuremap_similarity")
    {'similarity_func': 'MSE'}
    """

    def __init__(self, kwargs_dict: Mapping[str, Any] | None) -> None:
        given = {} if kwargs_dict is None else kwargs_dict
        if not isinstance(given, Mapping):
            raise TypeError(f"model_profiler: kwargs_dict is a dictionary of dictionaries, got {type(given).__name__}.")
        for name, settings in given.items():
            _check(name, settings)
        self._given = given

    def of(self, tool: str) -> dict[str, Any]:
        """The settings of a tool; an `out_dir` is the profiler's."""
        return {name: value for name, value in self._given.get(tool, {}).items() if name != "out_dir"}


def _check(name: str, settings: Any) -> None:
    if name not in _TOOLS:
        raise QuantizationConfigError(
            f"model_profiler: kwargs_dict has {name!r}, which is no tool that it calls; there are {', '.join(_TOOLS)}."
        )
    if not isinstance(settings, Mapping):
        raise TypeError(f"model_profiler: kwargs_dict[{name!r}] is a dictionary, got {type(settings).__name__}.")
    known = [p for p in inspect.signature(_TOOLS[name]).parameters if p not in _OURS]
    for argument in settings:
        if argument in _OURS:
            raise QuantizationConfigError(
                f"model_profiler: kwargs_dict[{name!r}] has {argument!r}, which model_profiler gives itself: leave it "
                "out."
            )
        if argument not in known:
            raise QuantizationConfigError(
                f"model_profiler: {name} has no argument {argument!r}; it has {', '.join(known)}."
            )
