"""One way to watch a run of any model: float, calibrating, training or integer, prepared by whichever route."""

from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.flow import Flow
from horizon_plugin_pytorch.watch.held_run import HeldRun
from horizon_plugin_pytorch.watch.in_step import run_in_step
from horizon_plugin_pytorch.watch.module_watch import ModuleWatch
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.pairing import Pairing, Unpaired, pair_calls
from horizon_plugin_pytorch.watch.watch import Watch

__all__ = [
    "CallLog", "Flow", "HeldRun", "ModuleWatch", "OperatorCall", "Pairing", "Unpaired", "Watch", "pair_calls",
    "run_in_step",
]  # fmt: skip
