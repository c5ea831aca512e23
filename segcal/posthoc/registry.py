"""The calibrators by short name, declared without importing them: torch is not needed for the help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CalibratorEntry:
    """A calibrator that can be asked for by name.

    Attributes:
        module: of `segcal.posthoc` that has its class.
        calibrator: name of the class, a `Calibrator`.
        about: what it is, for the help.
        multilabel: what it learns of K sigmoid outputs; "" if it does not take them.
    """

    module: str
    calibrator: str
    about: str
    multilabel: str = ""


# A new calibrator is one class and one entry here; `CALIBRATORS` has the classes.
ENTRIES: dict[str, CalibratorEntry] = {
    "ts": CalibratorEntry(
        "temperature", "TemperatureScaling", "temperature scaling", "one temperature for all"
    ),
    "vs": CalibratorEntry("affine", "VectorScaling", "vector scaling"),
    "ms": CalibratorEntry("affine", "MatrixScaling", "matrix scaling"),
    "dc": CalibratorEntry("affine", "DirichletCalibration", "Dirichlet calibration"),
    "lts": CalibratorEntry("local", "LocalTemperatureScaling", "local temperature scaling"),
    "cts": CalibratorEntry(
        "classwise",
        "ClasswiseTemperatureScaling",
        "a temperature for each predicted class",
        "a temperature for each",
    ),
    "cdats": CalibratorEntry(
        "classwise",
        "DistributionAwareTemperatureScaling",
        "class-distribution-aware temperature scaling",
    ),
    "beta": CalibratorEntry("onevsrest", "BetaCalibration", "beta calibration", "a curve for each"),
    "isotonic": CalibratorEntry(
        "onevsrest", "IsotonicCalibration", "isotonic regression", "a curve for each"
    ),
    "selective": CalibratorEntry("selective", "SelectiveScaling", "selective scaling"),
}


# The calibrators that take K sigmoid outputs.
MULTILABEL = tuple(name for name, entry in ENTRIES.items() if entry.multilabel)
NONE = "none"  # the predictions as they are, among the names of calibrators


def method_names(text: str) -> tuple[str, ...]:
    """The calibrators in a text such as none,ts,dc: short names, without "none".

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
    """Raise a ValueError unless the calibrator takes K sigmoid outputs."""
    if name not in MULTILABEL:
        raise ValueError(
            f"Expected a post-hoc method for sigmoid outputs, {', '.join(MULTILABEL)}, "
            f"but got {name}"
        )
