"""Profiling tools for quantized models, under the import name that the guides use.

The tools that compare and inspect models layer by layer (`featuremap_similarity`, `profile_featuremap`,
`model_profiler` and others) will live here. This version holds none of them yet, only the name and the version.

>>> __version__.count(".")
2
"""

from horizon_plugin_pytorch._version import __version__

__all__ = ["__version__"]
