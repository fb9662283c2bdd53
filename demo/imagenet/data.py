"""Twenty labelled ImageNet photographs, which the package `foolbox` carries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from demo.common import package_folder


def load_photograph(path: Path, size: int = 224) -> Tensor:
    """A photograph as EfficientNet-Lite wants it: RGB, resized, centred and divided by 128."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((size, size)), dtype=np.float32)
    return torch.from_numpy((pixels - 127) / 128).permute(2, 0, 1)


def load_photographs(size: int = 224) -> tuple[Tensor, Tensor]:
    """All images, of shape [20, 3, size, size], and their labels: ``imagenet_07_609.jpg`` shows class 609."""
    files = sorted((package_folder("foolbox") / "data").glob("imagenet_*.jpg"))
    labels = [int(file.stem.rsplit("_", 1)[1]) for file in files]
    return torch.stack([load_photograph(file, size) for file in files]), torch.tensor(labels)
