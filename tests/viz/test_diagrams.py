"""Diagrams of the predicted label show the tables of the report, and change nothing global."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

import segcal.viz
from segcal.metrics import BinTable, CalibrationMeter
from segcal.viz import confidence_histogram, convergence, reliability_diagram, wrong_confidence
from segcal.viz.diagrams import draw_bars
from segcal.viz.drawings import entry_drawings
from segcal.viz.entry import PageRow
from segcal.viz.figure import OVER, UNDER, plain, png, themed
from tests.support.synthetic_reports import constant_report, synthetic_report

CALIBRATED = synthetic_report()
OVER_CONFIDENT = synthetic_report(sharpness=3.0)
UNDER_CONFIDENT = synthetic_report(sharpness=0.4)
SURE = constant_report(0.9, 7)  # confidence 0.9, accuracy 0.7
EMPTY = CalibrationMeter(4).compute()


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


def bin_gaps(bins):
    """(B,) confidence minus accuracy in points, 0 in empty bins."""
    return np.nan_to_num(100 * (bins.confidence - bins.accuracy))


@pytest.mark.parametrize("report", [CALIBRATED, OVER_CONFIDENT, UNDER_CONFIDENT])
def test_bars_are_accuracy_and_shades_the_gap(report):
    ax = reliability_diagram(report)
    values, edges, _ = steps(ax)[0].get_data()
    held = report.top.count > 0
    lower = 100 * np.minimum(report.top.accuracy, report.top.confidence)
    np.testing.assert_allclose(values[held], lower[held])
    np.testing.assert_allclose(edges, 100 * report.top.edges)
    gaps = bin_gaps(report.top)
    np.testing.assert_allclose(shaded(ax, OVER), np.maximum(gaps, 0), atol=1e-9)
    np.testing.assert_allclose(shaded(ax, UNDER), np.maximum(-gaps, 0), atol=1e-9)


def test_a_calibrated_network_draws_the_diagonal():
    bins = CALIBRATED.top
    assert bins.count.sum() == 8 * 48 * 48
    ax = reliability_diagram({"a": CALIBRATED, "b": OVER_CONFIDENT})
    calibrated, over = ax.lines[:2]
    deviation = 50 / np.sqrt(bins.count[bins.count > 0])  # points; of a share of n coin tosses
    x, y = calibrated.get_data()
    assert (np.abs(x - y) < 4 * deviation + 0.1).all()
    x, y = over.get_data()
    assert (y < x).mean() > 0.9


def test_over_confident_is_red_under_confident_blue():
    for report, strong, weak in ((OVER_CONFIDENT, OVER, UNDER), (UNDER_CONFIDENT, UNDER, OVER)):
        ax = reliability_diagram(report)
        assert shaded(ax, strong).sum() > 50
        assert shaded(ax, weak).sum() < 0.1 * shaded(ax, strong).sum()


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


def test_classification_counts_samples():
    report = synthetic_report(3, side=1)
    assert confidence_histogram(report).get_ylabel() == "samples (%)"
    assert confidence_histogram(CALIBRATED).get_ylabel() == "pixels (%)"


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


LINES = [
    {"epoch": 1, "holdout/ece": 0.08, "holdout/sce": 0.004, "best": True},
    {"epoch": 2, "best": False},
    {"epoch": 3, "holdout/ece": 0.05, "holdout/sce": 0.003, "best": True},
    {"epoch": 4, "holdout/ece": 0.06, "holdout/sce": 0.002, "best": False},
]


@pytest.mark.parametrize(
    ("score", "values", "unit"), [("ece", [8, 5, 6], "%"), ("sce", [4, 3, 2], "1e-3")]
)
def test_convergence_is_the_log(score, values, unit):
    ax = convergence({"run": LINES}, score=score)
    line, ring = ax.lines
    np.testing.assert_allclose(line.get_xdata(), [1, 3, 4])
    np.testing.assert_allclose(line.get_ydata(), values)
    np.testing.assert_allclose([*ring.get_xdata(), *ring.get_ydata()], [3, values[1]])
    assert unit in ax.get_ylabel()


def test_convergence_keeps_the_colours_of_runs_without_a_log():
    with_gap = convergence({"a": [], "b": LINES}).lines[0]
    beside = reliability_diagram({"a": CALIBRATED, "b": CALIBRATED}).lines[1]
    assert with_gap.get_color() == beside.get_color()


def test_convergence_refuses_an_unknown_score():
    with pytest.raises(ValueError, match="one of accuracy, .*, but got 'loss'"):
        convergence(LINES, score="loss")


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram, wrong_confidence])
def test_own_axes_are_drawn_on_and_given_back(draw):
    ax = Figure().subplots()
    assert draw(CALIBRATED, ax) is ax
    assert ax.patches


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram, wrong_confidence])
def test_nothing_global_changes(draw):
    with mpl.rc_context({"font.size": 20, "savefig.bbox": "tight"}):  # a user's own style
        before = dict(mpl.rcParams)
        with themed():
            png(draw({"a": CALIBRATED, "b": OVER_CONFIDENT}).figure)
        assert dict(mpl.rcParams) == before


def test_files_do_not_depend_on_the_users_style():
    def drawn():
        return entry_drawings(PageRow("a", CALIBRATED))[0].svg

    plain_style = drawn()
    with mpl.rc_context({"font.size": 20, "savefig.bbox": "tight", "xtick.color": "red"}):
        assert drawn() == plain_style


def test_no_pyplot():
    for path in Path(segcal.viz.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(from|import)\b.*pyplot", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram, wrong_confidence])
def test_names_are_taken_literally(draw):
    names = ["$\\frac{", "_hidden", "a\nb", "x" * 300 + "1", "x" * 300 + "2"]
    ax = draw(dict.fromkeys(names, CALIBRATED))
    png(ax.figure)  # would raise on a formula
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(texts) == len(names)  # none hidden
    assert len(set(texts)) == len(names)  # those that differ at the end still do
    assert max(map(len, texts)) < 60


def test_plain_keeps_short_names():
    assert plain("fl+mdca") == "fl+mdca"
    assert plain("abcdefghij", 7) == "abcd…ij"


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram, wrong_confidence])
def test_a_report_without_pixels_draws_nothing(draw):
    ax = draw(EMPTY)
    for patch in steps(ax):
        assert not np.nan_to_num(patch.get_data().values).any()
    assert png(ax.figure).startswith(b"\x89PNG")


def test_a_report_without_pixels_leaves_the_others_as_they_are():
    ax = reliability_diagram({"empty": EMPTY, "full": CALIBRATED})
    assert len(ax.lines[0].get_xdata()) == 0
    alone = reliability_diagram({"x": CALIBRATED, "full": CALIBRATED})
    np.testing.assert_array_equal(ax.lines[1].get_data(), alone.lines[1].get_data())
    for draw in (confidence_histogram, wrong_confidence):
        empty, full = steps(draw({"empty": EMPTY, "full": CALIBRATED}))
        assert not empty.get_data().values.any()
        assert full.get_data().values.sum() == pytest.approx(100)


def test_reports_must_fit_together():
    with pytest.raises(ValueError, match="at least one report"):
        reliability_diagram({})
    with pytest.raises(ValueError, match=r"same classes, but got \[3, 4\]"):
        reliability_diagram({"a": CALIBRATED, "b": synthetic_report(3)})
    named = [synthetic_report(2, images=1, names=["sky", name]) for name in ("road", "sea")]
    with pytest.raises(ValueError, match="same classes, but got 'road' and 'sea'"):
        reliability_diagram(dict(zip("ab", named, strict=True)))


def test_one_bin_that_is_right_is_flat():
    edges = np.linspace(0, 1, 16)
    count = np.zeros(15, int)
    count[12] = 100
    table = BinTable(edges, count, np.where(count, 85, 0), np.where(count, 85.0, 0.0))
    assert (bin_gaps(table) == 0).all()
    ax = Figure().subplots()
    draw_bars(ax, table)
    assert shaded(ax, OVER).sum() == shaded(ax, UNDER).sum() == 0
