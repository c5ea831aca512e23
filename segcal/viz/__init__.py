"""Pictures of calibration: diagrams of reports, overlays on images, and an HTML page."""

from segcal.data.voc import palette as voc_palette
from segcal.viz.classes import classwise_reliability, gap_heatmap
from segcal.viz.curves import convergence
from segcal.viz.drawings import write_figures
from segcal.viz.entry import Entry, Overlay, comparison_csv, comparison_markdown
from segcal.viz.heatmap import calibration_gap, calibration_overlay
from segcal.viz.html import write_page
from segcal.viz.palette import class_palette
from segcal.viz.panel import overlay_panel
from segcal.viz.reliability import confidence_histogram, reliability_diagram, wrong_confidence

__all__ = [
    "Entry",
    "Overlay",
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
    "voc_palette",
    "write_figures",
    "write_page",
    "wrong_confidence",
]
