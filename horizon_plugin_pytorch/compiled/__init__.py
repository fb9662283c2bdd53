"""Passes over memory that a C compiler has made faster, where one is there and the user asks for it.

Torch takes the smallest and the largest value, counts, clamps and rounds in several passes over a tensor. `passes.c`
has each as one. They give the very numbers of torch's operators, which is tried before they are used, and nothing
depends on them: without a compiler everything runs on torch.
"""

from horizon_plugin_pytorch.compiled.choice import (
    VARIABLE,
    are_passes_compiled,
    compiled_passes,
    use_compiled_passes,
)

__all__ = ["VARIABLE", "are_passes_compiled", "compiled_passes", "use_compiled_passes"]
