"""QuantStubs that `prepare` puts behind float16: they have no format of their own, but that of what is around them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, Site
from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.watch import Watch


def leaders_of(
    model: nn.Module, batch: Any, followers: Collection[Site], sites: Collection[Site]
) -> dict[Site, frozenset[Site]]:
    """For each stub the results that give it its format: it is int16 if one of them is.

    A stub has the format of what its reader gives. Where the reader gives real numbers it has the widest format in
    which float16 operators before it got theirs; see `passes.inputs.fit_inputs`.

    Args:
        model: prepared.
        batch: to run it on, to see who reads whom.
        sites: those whose format can be chosen.
    """
    log = CallLog(model)
    with torch.no_grad(), Watch(model, log):
        run_batch(model, own_tensors(batch))
    chosen = {site.operator: site for site in sites if site.kind == ACTIVATION}
    stubs = {site.operator: site for site in followers}
    found: dict[Site, frozenset[Site]] = {}
    for call, producers in zip(log.calls, log.producers, strict=True):
        for index in producers:
            stub = None if index is None else stubs.get(log.calls[index].path)
            if stub is not None and index is not None:
                own = chosen.get(call.path)
                found[stub] = _before(log, index, chosen) if own is None else frozenset({own})
    return found


def _before(log: CallLog, start: int, chosen: dict[str, Site]) -> frozenset[Site]:
    """The nearest results before a call that have formats."""
    found, waiting, seen = set[Site](), [start], set[int]()
    while waiting:
        for index in log.producers[waiting.pop()]:
            if index is None or index in seen:
                continue
            seen.add(index)
            site = chosen.get(log.calls[index].path)
            if site is None:
                waiting.append(index)
            else:
                found.add(site)
    return frozenset(found)
