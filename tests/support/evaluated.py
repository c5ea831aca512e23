"""Reports straight from a source of predictions, and their comparison."""

import pytest

from segcal.evaluation.measure import measure


def reports(source, calibrators=None, **options):
    """The report after each calibrator, by its name; by default of the predictions as they are."""
    measured = measure(source, calibrators or {"none": None}, **options)
    return {name: found.report for name, found in measured.items()}


def assert_close(one, other, rel=1e-9):
    """Equal, but for the last digits of floating numbers: sums are added in another order."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], rel)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, rel)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rel, abs=1e-9)
    else:
        assert one == other
