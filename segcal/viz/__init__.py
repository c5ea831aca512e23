"""Pictures of calibration: diagrams of reports, overlays on images, and an HTML page."""

from segcal.data.voc import palette as voc_palette
from segcal.viz.classes import classwise_reliability, gap_heatmap
from segcal.viz.curves import convergence
from segcal.viz.drawings import write_figures
from segcal.viz.entry import Entry, Overlay, Shifted, comparison_csv, comparison_markdown
from segcal.viz.heatmap import calibration_gap, calibration_overlay
from segcal.viz.html import write_page
from segcal.viz.palette import class_palette
from segcal.viz.panel import overlay_panel
from segcal.viz.reliability import confidence_histogram, reliability_diagram, wrong_confidence
from segcal.viz.selective import risk_coverage
from segcal.viz.severity import believed_accuracy, severity_curve, severity_curves
from segcal.viz.shift_panel import ShiftView, shift_panel
from segcal.viz.shifts import shift_csv, shift_markdown, shift_records

__all__ = [
    "Entry",
    "Overlay",
    "ShiftView",
    "Shifted",
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
    "voc_palette",
    "write_figures",
    "write_page",
    "wrong_confidence",
]
