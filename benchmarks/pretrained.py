"""What the rule of the weights' scale, and bias correction, do to a pretrained EfficientNet-Lite1.

python -m benchmarks.pretrained            the rules of the scale, a minute
python -m benchmarks.pretrained --bias     and bias correction, ten minutes

Calibrated, and corrected, on the twenty photographs of the demo. Next to these the outputs are measured on views of
them (mirrored, and corners) that neither has seen.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.algorithms import views
from demo.imagenet.data import load_photographs
from demo.imagenet.model import load_net
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import calibrate, correct_bias, get_default_qconfig, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_template import HighPrecisionOutputTemplate, TemplateQconfigSetter

SIZE, BATCH = 240, 5  # the network's own resolution
ACTIVATIONS = {"int8": qint8, "int16": qint16}
WEIGHTS = {"max / 127.5": get_default_qconfig().weight, "max / 127": get_qconfig().weight}


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """What the model gives, batch by batch."""
    return torch.cat([model(x) for x in images.split(BATCH)])


def calibrated(net: nn.Module, batches: list[Tensor], activations: str, weights: str) -> nn.Module:
    """As the setters do it, with one of the rules for weights."""
    qconfig = get_qconfig(out_dtype=ACTIVATIONS[activations])._replace(weight=WEIGHTS[weights])
    setter = TemplateQconfigSetter(qconfig, [HighPrecisionOutputTemplate()])
    model = prepare(net, (batches[0],), setter, out_dir=None)
    calibrate(model, batches, patience=0, progress=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bias", action="store_true", help="bias correction, too")
    parser.add_argument("--size", type=int, default=SIZE, help="of the images (default: %(default)s)")
    arguments = parser.parse_args()
    set_march(March.NASH_M)
    net, (images, labels) = load_net(1), load_photographs(arguments.size)
    unseen = views(images)[len(images) :]
    wanted = {"photographs": logits(net, images), "views": logits(net, unseen)}
    rows: list[list[Any]] = []

    def add(activations: str, weights: str, method: str, model: nn.Module) -> None:
        found = {"photographs": logits(model, images), "views": logits(model, unseen)}
        cosines = [f"{F.cosine_similarity(found[k], wanted[k]).mean():.4f}" for k in wanted]
        same = [int((found[k].argmax(1) == wanted[k].argmax(1)).sum()) for k in wanted]
        right = int((found["photographs"].argmax(1) == labels).sum())
        rows.append([activations, weights, method, *cosines, *same, right])
        print("  ", *rows[-1], flush=True)

    add("float", "", "", net)
    batches = list(images.split(BATCH))
    for activations in ACTIVATIONS:
        for weights in WEIGHTS:
            model = calibrated(net, batches, activations, weights)
            add(activations, weights, "calibrate", model)
            if arguments.bias:
                correct_bias(model, batches)
                add(activations, weights, "correct_bias", model)
    headers = ["activations", "weights", "method", "cosine, photographs", f"cosine, {len(unseen)} views",
               f"same class of {len(images)}", f"same class of {len(unseen)}", f"right of {len(images)}"]  # fmt: skip
    print("", tabulate(rows, headers, tablefmt="pipe", disable_numparse=True), sep="\n\n")


if __name__ == "__main__":
    main()
