"""The scalers by short name, declared without importing them: torch is not needed for the help."""

from __future__ import annotations

from dataclasses import dataclass

from segcal import registry


@dataclass(frozen=True)
class ScalerEntry:
    """A scaler that can be asked for by name.

    Attributes:
        module: of `segcal.posthoc` that has its class.
        scaler: name of the class, a `Scaler`.
        about: what it is, for the help.
    """

    module: str
    scaler: str
    about: str


# A new scaler is one class and one entry here; `SCALERS` has the classes.
ENTRIES: dict[str, ScalerEntry] = {
    "ts": ScalerEntry("temperature", "TemperatureScaling", "temperature scaling"),
    "vs": ScalerEntry("affine", "VectorScaling", "vector scaling"),
    "ms": ScalerEntry("affine", "MatrixScaling", "matrix scaling"),
    "dc": ScalerEntry("dirichlet", "DirichletCalibration", "Dirichlet calibration"),
    "lts": ScalerEntry("local", "LocalTemperatureScaling", "local temperature scaling"),
    "cts": ScalerEntry(
        "classwise", "ClasswiseTemperatureScaling", "a temperature for each predicted class"
    ),
    "cdats": ScalerEntry(
        "classwise",
        "DistributionAwareTemperatureScaling",
        "class-distribution-aware temperature scaling",
    ),
    "beta": ScalerEntry("beta", "BetaCalibration", "beta calibration"),
    "isotonic": ScalerEntry("isotonic", "IsotonicCalibration", "isotonic regression"),
    "selective": ScalerEntry("selective", "SelectiveScaling", "selective scaling"),
}


def describe() -> str:
    """The scalers and what they are, for the help of `--posthoc`."""
    return registry.describe({name: entry.about for name, entry in ENTRIES.items()})
