"""The risk-coverage curve shows the risk at each coverage, and the operating points."""

from dataclasses import replace

import pytest

from segcal.metrics.report import Interval, OperatingPoint
from segcal.viz import risk_coverage
from tests.support.synthetic_reports import synthetic_report

REPORT = synthetic_report(images=2)
INTERVALS = {"coverage": Interval(0.3, 0.5), "accuracy": Interval(0.89, 0.95)}
POINT = OperatingPoint("accuracy=0.9", 0.75, 12, 0.5, 0.91, 0.4, 0.92, INTERVALS)


def lines_of(ax):
    return [tuple(zip(*line.get_data(), strict=True)) for line in ax.lines]


def test_curve_is_the_risk_at_each_coverage():
    (curve,) = lines_of(risk_coverage(REPORT))
    risks = {round(coverage): risk for coverage, risk in curve if abs(coverage % 1) < 1e-9}
    assert risks[100] == pytest.approx(100 * (1 - REPORT.accuracy))
    for percent in (80, 90, 95):
        expected = getattr(REPORT, f"risk_at_coverage_{percent}")
        assert risks[percent] == pytest.approx(100 * expected)


def test_operating_points_are_marked_with_their_intervals():
    ax = risk_coverage(replace(REPORT, operating_points=(POINT,)))
    _, across, along, mark = lines_of(ax)
    assert [value for point in mark for value in point] == pytest.approx([40, 8])
    assert [coverage for coverage, _ in across] == pytest.approx([30, 50])
    assert [risk for _, risk in along] == pytest.approx([11, 5])
    assert [text.get_text() for text in ax.texts] == ["accuracy=0.9"]


def test_points_that_accept_nothing_are_left_out():
    nothing = replace(POINT, accuracy=float("nan"), coverage=0.0)
    assert len(risk_coverage(replace(REPORT, operating_points=(nothing,))).lines) == 1


def test_several_reports_have_a_legend():
    ax = risk_coverage({"a": REPORT, "b": replace(REPORT, operating_points=(POINT,))})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert not ax.texts
