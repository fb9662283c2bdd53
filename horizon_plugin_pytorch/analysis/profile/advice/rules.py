"""The list of rules, and what comes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.profile.advice import inputs as model_inputs
from horizon_plugin_pytorch.analysis.profile.advice import ranges, resolution, states, structure, training
from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document

Rule = Callable[[Evidence], Iterable[Advice]]
# A rule that follows another may leave alone what that one has explained (`Evidence.claimed`).
RULES: tuple[Rule, ...] = (
    states.never_calibrated,
    states.left_in_calibration,
    ranges.uneven_batches,
    ranges.clipped,
    training.not_finite,
    ranges.too_wide,
    model_inputs.images,
    model_inputs.off_centre,
    structure.shared_modules,
    structure.unequal_operands,
    structure.outputs,
    resolution.outliers,
    structure.amplified,
    resolution.int8_wide_range,
    resolution.too_coarse,
    training.weights_far,
    training.sensitive,
    resolution.accumulated,
    training.dead_channels,
    states.left_in_train_mode,
)
_SEVERITIES = ("error", "warning", "hint")


def advise(
    document: Document,
    first: nn.Module,
    second: nn.Module,
    inputs: Sequence[Any] = (),
    failed: Callable[[str, Exception], Any] | None = None,
) -> list[Advice]:
    """What is probably wrong with the second of two models, and what to try; what explains most of the error first.

    Args:
        document: of both models, as `collect` gives it; one of a run that was interrupted has what ran before.
        first, second: the models; nothing of them is changed.
        inputs: batches of inputs. With them the float model may be run once more, to see how sensitive it is.
        failed: is told the name of a rule that fails, and its error; the others go on. None lets the error out.

    Raises:
        QuantizationConfigError: the document's task is not known.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.ReLU()).eval()
    >>> qat = prepare_qat_fx(net, {"": get_default_qconfig()}).eval()
    >>> [advice.rule for advice in advise(Document("net", "FvsQ", "float", "qat"), net, qat)]
    ['never-calibrated']
    """
    evidence = Evidence(document, first, second, inputs)
    found: list[Advice] = []
    for rule in RULES:
        try:
            found += rule(evidence)
        except Exception as error:
            if failed is None:
                raise
            failed(rule.__name__, error)
    return sorted(found, key=lambda advice: (_is_state(advice), -_rank(advice), _SEVERITIES.index(advice.severity)))


def _is_state(advice: Advice) -> int:
    """Errors that concern the whole model come first: until they are mended, the rest says little."""
    return 0 if advice.severity == "error" and advice.explains is None else 1


def _rank(advice: Advice) -> float:
    explains = advice.explains or 0.0
    return math.inf if math.isnan(explains) else explains
