"""Tables, diagrams, pictures of images, and the HTML page.

ax = segcal.viz.reliability_diagram(report)
rgb = segcal.viz.calibration_overlay(image, probs, labels)     # (H, W, 3) uint8
"""

from importlib import import_module
from typing import Any

# Where each name lives. Loaded on first use, so that tables do not import matplotlib.
_MODULES = {
    "plots": (
        "classwise_reliability",
        "confidence_histogram",
        "convergence",
        "reliability_diagram",
        "risk_coverage",
        "severity_curve",
        "write_figures",
        "wrong_confidence",
    ),
    "overlay": ("Overlay", "calibration_gap", "calibration_overlay", "make_overlay"),
    "page": ("PageRow", "write_page"),
    "style": ("class_palette",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"segcal.viz.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'segcal.viz' has no attribute {name!r}")
