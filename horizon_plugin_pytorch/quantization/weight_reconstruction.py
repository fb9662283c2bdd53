"""AdaRound: learn for every weight whether to round it up or down."""

from horizon_plugin_pytorch.calibration.weight_reconstruction import (
    ReconstructedLayer,
    ReconstructionResult,
    _Config,  # noqa: F401 - named in pickles
    mix_calibration,
    weight_reconstruction,
)

__all__ = ["ReconstructedLayer", "ReconstructionResult", "mix_calibration", "weight_reconstruction"]
