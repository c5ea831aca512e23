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
        multilabel: what it learns of K sigmoid outputs; "" if it does not take them.
    """

    module: str
    scaler: str
    about: str
    multilabel: str = ""


# A new scaler is one class and one entry here; `SCALERS` has the classes.
ENTRIES: dict[str, ScalerEntry] = {
    "ts": ScalerEntry(
        "temperature", "TemperatureScaling", "temperature scaling", "one temperature for all"
    ),
    "vs": ScalerEntry("affine", "VectorScaling", "vector scaling"),
    "ms": ScalerEntry("affine", "MatrixScaling", "matrix scaling"),
    "dc": ScalerEntry("affine", "DirichletCalibration", "Dirichlet calibration"),
    "lts": ScalerEntry("local", "LocalTemperatureScaling", "local temperature scaling"),
    "cts": ScalerEntry(
        "classwise",
        "ClasswiseTemperatureScaling",
        "a temperature for each predicted class",
        "a temperature for each",
    ),
    "cdats": ScalerEntry(
        "classwise",
        "DistributionAwareTemperatureScaling",
        "class-distribution-aware temperature scaling",
    ),
    "beta": ScalerEntry("onevsrest", "BetaCalibration", "beta calibration", "a curve for each"),
    "isotonic": ScalerEntry(
        "onevsrest", "IsotonicCalibration", "isotonic regression", "a curve for each"
    ),
    "selective": ScalerEntry("selective", "SelectiveScaling", "selective scaling"),
}


def describe() -> str:
    """The scalers and what they are, for the help of `--posthoc`."""
    every = registry.describe({name: entry.about for name, entry in ENTRIES.items()})
    return f"{every}; sigmoid outputs: {', '.join(MULTILABEL)}"


# The scalers that take K sigmoid outputs.
MULTILABEL = tuple(name for name, entry in ENTRIES.items() if entry.multilabel)


def require_multilabel(name: str) -> None:
    """Raise a ValueError unless the scaler takes K sigmoid outputs."""
    if name not in MULTILABEL:
        raise ValueError(
            f"Expected a post-hoc method for sigmoid outputs, {', '.join(MULTILABEL)}, "
            f"but got {name}"
        )
