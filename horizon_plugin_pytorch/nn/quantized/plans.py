"""Arithmetic plans of quantized modules, kept for the inputs that they were made for."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.statistics.cache import lasting
from horizon_plugin_pytorch.untraced import is_traced, untraced

_MOST_PLANS = 64
# Memory of the plans beside the newest one: so much, or so many times that of the newest.
_MOST_BYTES = 1 << 24
_MOST_TIMES = 3


class PlanCache:
    """Plans of one module, one for each kind of input that it has met; not copied or pickled.

    A plan is found by what it can depend on: scale, format, range and device of the inputs, and what the caller adds
    (sizes, numbers). The newest plan stays; older ones go, the one in use longest ago first, when there are many or
    when they take much memory: the scale of a module that trains is new in every step. Threads may use it at the same
    time.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[Any, tuple[QTensor | Tensor, ...]]] = {}
        self._lock = threading.Lock()
        self._uses: Counter[tuple[int, int]] = Counter()  # of memory, which plans share: address and size
        self._bytes = 0

    def get(self, inputs: tuple[QTensor | Tensor, ...], key: Hashable, build: Callable[[], Any]) -> Any:
        """The plan for these inputs and this key.

        Args:
            inputs: tensors with a scale; or scales, where nothing else of the tensor matters.
            key: what else the plan depends on.
            build: makes the plan.
        """
        return (self._get if not is_traced() else self._get_untraced)(inputs, key, build)

    def _get(self, inputs: tuple[QTensor | Tensor, ...], key: Hashable, build: Callable[[], Any]) -> Any:
        full_key = (key, *[_key_of(x) for x in inputs])
        found = self._plans.get(full_key)
        if found is None:
            plan = lasting(build)
            self._keep(full_key, plan, tuple([_scale_of(x) for x in inputs]))
            return plan
        if len(self._plans) > _MOST_PLANS // 2 or self._bytes > _MOST_BYTES // 2:
            with self._lock:
                if full_key in self._plans:
                    self._plans[full_key] = self._plans.pop(full_key)
        return found[0]

    _get_untraced = untraced(_get)

    def _keep(self, key: Hashable, plan: Any, scales: tuple[Tensor, ...]) -> None:
        with self._lock:
            if key in self._plans:  # another thread was faster
                return
            self._plans[key] = (plan, scales)  # the scales are kept alive: ids may be in the key
            newest = self._count(plan, 1)
            most = newest + max(_MOST_BYTES, _MOST_TIMES * newest)
            while len(self._plans) > 1 and (len(self._plans) > _MOST_PLANS or self._bytes > most):
                oldest, _ = self._plans.pop(next(iter(self._plans)))
                self._count(oldest, -1)

    def _count(self, plan: Any, step: int) -> int:
        """Count a plan's memory in or out; gives its size."""
        parts = set(_memory_of(plan))
        for part in parts:
            before = self._uses[part]
            self._uses[part] += step
            if not before or not self._uses[part]:
                self._bytes += step * part[1]
            if not self._uses[part]:
                del self._uses[part]
        return sum(size for _, size in parts)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def size(self) -> int:
        """Bytes that the plans take."""
        return self._bytes

    def __deepcopy__(self, memo: dict) -> PlanCache:
        return PlanCache()

    def __reduce__(self) -> tuple:
        return PlanCache, ()


def _memory_of(plan: Any) -> Iterator[tuple[int, int]]:
    """Address and size of the memory of every tensor in a plan."""
    if isinstance(plan, Tensor):
        storage = plan.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()
    elif isinstance(plan, (list, tuple)):
        for part in plan:
            yield from _memory_of(part)
    elif isinstance(plan, (fp.ByteLayer, fp.WideLayer, fp.TransposedLayer)):
        yield id(plan), plan.nbytes
    elif dataclasses.is_dataclass(plan):
        for field in dataclasses.fields(plan):
            yield from _memory_of(getattr(plan, field.name))


def _scale_of(x: QTensor | Tensor) -> Tensor:
    return x.scale if isinstance(x, QTensor) else x


def _key_of(x: QTensor | Tensor) -> Hashable:
    if isinstance(x, QTensor):
        return x.dtype, x.range, x.q_per_channel_axis(), _scale_key(x.scale)
    return _scale_key(x)


def _scale_key(scale: Tensor) -> Hashable:
    """The numbers of a scale; on other devices, where looking at them takes long, the tensor and its writes."""
    if not scale.is_cpu:
        return id(scale), scale._version, scale.device
    return scale.item() if scale.numel() == 1 else tuple(scale.flatten().tolist())
