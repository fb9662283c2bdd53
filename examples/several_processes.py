"""Calibration and quantization-aware training in several processes.

    torchrun --nproc-per-node 2 examples/several_processes.py
    torchrun --nproc-per-node 2 examples/several_processes.py --scales lsq

Every process has its share of the data. `calibrate` merges what the processes see, so that all end with the scales that
one process would find on all data; a batch of N processes is one batch N times as large, so here each has an Nth of 32
images. Training goes on under DistributedDataParallel; `is_sync_quantize` lets the
processes agree on the range of each batch. Runs on CPUs with gloo; on GPUs, use nccl and move model and data to
``cuda:LOCAL_RANK``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    get_default_qconfig,
    parameter_groups,
    prepare_qat_fx,
    set_fake_quantize,
)


def make_data(count: int = 512) -> TensorDataset:
    """Images of noise with a bright corner; the label is the corner."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    for corner in range(4):
        row, column = 4 * (corner // 2), 4 * (corner % 2)
        images[labels == corner, :, row : row + 4, column : column + 4] += 1.0
    return TensorDataset(images, labels)


def make_model() -> nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4 * 4, 4),
    )  # fmt: skip


def train(model: nn.Module, data: DataLoader, steps: int, rate: float) -> float:
    """A few steps of AdamW, with rates of their own for trained scales; the loss of the last."""
    optimizer = torch.optim.AdamW(parameter_groups(model, rate))
    loss = torch.tensor(float("nan"))
    for _, (images, labels) in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of images with the right label."""
    images, labels = data.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    """Train in float, calibrate, train on the integer grid; process 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", choices=["fake_quant", "lsq"], default="fake_quant", help="observed or trained")
    parser.add_argument("--alone", action="store_true", help="do not share the ranges while training")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--state", help="file in which an interrupted calibration is kept")
    parser.add_argument("--out", help="write each process's state dict to OUT.<rank>")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    set_march(March.BAYES)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = make_data()
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, 32 // world, sampler=sampler)

    float_model = make_model()
    train(DistributedDataParallel(float_model), loader, 16, 0.01)
    for buffer in float_model.buffers():  # each process has batch-norm statistics of its own data; calibrate one model
        dist.broadcast(buffer, 0)
    float_model.eval()

    qconfig = get_default_qconfig(
        activation_fake_quant=options.scales,
        weight_fake_quant=options.scales,
        activation_qkwargs={"is_sync_quantize": not options.alone},
    )
    model = prepare_qat_fx(QuantWrapper(float_model), {"": qconfig})
    # If a process dies, start again with the same --state: calibration goes on after the last whole batch.
    calibrate(model, loader, state_file=options.state, progress=False)
    scales: dict[str, Tensor] = {n: v.detach().clone() for n, v in model.state_dict().items() if n.endswith("scale")}
    calibrated = accuracy(model, data)

    model.train()
    set_fake_quantize(model, FakeQuantState.QAT)
    loss = train(DistributedDataParallel(model), loader, options.steps, 0.001)
    if options.out:
        torch.save({"calibrated": scales, "trained": model.state_dict()}, f"{options.out}.{rank}")
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    if rank == 0:
        print(f"{world} processes (pid {os.getpid()} is the first), loss {loss:.3f}")
        print(f"accuracy: float {accuracy(float_model, data):.3f}, calibrated {calibrated:.3f}, ", end="")
        print(f"trained on the integer grid {accuracy(model, data):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
