"""Post-hoc calibration: scalers fitted on a hold-out, that repair a network's logits.

scaler = segcal.TemperatureScaling().fit(batches)
probs = scaler(logits).softmax(1)
"""

from segcal.posthoc.affine import MatrixScaling, VectorScaling
from segcal.posthoc.dirichlet import DirichletCalibration
from segcal.posthoc.interface import Scaler
from segcal.posthoc.local import LocalTemperatureScaling
from segcal.posthoc.saved import SCALERS, load
from segcal.posthoc.temperature import TemperatureScaling

__all__ = [
    "SCALERS",
    "DirichletCalibration",
    "LocalTemperatureScaling",
    "MatrixScaling",
    "Scaler",
    "TemperatureScaling",
    "VectorScaling",
    "load",
]
