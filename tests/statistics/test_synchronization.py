"""`is_sync_quantize`: processes that see different data agree on one scale."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.processes import run_workers

pytestmark = pytest.mark.processes
WORKER = textwrap.dedent(
    """
    import json, sys, warnings
    import torch, torch.distributed as dist
    from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
    from horizon_plugin_pytorch.quantization import observer_v2
    from horizon_plugin_pytorch.statistics.observer_names import OBSERVERS
    from horizon_plugin_pytorch.statistics.sketch import Sketch
    from horizon_plugin_pytorch.quantization.observer_v2 import MinMaxObserver, SketchObserver

    rank, place, out = int(sys.argv[1]), sys.argv[2], f"{sys.argv[1]}.json"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    own = [[-1.0, 2.0], [-7.0, 0.5]][rank]
    found = {}

    def run(name, quantizer, *batches):
        for batch in batches:
            quantizer(batch)
        found[name] = quantizer.scale.tolist()

    run("synced", FakeQuantize(is_sync_quantize=True), torch.tensor(own), torch.tensor(own) * 2)
    run("alone", FakeQuantize(), torch.tensor(own))
    channels = torch.tensor([own, [0.1 * (rank + 1), 0.0]])
    by_channel = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    run("channels", FakeQuantize(MinMaxObserver, is_sync_quantize=True, **by_channel), channels)
    # One process has nothing to offer: it must not leave the other waiting, and takes over its range.
    run("empty", FakeQuantize(is_sync_quantize=True), torch.empty(0) if rank else torch.tensor(own))
    run("nan", FakeQuantize(is_sync_quantize=True), torch.tensor([float("nan")]) if rank else torch.tensor(own))
    run("nothing", FakeQuantize(is_sync_quantize=True), torch.empty(0))
    # Halves of the same batches: as one process that sees them whole.
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2000, generator=generator) * (i + 1) for i in range(3)]
    sketching = {cls.__name__: cls for cls in OBSERVERS.values() if issubclass(cls, SketchObserver)}
    for name, make in sketching.items():
        run(name, FakeQuantize(make, is_sync_quantize=True), *(b.chunk(2)[rank] for b in batches))
        run(name + " whole", FakeQuantize(make), *batches)
    for name, make in sketching.items():
        quantizer = FakeQuantize(make, is_sync_quantize=True, channel_len=2, **by_channel)
        run(f"channels {name}", quantizer, batches[rank].view(2, -1), batches[rank][: 0 if rank else None].view(2, -1))
    run("MSE empty", FakeQuantize(observer_v2.MSEObserver, is_sync_quantize=True), batches[0][: 0 if rank else None])
    # More values than counts of 32 bits have room for.
    sketch = Sketch.of(torch.tensor([0.25, 0.5, 0.5, -1.0]))
    sketch.replace(sketch.counts * 2**29, sketch.ends, sketch.total * 2**29, (2**29, 0))
    sketch.counts[123] += 1
    sketch.total += 1
    observer_v2.synchronize(sketch, "many")
    filled = sketch.counts[sketch.counts > 0].tolist()
    found["many"] = [sketch.total, *sketch.peaks, *filled]
    with open(out, "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
    """
)


def test_two_processes_get_the_same_scale(tmp_path: Path) -> None:
    for done in run_workers(tmp_path, WORKER):
        assert done.returncode == 0, done.stderr[-2000:]
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    first, second = (json.loads(file.read_text()) for file in files)
    assert first["alone"] != second["alone"]
    for name in ("synced", "channels", "empty", "nan", "nothing"):
        assert first[name] == second[name], name
    for name in first:
        if name.startswith("channels"):
            assert first[name] == second[name] and len(first[name]) == 2, name
        elif "Observer" in name:
            assert first[name] == second[name] == first[name.removesuffix(" whole") + " whole"], name
    assert first["MSE empty"] == second["MSE empty"]
    assert first["many"] == second["many"] == [4 * 2**27 + 2, 2**27, 0, 2, 2**27, 2**28, 2**27]  # every eighth value
    expected = {
        "synced": [7.07 / 127.5],
        "channels": [7 / 127.5, 0.2 / 127.5],
        "empty": [2 / 127.5],
        "nan": [2 / 127.5],
        "nothing": [1.0],
    }
    for name, values in expected.items():
        assert [round(v, 6) for v in first[name]] == [round(v, 6) for v in values], name
