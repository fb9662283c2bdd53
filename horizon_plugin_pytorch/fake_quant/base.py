"""Finding the module at which values or scales stop being numbers.

    from horizon_plugin_pytorch.quantization import fake_quantize_base

    fake_quantize_base.check_nan_scale = "forward"

From then on the first module whose values or scale hold NaN raises `CalibrationError` with its path, in every state.
Observers leave out NaN and go on with a warning, and trained scales mend themselves, so that without the check NaN
shows up in the loss only. The check looks at every value and waits for a GPU: for a search, not for training. ``None``,
the default, costs nothing.
"""

from __future__ import annotations

import math
from typing import NoReturn

from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError

check_nan_scale: str | None = None


def check(path: str, scale: Tensor | None, values: Tensor | None = None) -> None:
    """Raise if `check_nan_scale` asks for it and the values at `path`, or the scale that they are to have, hold NaN."""
    if check_nan_scale is None:
        return
    if check_nan_scale != "forward":
        raise QuantizationConfigError(f'check_nan_scale must be None or "forward", got {check_nan_scale!r}.')
    if values is not None and (count := int(values.isnan().sum())):
        raise CalibrationError(
            f"{_place(path)}: {count} of the {values.numel()} values that reach it are NaN; modules before it had "
            "none. Look at what computes them: a division by zero, a logarithm or root of a negative number, an "
            "overflow in float16, or weights that a step of the optimizer left as NaN."
        )
    if scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
        refuse(path, scale, ", while the values that reach it are numbers")


def refuse(path: str, scale: Tensor, besides: str = "") -> NoReturn:
    """Raise for a scale that is not positive and finite."""
    bad = scale[~(scale.isfinite() & (scale > 0))]
    raise CalibrationError(
        f"{_place(path)}: its scale is {float(bad[0])}{besides}. A step of the optimizer (a smaller learning rate for "
        "scales, clipped gradients), a checkpoint, or a direct write left it so; calibrate anew or load the last good "
        "checkpoint."
    )


def require_finite(path: str, values: Tensor) -> None:
    """Refuse parameters that integers cannot have.

    Raises:
        CalibrationError: they hold NaN or infinity.
    """
    if math.isfinite(float(values.detach().sum())):  # then its terms are
        return
    if count := int((~values.isfinite()).sum()):  # finite ones can have a sum that is not
        raise CalibrationError(
            f"{_place(path)}: {count} of its {values.numel()} values are NaN or infinite, which integers cannot be. A "
            "step of the optimizer, a checkpoint, or the float model itself has them; load the last good checkpoint, "
            "or replace them by finite numbers."
        )


def _place(path: str) -> str:
    return f"`{path}`" if path else "a fake quantizer outside of a prepared model"
