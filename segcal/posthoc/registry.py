"""The scalers by short name, declared without importing them: torch is not needed for the help."""

from __future__ import annotations

from dataclasses import dataclass


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


# The scalers that take K sigmoid outputs.
MULTILABEL = tuple(name for name, entry in ENTRIES.items() if entry.multilabel)
NONE = "none"  # the predictions as they are, among the names of scalers


def method_names(text: str) -> tuple[str, ...]:
    """The scalers in a text such as none,ts,dc: short names, without "none".

    In the order of `ENTRIES`, so that a page made again from the files lists them alike.
    """
    names = dict.fromkeys(name.strip().lower() for name in text.split(","))
    for name in names:
        if name not in (NONE, *ENTRIES):
            raise ValueError(
                f"Expected post-hoc methods among {', '.join([NONE, *ENTRIES])}, but got {name!r}"
            )
    return tuple(name for name in ENTRIES if name in names)


def require_multilabel(name: str) -> None:
    """Raise a ValueError unless the scaler takes K sigmoid outputs."""
    if name not in MULTILABEL:
        raise ValueError(
            f"Expected a post-hoc method for sigmoid outputs, {', '.join(MULTILABEL)}, "
            f"but got {name}"
        )
