"""Diagrams show the tables of the report, and change nothing global."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

import segcal.viz
from segcal.metrics import BinTable, CalibrationMeter
from segcal.metrics.report import Detection, Interval, OperatingPoint
from segcal.viz import (
    classwise_reliability,
    confidence_histogram,
    convergence,
    reliability_diagram,
    risk_coverage,
    severity_curve,
    write_figures,
    wrong_confidence,
)
from segcal.viz.page import PageRow, render_page
from segcal.viz.page.numbers import page_numbers
from segcal.viz.plots import _draw_bars, figure_png, plain, risk_by_uncertainty
from segcal.viz.style import OVER, UNDER, class_palette
from tests.support.synthetic_reports import constant_report, synthetic_report

NAMES = ["road", "sky", "tree", "car"]
CALIBRATED = synthetic_report()
OVER_CONFIDENT = synthetic_report(sharpness=3.0, names=NAMES)
UNDER_CONFIDENT = synthetic_report(sharpness=0.4)
SURE = constant_report(0.9, 7)  # confidence 0.9, accuracy 0.7
EMPTY = CalibrationMeter(4).compute()
OF_LABELS = (reliability_diagram, confidence_histogram, wrong_confidence)


def steps(ax, color=None):
    """The stairs drawn on `ax`, of one colour if told."""
    found = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    if color is not None:
        want = mpl.colors.to_rgb(color)
        found = [each for each in found if mpl.colors.to_rgb(each.get_facecolor()) == want]
    return found


def shaded(ax, color):
    """(B,) height of the gap shaded in `color`; 0 where there is none."""
    (patch,) = steps(ax, color)
    values, _, baseline = patch.get_data()
    return np.nan_to_num(values - baseline)


@pytest.mark.parametrize("report", [OVER_CONFIDENT, UNDER_CONFIDENT])
def test_bars_are_accuracy_and_shades_the_gap(report):
    ax = reliability_diagram(report)
    values, edges, _ = steps(ax)[0].get_data()
    held = report.top.count > 0
    lower = 100 * np.minimum(report.top.accuracy, report.top.confidence)
    np.testing.assert_allclose(values[held], lower[held])
    np.testing.assert_allclose(edges, 100 * report.top.edges)
    gaps = np.nan_to_num(100 * (report.top.confidence - report.top.accuracy))
    np.testing.assert_allclose(shaded(ax, OVER), np.maximum(gaps, 0), atol=1e-9)
    np.testing.assert_allclose(shaded(ax, UNDER), np.maximum(-gaps, 0), atol=1e-9)


def test_a_calibrated_network_draws_the_diagonal():
    bins = CALIBRATED.top
    ax = reliability_diagram({"a": CALIBRATED, "b": OVER_CONFIDENT})
    calibrated, over = ax.lines[:2]
    deviation = 50 / np.sqrt(bins.count[bins.count > 0])  # points; of a share of n coin tosses
    x, y = calibrated.get_data()
    assert (np.abs(x - y) < 4 * deviation + 0.1).all()
    x, y = over.get_data()
    assert (y < x).mean() > 0.9


def test_scores_and_units_are_written_in():
    ax = reliability_diagram(SURE)
    said = ax.get_legend().get_title().get_text()
    assert said.splitlines() == ["ECE 20.00 %", "confidence 90.0 %", "accuracy 70.0 %"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("confidence (%)", "accuracy (%)")


def test_strip_shows_the_share_of_each_bin():
    (strip,) = reliability_diagram(CALIBRATED).child_axes
    values = steps(strip)[0].get_data().values
    share = 100 * CALIBRATED.top.count / CALIBRATED.top.count.sum()
    np.testing.assert_allclose(values[share > 0.01], share[share > 0.01])
    assert np.isnan(values[share == 0]).all()
    assert strip.get_ylabel() == "pixels (%)"
    assert not reliability_diagram(CALIBRATED, counts=False).child_axes
    assert confidence_histogram(synthetic_report(3, side=1)).get_ylabel() == "samples (%)"


def test_several_are_lines_with_names_and_ece():
    ax = reliability_diagram({"nll": SURE, "fl+mdca": constant_report(0.7, 7)})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["nll: ECE 20.00 %", "fl+mdca: ECE 0.00 %"]
    styles = [(line.get_color(), line.get_marker()) for line in ax.lines[:2]]
    assert len({color for color, _ in styles}) == len({marker for _, marker in styles}) == 2


def test_confidence_histogram_has_shares_and_the_two_lines():
    ax = confidence_histogram(SURE)
    shares = steps(ax)[0].get_data().values
    assert shares.tolist() == [0] * 13 + [100, 0]  # 0.9 lies in (13/15, 14/15]
    at = {line.get_label(): line.get_xdata()[0] for line in ax.lines}
    assert at == pytest.approx({"mean confidence 90.0 %": 90, "accuracy 70.0 %": 70})
    assert all(line.is_dashed() for line in ax.lines)


def test_wrong_confidence_is_of_the_wrong_alone():
    reports = {"a": CALIBRATED, "b": OVER_CONFIDENT}
    ax = wrong_confidence(reports)
    for patch, report in zip(steps(ax), reports.values(), strict=True):
        wrong = report.top.count - report.top.hits
        np.testing.assert_allclose(patch.get_data().values, 100 * wrong / wrong.sum())
    (label,) = [text.get_text() for text in wrong_confidence(SURE).get_legend().get_texts()]
    assert label == "30.0 % wrong"


def test_one_bin_that_is_right_is_flat():
    count = np.zeros(15, int)
    count[12] = 100
    edges = np.linspace(0, 1, 16)
    table = BinTable(edges, count, np.where(count, 85, 0), np.where(count, 85.0, 0.0))
    ax = Figure().subplots()
    _draw_bars(ax, table)
    assert shaded(ax, OVER).sum() == shaded(ax, UNDER).sum() == 0


def test_own_axes_are_drawn_on_and_nothing_global_changes():
    with mpl.rc_context({"font.size": 20, "savefig.bbox": "tight"}):  # a user's own style
        before = dict(mpl.rcParams)
        for draw in OF_LABELS:
            ax = Figure().subplots()
            assert draw(CALIBRATED, ax) is ax and ax.patches
            figure_png(partial(draw, {"a": CALIBRATED, "b": OVER_CONFIDENT}))
        assert dict(mpl.rcParams) == before


def test_files_do_not_depend_on_the_users_style():
    own = figure_png(lambda: reliability_diagram(CALIBRATED))
    with mpl.rc_context({"font.size": 20, "savefig.bbox": "tight", "xtick.color": "red"}):
        assert figure_png(lambda: reliability_diagram(CALIBRATED)) == own


def test_no_pyplot():
    for path in Path(segcal.viz.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import)\b.*pyplot", path.read_text(), re.MULTILINE), path


def test_names_are_taken_literally():
    names = ["$\\frac{", "_hidden", "a\nb", "x" * 300 + "1", "x" * 300 + "2"]
    for draw in OF_LABELS:
        ax = draw(dict.fromkeys(names, CALIBRATED))
        figure_png(lambda ax=ax: ax)  # would raise on a formula
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        assert len(set(texts)) == len(names)  # none hidden; those that differ at the end still do
        assert max(map(len, texts)) < 60
    assert (plain("fl+mdca"), plain("abcdefghij", 7)) == ("fl+mdca", "abcd…ij")


def test_a_report_without_pixels_draws_nothing():
    for draw in OF_LABELS:
        for patch in steps(draw(EMPTY)):
            assert not np.nan_to_num(patch.get_data().values).any()
        both = figure_png(partial(draw, {"empty": EMPTY, "full": CALIBRATED}))
        assert both.startswith(b"\x89PNG")


def test_reports_must_fit_together():
    with pytest.raises(ValueError, match="at least one report"):
        reliability_diagram({})
    with pytest.raises(ValueError, match=r"same classes, but got \[3, 4\]"):
        reliability_diagram({"a": CALIBRATED, "b": synthetic_report(3)})
    named = [synthetic_report(2, images=1, names=["sky", name]) for name in ("road", "sea")]
    with pytest.raises(ValueError, match="same classes, but got 'road' and 'sea'"):
        reliability_diagram(dict(zip("ab", named, strict=True)))


# Classes ----------------------------------------------------------------------------------------


def titles(figure):
    return [ax.get_title().split("\n")[0] for ax in figure.axes if ax.get_visible()]


def test_grid_shows_the_tables_of_every_class_by_name():
    figure = classwise_reliability(OVER_CONFIDENT)
    assert titles(figure) == NAMES
    for c, ax in enumerate(figure.axes):
        bins = OVER_CONFIDENT.classes[c]
        held = bins.count > 0
        lower = 100 * np.minimum(bins.accuracy, bins.confidence)
        np.testing.assert_allclose(steps(ax)[0].get_data().values[held], lower[held])
    sure = classwise_reliability(constant_report(0.9, 7, class_names=["a", "b"]))
    assert [ax.get_title() for ax in sure.axes] == ["a\n20.00 %", "b\n20.00 %"]


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
    worst = [str(c) for c in sorted(np.argsort(report.class_ece)[-3:])]
    assert titles(classwise_reliability(report, limit=3)) == worst
    with pytest.raises(ValueError, match="at least 1"):
        classwise_reliability(OVER_CONFIDENT, limit=0)


@pytest.mark.parametrize("num_classes", [2, 100])
def test_any_number_of_classes(num_classes):
    figure = classwise_reliability(synthetic_report(num_classes, images=1))
    assert len(titles(figure)) == num_classes
    boxes = [ax.get_position() for ax in figure.axes if ax.get_visible()]
    assert all(0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1 for box in boxes)
    rows = {round(box.y0, 6) for box in boxes}
    columns = {round(box.x0, 6) for box in boxes}
    assert len(rows) * len(columns) < num_classes + len(columns)  # at most the last row is short
    assert len(np.unique(class_palette(num_classes), axis=0)) == num_classes


# Risk, training, shifts -------------------------------------------------------------------------

INTERVALS = {"coverage": Interval(0.3, 0.5), "accuracy": Interval(0.89, 0.95)}
POINT = OperatingPoint("accuracy=0.9", 0.75, 12, 0.5, 0.91, 0.4, 0.92, INTERVALS)


def points_of(ax):
    return [tuple(zip(*line.get_data(), strict=True)) for line in ax.lines]


def test_curve_is_the_risk_at_each_coverage():
    (curve,) = points_of(risk_coverage(CALIBRATED))
    risks = {round(coverage): risk for coverage, risk in curve if abs(coverage % 1) < 1e-9}
    assert risks[100] == pytest.approx(100 * (1 - CALIBRATED.accuracy))
    for percent in (80, 90, 95):
        expected = getattr(CALIBRATED, f"risk_at_coverage_{percent}")
        assert risks[percent] == pytest.approx(100 * expected)


def test_curves_of_uncertainty_are_those_of_their_histograms():
    confidence = Detection("confidence", CALIBRATED.fine.correct, CALIBRATED.fine.wrong, {})
    turned = Detection("entropy", confidence.correct[::-1], confidence.wrong[::-1], {})
    report = replace(CALIBRATED, detection=(confidence, turned))
    found, other = points_of(risk_by_uncertainty(report))
    (expected,) = points_of(risk_coverage(CALIBRATED))
    assert found == expected and other[100] > found[100]
    (entry,) = page_numbers([PageRow("nll", report)])["entries"]
    assert [one["label"] for one in entry["detection"]] == ["1 − confidence", "entropy"]
    assert [100 * risk for risk in entry["detection"][0]["risk"]] == pytest.approx(
        [risk for _, risk in expected]
    )
    assert 'id="risk-plot"' in render_page([PageRow("nll", report)])
    assert 'id="risk-plot"' not in render_page([PageRow("nll", CALIBRATED)])


def test_operating_points_are_marked_with_their_intervals():
    ax = risk_coverage(replace(CALIBRATED, operating_points=(POINT,)))
    _, across, along, mark = points_of(ax)
    assert [value for point in mark for value in point] == pytest.approx([40, 8])
    assert [coverage for coverage, _ in across] == pytest.approx([30, 50])
    assert [risk for _, risk in along] == pytest.approx([11, 5])
    assert [text.get_text() for text in ax.texts] == ["accuracy=0.9"]
    nothing = replace(POINT, accuracy=float("nan"), coverage=0.0)
    assert len(risk_coverage(replace(CALIBRATED, operating_points=(nothing,))).lines) == 1


LINES = [
    {"epoch": 1, "holdout/ece": 0.08, "holdout/sce": 0.004, "best": True},
    {"epoch": 2, "best": False},
    {"epoch": 3, "holdout/ece": 0.05, "holdout/sce": 0.003, "best": True},
    {"epoch": 4, "holdout/ece": 0.06, "holdout/sce": 0.002, "best": False},
]


def test_convergence_is_the_log():
    for score, values, unit in (("ece", [8, 5, 6], "%"), ("sce", [4, 3, 2], "1e-3")):
        ax = convergence({"run": LINES}, score=score)
        line, ring = ax.lines
        np.testing.assert_allclose(line.get_xdata(), [1, 3, 4])
        np.testing.assert_allclose(line.get_ydata(), values)
        np.testing.assert_allclose([*ring.get_xdata(), *ring.get_ydata()], [3, values[1]])
        assert unit in ax.get_ylabel()
    # Runs without a log keep their colours.
    beside = reliability_diagram({"a": CALIBRATED, "b": CALIBRATED}).lines[1]
    assert convergence({"a": [], "b": LINES}).lines[0].get_color() == beside.get_color()
    with pytest.raises(ValueError, match="'loss'"):
        convergence(LINES, score="loss")


def test_scores_against_severity():
    means = {"a": {0: 0.9, 1: 0.8, 5: 0.4}, "b": {0: 0.9, 5: 0.6}}
    ax = severity_curve(means, score="accuracy")
    assert [line.get_xydata().tolist() for line in ax.lines] == [
        [[0, 90], [1, 80], [5, 40]],
        [[0, 90], [5, 60]],
    ]
    assert list(ax.get_xticks()) == [0, 1, 5]


def test_figures_are_png_files(tmp_path):
    one = write_figures({"a": CALIBRATED}, tmp_path / "one", history=LINES)
    assert {path.stem for path in one} == {
        *("reliability", "confidence_histogram", "wrong_confidence", "risk_coverage"),
        *("classwise_reliability", "convergence_ece"),
    }
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in one)
    two = write_figures({"a": CALIBRATED, "b": OVER_CONFIDENT}, tmp_path / "two")
    assert len(two) == 5


@pytest.mark.filterwarnings("error")
def test_names_in_any_script_are_drawn_without_a_warning():
    figure = segcal.viz.plots.new_figure(2, 2)
    figure.suptitle("图")
    assert figure_png(lambda: figure)[:4] == b"\x89PNG"
