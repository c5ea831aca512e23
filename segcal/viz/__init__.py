"""Pictures of calibration: diagrams of reports, overlays on images, and an HTML page."""

from segcal.data.folders import palette as voc_palette
from segcal.viz.diagrams import (
    classwise_reliability,
    confidence_histogram,
    convergence,
    gap_heatmap,
    reliability_diagram,
    risk_coverage,
    wrong_confidence,
)
from segcal.viz.drawings import write_figures
from segcal.viz.entry import Overlay, PageRow, comparison_csv, comparison_markdown
from segcal.viz.figure import class_palette
from segcal.viz.html import write_page
from segcal.viz.panel import (
    ShiftView,
    calibration_gap,
    calibration_overlay,
    overlay_panel,
    shift_panel,
)
from segcal.viz.shifts import (
    believed_accuracy,
    severity_curve,
    severity_curves,
    shift_csv,
    shift_markdown,
    shift_records,
    shift_text,
)

__all__ = [
    "PageRow",
    "Overlay",
    "ShiftView",
    "believed_accuracy",
    "calibration_gap",
    "calibration_overlay",
    "class_palette",
    "classwise_reliability",
    "comparison_csv",
    "comparison_markdown",
    "confidence_histogram",
    "convergence",
    "gap_heatmap",
    "overlay_panel",
    "reliability_diagram",
    "risk_coverage",
    "severity_curve",
    "severity_curves",
    "shift_csv",
    "shift_markdown",
    "shift_panel",
    "shift_records",
    "shift_text",
    "voc_palette",
    "write_figures",
    "write_page",
    "wrong_confidence",
]
