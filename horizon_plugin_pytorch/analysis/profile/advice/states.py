"""Rules about the state that a model was left in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence
from horizon_plugin_pytorch.analysis.profile.document import Advice
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.train_mode import depends_on_mode


def quantizers_of(model: nn.Module) -> dict[str, FakeQuantize]:
    """The fake quantizers of a model, by the module that each of them belongs to; weights by ``conv.weight``."""
    found: dict[str, FakeQuantize] = {}
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantize):
            owner, _, name = path.rpartition(".")
            part = name.removesuffix("_fake_quant")
            found[owner if part == "activation_post_process" else f"{owner}.{part}"] = module
    return found


def _place(found: list[str], of: dict[str, FakeQuantize]) -> str:
    return found[0].removesuffix(".weight") if len(found) < len(of) else "model"


def left_in_calibration(evidence: Evidence) -> Iterator[Advice]:
    """A model that only observes computes float: there is nothing to see."""
    quantizers = {path: q for path, q in quantizers_of(evidence.second).items() if not q.is_fixed}
    calibrating = [path for path, quantizer in quantizers.items() if quantizer.is_calibrating]
    if calibrating:
        yield evidence.advice(
            "left-in-calibration", "error", _place(calibrating, quantizers),
            configuration="set_fake_quantize(model, FakeQuantState.VALIDATION)",
            count=len(calibrating), total=len(quantizers), module=calibrating[0].removesuffix(".weight"),
        )  # fmt: skip


def left_in_train_mode(evidence: Evidence) -> Iterator[Advice]:
    """Dropout and batch norms compute other numbers in train mode."""
    document = evidence.document
    for which, model in ((document.first, evidence.first), (document.second, evidence.second)):
        for path, module in model.named_modules():
            if module.training and depends_on_mode(module):
                yield evidence.advice(
                    "left-in-train-mode", "hint", path or "model", configuration="model.eval()",
                    module=path or "model", kind=type(module).__name__, which=which,
                )  # fmt: skip
                break


def never_calibrated(evidence: Evidence) -> Iterator[Advice]:
    """A scale of 1 that comes from nowhere."""
    quantizers = quantizers_of(evidence.second)
    unseen = [path for path, quantizer in quantizers.items() if not quantizer.has_statistics]
    ran = {operator.path for operator in evidence.operators}
    reached = [path for path in unseen if path.removesuffix(".weight") in ran] or ([] if ran else unseen)
    if reached:
        indices = [operator.index for operator in evidence.operators if operator.path in reached]
        yield evidence.advice(
            "never-calibrated", "error", _place(reached, quantizers), indices,
            configuration="calibrate(model, batches)",
            count=len(reached), total=len(quantizers), module=reached[0].removesuffix(".weight"),
        )  # fmt: skip
