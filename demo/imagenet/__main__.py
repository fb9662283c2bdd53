"""A pretrained network to integers, without training. Run it with ``make demo-imagenet``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

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
)
from demo.imagenet.data import load_photographs
from demo.imagenet.model import load_net
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization.qconfig import (
    default_calib_8bit_fake_quant_qconfig,
    default_calib_out_8bit_fake_quant_qconfig,
)

BATCH = 5

# The classifier gives high-precision output: its accumulator leaves as float, nothing is rounded.
CALIBRATION = {
    "": default_calib_8bit_fake_quant_qconfig,
    "module_name": [("net._fc", default_calib_out_8bit_fake_quant_qconfig)],
}


def run(folder: Path) -> int:
    """Make the journey and print the table; 0 if every integer agreed.

    Args:
        folder: where the files go.
    """
    torch.manual_seed(0)
    set_march(March.BAYES)
    images, labels = load_photographs()
    net = load_net()

    logits, milliseconds = evaluate(in_torch(net), images, BATCH, "float: run")
    in_float = Stage("float", logits, milliseconds, save_state(net, folder / "float.pt"))
    batches = images.split(BATCH)
    calibrated = calibrate(net, CALIBRATION, progress(batches, "calibrate", len(batches)))
    stages = [in_float, *deploy("calibrated", calibrated, images, BATCH, folder)]

    rows = []
    for stage in stages:
        agree = (stage.logits.argmax(1) == in_float.logits.argmax(1)).sum().item()
        cosine = F.cosine_similarity(stage.logits, in_float.logits).mean().item()
        rows.append(
            {
                "EfficientNet-Lite0": stage.name,
                "top-1": f"{stage.accuracy(labels):.0f} %",
                "same top-1 as float": f"{agree} of {len(labels)}",
                "logit cosine": f"{cosine:.4f}",
                "differs from row above": stage.mismatch_cell,
                "time per image": f"{stage.milliseconds:.1f} ms",
                "size": stage.size_cell,
                "file": stage.file.name,
            }
        )
    print_table(rows, folder)
    mismatches = mismatches_in(stages)
    print(f"{mismatches} mismatching integers. There are only 20 images, so the same ones calibrated the model.")
    if mismatches:
        print("FAILED: the same model must give the same integers everywhere.", file=sys.stderr)
    return int(mismatches > 0)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "imagenet", help="folder for files (default: %(default)s)")
    return run(parser.parse_args().out)


if __name__ == "__main__":
    sys.exit(main())
