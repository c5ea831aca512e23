"""Post-hoc calibration: scalers that are fitted on a hold-out and calibrate logits.

scaler = segcal.TemperatureScaling().fit(batches)
probs = scaler(logits).softmax(1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from segcal.posthoc.registry import ENTRIES

if TYPE_CHECKING:
    from segcal.posthoc.affine import DirichletCalibration, MatrixScaling, VectorScaling
    from segcal.posthoc.classwise import (
        ClasswiseTemperatureScaling,
        DistributionAwareTemperatureScaling,
    )
    from segcal.posthoc.interface import Scaler
    from segcal.posthoc.loading import SCALERS, load
    from segcal.posthoc.local import LocalTemperatureScaling
    from segcal.posthoc.onevsrest import BetaCalibration, IsotonicCalibration
    from segcal.posthoc.selective import SelectiveScaling
    from segcal.posthoc.temperature import TemperatureScaling

# Loaded on first use: the registry alone needs no torch.
_EXPORTS = {entry.scaler: entry.module for entry in ENTRIES.values()}
_EXPORTS |= {"Scaler": "interface", "SCALERS": "loading", "load": "loading"}

__all__ = [
    "SCALERS",
    "BetaCalibration",
    "ClasswiseTemperatureScaling",
    "DirichletCalibration",
    "DistributionAwareTemperatureScaling",
    "IsotonicCalibration",
    "LocalTemperatureScaling",
    "MatrixScaling",
    "Scaler",
    "SelectiveScaling",
    "TemperatureScaling",
    "VectorScaling",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"segcal.posthoc.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'segcal.posthoc' has no attribute {name!r}")
