"""The integer program: what a converted model computes, as one graph of `horizon::` and aten operators."""

from horizon_plugin_pytorch.program.program import Program
from horizon_plugin_pytorch.program.record import record_program

__all__ = ["Program", "record_program"]
