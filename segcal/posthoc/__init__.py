"""Post-hoc calibration: calibrators that are fitted on a hold-out and calibrate logits.

calibrator = segcal.TemperatureScaling().fit(logits, labels)
probs = calibrator.predict_proba(logits)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Method:
    """A calibrator that can be asked for by a short name.

    Attributes:
        module: the module of `segcal.posthoc` that has its class.
        cls: the name of the class, a `Calibrator`.
        about: what it is, for the help.
        multilabel: what it learns from K sigmoid outputs; "" if it does not take them.
    """

    module: str
    cls: str
    about: str
    multilabel: str = ""


# The one place where a calibrator is declared; its class is imported when it is first used.
METHODS: dict[str, Method] = {
    "ts": Method("temperature", "TemperatureScaling", "temperature scaling", "one temperature"),
    "ets": Method("temperature", "EnsembleTemperatureScaling", "ensemble temperature scaling"),
    "vs": Method("affine", "VectorScaling", "vector scaling"),
    "ms": Method("affine", "MatrixScaling", "matrix scaling"),
    "dc": Method("affine", "DirichletCalibration", "Dirichlet calibration"),
    "lts": Method("local", "LocalTemperatureScaling", "local temperature scaling"),
    "cts": Method(
        "temperature",
        "ClasswiseTemperatureScaling",
        "a temperature for each predicted class",
        "a temperature for each",
    ),
    "capm": Method("preserving", "ArgmaxPreservingMap", "affine maps that keep the mask"),
    "copm": Method(
        "preserving", "OrderPreservingMap", "affine maps that keep the order of classes"
    ),
    "beta": Method("curves", "BetaCalibration", "beta calibration", "a curve for each"),
    "isotonic": Method("curves", "IsotonicCalibration", "isotonic regression", "a curve for each"),
    "selective": Method("selective", "SelectiveScaling", "selective scaling"),
}
NONE = "none"  # the predictions as they are, among the names of methods
# Other ways to fit a method than on the hold-out: ts@shift and so on, and what it is fitted on.
WAYS = {
    "shift": "the hold-out as it is and corrupted",
    "ood": "the hold-out, and unrelated images with labels at random",
    "target": "pairs of unlabelled test images that are mixed (PseudoCal)",
    "set": "statistics of the unlabelled test images",
}

__all__ = [
    "CALIBRATORS",
    "METHODS",
    "NONE",
    "WAYS",
    "Calibrator",
    "Method",
    "label",
    "load_calibrator",
    "method_names",
    *(method.cls for method in METHODS.values()),
]


def method_names(text: str) -> tuple[str, ...]:
    """The methods in a text such as none,ts,ts@shift, by `METHODS` and `WAYS`, without "none"."""
    names = [name.strip().lower() for name in text.split(",")]
    ways = {name: [name, *(f"{name}@{way}" for way in WAYS)] for name in METHODS}
    known = [each for some in ways.values() for each in some]
    for name in names:
        if name not in (NONE, *known):
            raise ValueError(
                f"{name!r} is no post-hoc method; choose from {', '.join([NONE, *METHODS])}, "
                f"or fit one in another way, such as {', '.join(ways['ts'][1:])}"
            )
    return tuple(name for name in known if name in names)


def label(method: str) -> str:
    """What tables call a method: "TS", "TS@shift", "Beta"."""
    name, at, way = method.partition("@")
    word = METHODS[name].about.startswith(name)  # the others are initials
    return (name.capitalize() if word else name.upper()) + at + way


def __getattr__(name: str) -> Any:
    homes = {method.cls: method.module for method in METHODS.values()}
    homes |= dict.fromkeys(("Calibrator", "load_calibrator"), "calibrator")
    if name == "CALIBRATORS":
        classes = {key: __getattr__(method.cls) for key, method in METHODS.items()}
        return globals().setdefault(name, classes)  # one dict for everybody
    if name not in homes:
        raise AttributeError(f"module 'segcal.posthoc' has no attribute {name!r}")
    return getattr(import_module(f"segcal.posthoc.{homes[name]}"), name)
