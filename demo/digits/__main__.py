"""The whole journey on real digits. Run it with ``make demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.common import (
    OUT,
    Stage,
    calibrate,
    deploy,
    evaluate,
    in_torch,
    mismatches_in,
    print_table,
    progress,
    save_state,
    write_profile,
)
from demo.digits.data import Digits, augmented, load_digits
from demo.digits.model import DigitNet
from horizon_plugin_pytorch.analysis.profile.document import Metric
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import (
    default_calib_8bit_fake_quant_qconfig,
    default_calib_out_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
)

TEST_IMAGES = 1500
BATCH = 50
PROFILED = 4  # batches
ALLOWED_LOSS = 0.3  # points of accuracy that quantization may cost

# The classifier gives high-precision output: its accumulator leaves as float, nothing is rounded.
CALIBRATION = {
    "": default_calib_8bit_fake_quant_qconfig,
    "module_name": [("classifier", default_calib_out_8bit_fake_quant_qconfig)],
}
TRAINING = {
    "": default_qat_8bit_fake_quant_qconfig,
    "module_name": [("classifier", default_qat_out_8bit_fake_quant_qconfig)],
}


def train(model: nn.Module, data: Digits, epochs: int, rate: float, generator: torch.Generator, title: str) -> None:
    """Train on augmented digits; the learning rate rises in the first steps and falls to zero.

    Args:
        model: a float or a prepared model.
        data: the digits.
        epochs: passes over the training images.
        rate: the highest learning rate.
        generator: order of the images, and how they are turned and moved.
        title: what the progress bar says.
    """
    steps_per_epoch = len(data.train_images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * steps_per_epoch, pct_start=0.1)
    model.train()

    def batches() -> Iterator[Tensor]:
        for _ in range(epochs):
            order = torch.randperm(len(data.train_images), generator=generator)
            yield from order[: steps_per_epoch * BATCH].split(BATCH)

    for chosen in progress(batches(), title, epochs * steps_per_epoch):
        loss = F.cross_entropy(model(augmented(data.train_images[chosen], generator)), data.train_labels[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()


def float_stage(model: nn.Module, data: Digits, folder: Path) -> Stage:
    """The float model on the test images."""
    logits, milliseconds = evaluate(in_torch(model), data.test_images, BATCH, "float: run")
    return Stage("float", logits, milliseconds, save_state(model, folder / "float.pt"))


def calibrated_stage(model: nn.Module, data: Digits, folder: Path) -> tuple[Stage, nn.Module]:
    """Calibrate on the training images as they are in deployment, that is without augmentation."""
    batches = data.train_images.split(BATCH)
    calibrated = calibrate(model, CALIBRATION, progress(batches, "calibrate", len(batches)))
    logits, milliseconds = evaluate(in_torch(calibrated), data.test_images, BATCH, "calibrated: run")
    return Stage("calibrated", logits, milliseconds, save_state(calibrated, folder / "calibrated.pt")), calibrated


def run(folder: Path, float_epochs: int, qat_epochs: int) -> int:
    """Make the journey and print the table; 0 if every integer agreed and the accuracy was kept.

    Args:
        folder: where the files go.
        float_epochs, qat_epochs: how long to train.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    set_march(March.BAYES)
    data = load_digits(TEST_IMAGES, generator)

    net = DigitNet()
    train(net, data, float_epochs, 4e-3, generator, "train float")
    in_float = float_stage(net, data, folder)
    calibrated, calibration_model = calibrated_stage(net, data, folder)

    qat_model = prepare_qat_fx(net, TRAINING)
    qat_model.load_state_dict(calibration_model.state_dict())
    set_fake_quantize(qat_model, FakeQuantState.QAT)
    train(qat_model, data, qat_epochs, 2e-4, generator, "train QAT")
    deployed = deploy("QAT", qat_model, data.test_images, BATCH, folder)

    stages = [in_float, calibrated, *deployed]
    print_table(
        [
            {
                "digits": stage.name,
                "accuracy": f"{stage.accuracy(data.test_labels):.2f} %",
                "differs from row above": stage.mismatch_cell,
                "time per image": f"{stage.milliseconds:.3f} ms",
                "size": stage.size_cell,
                "file": stage.file.name,
            }
            for stage in stages
        ],
        folder,
    )
    loss = in_float.accuracy(data.test_labels) - deployed[-1].accuracy(data.test_labels)
    mismatches = mismatches_in(stages)
    print(f"{mismatches} mismatching integers; float to integers {-loss:+.2f} points on {TEST_IMAGES} held-out images.")
    # What quantization alone does: training changes the weights, and with them all results.
    accuracies = [stage.accuracy(data.test_labels) for stage in (in_float, calibrated)]
    metric = Metric("accuracy, %", accuracies[0], accuracies[1])
    write_profile(net, calibration_model, data.test_images.split(BATCH)[:PROFILED], metric, folder)
    if mismatches:
        print("FAILED: the same model must give the same integers everywhere.", file=sys.stderr)
    if loss > ALLOWED_LOSS:
        print(f"FAILED: quantization may cost {ALLOWED_LOSS} points.", file=sys.stderr)
    return int(mismatches > 0 or loss > ALLOWED_LOSS)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "digits", help="folder for files (default: %(default)s)")
    parser.add_argument("--float-epochs", type=int, default=20)
    parser.add_argument("--qat-epochs", type=int, default=6)
    arguments = parser.parse_args()
    return run(arguments.out, arguments.float_epochs, arguments.qat_epochs)


if __name__ == "__main__":
    sys.exit(main())
