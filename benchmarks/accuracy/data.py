"""Fashion-MNIST, which Debian has as a package, and the digits of the demo."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo.common import OUT
from demo.digits.__main__ import TEST_IMAGES
from demo.digits.data import Digits, augmented, load_digits

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Data:
    """Images in training and test, how training images vary, and how long to train.

    Args:
        images: of shape [n, 1, 28, 28], centred to [-1, 1).
        vary: makes a batch that is a little different each time.
        epochs: of float training.
    """

    images: Digits
    vary: Callable[[Tensor, torch.Generator], Tensor]
    epochs: int

    def held_back(self) -> Data:
        """The training images alone: every tenth to test on, the others to train on."""
        images, labels = self.images.train_images, self.images.train_labels
        held = torch.arange(len(images)) % 10 == 0
        return replace(self, images=Digits(images[~held], labels[~held], images[held], labels[held]))


def fashion_mnist() -> Data:
    """60,000 images to train on and 10,000 to test on; the package is fetched and unpacked without root if need be."""
    folder = INSTALLED if INSTALLED.exists() else _unpacked(OUT / "fashion-mnist")

    def images(part: str) -> Tensor:
        pixels = _numbers(folder / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
        return (pixels.float() - 128).div(128)

    def labels(part: str) -> Tensor:
        return _numbers(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()

    return Data(Digits(images("train"), labels("train"), images("t10k"), labels("t10k")), _moved, 4)


def digits() -> Data:
    """3,500 digits to train on and 1,500 to test on."""
    return Data(load_digits(TEST_IMAGES, torch.Generator().manual_seed(0)), augmented, 20)


DATA: dict[str, Callable[[], Data]] = {"fashion": fashion_mnist, "digits": digits}


def _numbers(file: Path, header: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=header).copy())


def _unpacked(folder: Path) -> Path:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            try:
                subprocess.run(["apt-get", "download", PACKAGE], cwd=scratch, check=True, capture_output=True)
                [file] = Path(scratch).glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", str(file), scratch], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"Fashion-MNIST comes in Debian's package {PACKAGE}, which could not be fetched ({error}).\n"
                    f"Put its four .gz files into {folder} or {INSTALLED}, or choose other data: --data digits"
                ) from None
            shutil.move(Path(scratch) / INSTALLED.relative_to("/"), folder)
    return folder


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images mirrored, and all moved by up to two pixels, each batch its own way."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    down, right = (int(n) for n in torch.randint(-2, 3, (2,), generator=generator))
    return torch.where(mirrored, images.flip(3), images).roll((down, right), (2, 3))
