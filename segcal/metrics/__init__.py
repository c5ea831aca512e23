"""How calibrated a model is: a streaming meter, the scores of its sums, and the report."""

from segcal.metrics.compare import (
    Difference,
    compare_models,
    mean_intervals,
    paired_differences,
)
from segcal.metrics.meter import CalibrationMeter, update_together
from segcal.metrics.report import (
    BinTable,
    ClassHistogram,
    FineHistogram,
    Interval,
    Protocol,
    Report,
)

__all__ = [
    "BinTable",
    "CalibrationMeter",
    "ClassHistogram",
    "Difference",
    "FineHistogram",
    "Interval",
    "Protocol",
    "Report",
    "compare_models",
    "mean_intervals",
    "paired_differences",
    "update_together",
]
