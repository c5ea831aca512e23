"""segcal: measure and improve the calibration of semantic segmentation networks.

criterion = segcal.build_loss("fl+mdca", gamma=3.0, beta=1.0, ignore_index=255)
loss = criterion(logits, labels)
"""

from importlib import import_module
from typing import Any

from segcal.posthoc import METHODS

__version__ = "0.3.0"

# Where each public name lives. Loaded on first use, so `import segcal` costs no more than it must.
_EXPORTS = {
    "build_loss": "segcal.losses",
    "Criterion": "segcal.losses",
    "flatten": "segcal.pixels",
    "Pixels": "segcal.pixels",
    "CalibrationMeter": "segcal.metrics",
    "Report": "segcal.metrics",
    "load_calibrator": "segcal.posthoc",
    **{method.cls: "segcal.posthoc" for method in METHODS.values()},
    "evaluate": "segcal.evaluation.evaluate",
    "evaluate_source": "segcal.evaluation.evaluate",
    "apply": "segcal.evaluation.apply",
    "Evaluation": "segcal.evaluation.evaluate",
    "load_evaluation": "segcal.evaluation.folder",
    "open_source": "segcal.sources",
    "Members": "segcal.sources.members",
}
_MODULES = (
    *("losses", "metrics", "posthoc", "viz", "data", "models"),
    *("sources", "evaluation", "training"),
)

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return import_module(f"segcal.{name}")
    raise AttributeError(f"module 'segcal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
