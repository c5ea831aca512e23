"""Post-hoc calibration: calibrators that are fitted on a hold-out and calibrate logits.

calibrator = segcal.TemperatureScaling().fit(batches)
probs = calibrator(logits).softmax(1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from segcal.posthoc.registry import ENTRIES

if TYPE_CHECKING:
    from segcal.posthoc.affine import DirichletCalibration, MatrixScaling, VectorScaling
    from segcal.posthoc.calibrator import Calibrator
    from segcal.posthoc.classwise import (
        ClasswiseTemperatureScaling,
        DistributionAwareTemperatureScaling,
    )
    from segcal.posthoc.loading import CALIBRATORS, load
    from segcal.posthoc.local import LocalTemperatureScaling
    from segcal.posthoc.onevsrest import BetaCalibration, IsotonicCalibration
    from segcal.posthoc.selective import SelectiveScaling
    from segcal.posthoc.temperature import TemperatureScaling

# Loaded on first use: the registry alone needs no torch.
_EXPORTS = {entry.calibrator: entry.module for entry in ENTRIES.values()}
_EXPORTS |= {"Calibrator": "calibrator", "CALIBRATORS": "loading", "load": "loading"}

__all__ = [
    "CALIBRATORS",
    "BetaCalibration",
    "ClasswiseTemperatureScaling",
    "DirichletCalibration",
    "DistributionAwareTemperatureScaling",
    "IsotonicCalibration",
    "LocalTemperatureScaling",
    "MatrixScaling",
    "Calibrator",
    "SelectiveScaling",
    "TemperatureScaling",
    "VectorScaling",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"segcal.posthoc.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'segcal.posthoc' has no attribute {name!r}")
