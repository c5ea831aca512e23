"""Diagrams of every class show the class tables, for two classes and for a hundred."""

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from segcal.metrics import CalibrationMeter
from segcal.viz import classwise_reliability, gap_heatmap
from segcal.viz.figure import png
from tests.support.synthetic_reports import constant_report, synthetic_report

NAMES = ["road", "sky", "tree", "car"]
OVER_CONFIDENT = synthetic_report(sharpness=3.0, names=NAMES)


def titles(figure):
    return [ax.get_title().split("\n")[0] for ax in figure.axes if ax.get_visible()]


def mesh_of(ax):
    (mesh,) = [each for each in ax.collections if isinstance(each, QuadMesh)]
    return mesh


def test_grid_has_every_class_by_name_with_its_score():
    assert titles(classwise_reliability(OVER_CONFIDENT)) == NAMES
    sure = classwise_reliability(constant_report(0.9, 7, class_names=["a", "b"]))
    assert [ax.get_title() for ax in sure.axes] == ["a\n20.00 %", "b\n20.00 %"]


def test_grid_shows_the_class_tables():
    figure = classwise_reliability(OVER_CONFIDENT)
    for c, ax in enumerate(figure.axes):
        bars = next(patch for patch in ax.patches if isinstance(patch, StepPatch))
        bins = OVER_CONFIDENT.classes[c]
        held = bins.count > 0
        lower = 100 * np.minimum(bins.accuracy, bins.confidence)
        np.testing.assert_allclose(bars.get_data().values[held], lower[held])


def test_grid_of_several_has_a_line_each_and_one_legend():
    reports = {"a": OVER_CONFIDENT, "b": synthetic_report(names=NAMES)}
    figure = classwise_reliability(reports)
    for c, ax in enumerate(figure.axes):
        for line, report in zip(ax.lines, reports.values(), strict=False):
            held = report.classes.count[c] > 0
            np.testing.assert_allclose(line.get_ydata(), 100 * report.classes.accuracy[c][held])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_limit_keeps_the_worst_in_their_order():
    report = synthetic_report(10, sharpness=3.0, images=2)
    worst = sorted(np.argsort(report.class_ece)[-3:])
    assert titles(classwise_reliability(report, limit=3)) == [str(c) for c in worst]
    labels = [text.get_text() for text in gap_heatmap(report, limit=3).get_yticklabels()]
    assert labels == [str(c) for c in worst]


def test_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        classwise_reliability(OVER_CONFIDENT, limit=0)


@pytest.mark.parametrize("num_classes", [2, 11, 100])
def test_any_number_of_classes(num_classes):
    report = synthetic_report(num_classes, images=1)
    figure = classwise_reliability(report)
    assert len(titles(figure)) == num_classes
    boxes = [ax.get_position() for ax in figure.axes if ax.get_visible()]
    assert all(0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1 for box in boxes)
    rows = {round(box.y0, 6) for box in boxes}
    columns = {round(box.x0, 6) for box in boxes}
    assert len(rows) * len(columns) < num_classes + len(columns)  # at most the last row is short


def test_heat_map_is_probability_minus_frequency():
    ax = gap_heatmap(OVER_CONFIDENT)
    bins = OVER_CONFIDENT.classes
    shown = mesh_of(ax).get_array()
    assert (shown.mask == (bins.count == 0)).all()
    expected = 100 * (bins.confidence - bins.accuracy)
    np.testing.assert_allclose(shown.compressed(), expected[bins.count > 0])
    assert mesh_of(ax).norm.vmin == -mesh_of(ax).norm.vmax  # zero is in the middle
    assert [text.get_text() for text in ax.get_yticklabels()] == NAMES


def test_heat_map_goes_on_ones_own_axes():
    ax = Figure().subplots()
    assert gap_heatmap(OVER_CONFIDENT, ax) is ax


def test_a_report_without_pixels_draws_nothing():
    empty = CalibrationMeter(3).compute()
    figure = classwise_reliability(empty)
    assert titles(figure) == ["0", "1", "2"]
    for ax in figure.axes:
        bars = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
        assert not any(np.nan_to_num(patch.get_data().values).any() for patch in bars)
    heat_map = gap_heatmap(empty)
    assert mesh_of(heat_map).get_array().mask.all()
    for drawn in (figure, heat_map.figure):
        assert png(drawn).startswith(b"\x89PNG")
