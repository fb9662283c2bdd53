"""Calibration that finds the observer of each operator by what it does to the model's outputs."""

from horizon_plugin_pytorch.calibration.auto import (  # noqa: F401 - named in pickles
    AutoCalibrationResult,
    AutoChoice,
    _Candidate,
    _Tensor,
    auto_calibrate,
    auto_calibration,
)

__all__ = ["AutoCalibrationResult", "AutoChoice", "auto_calibrate", "auto_calibration"]
