"""Conditions of `segcal eval --fail-if`."""

import pytest
import torch

import segcal
from segcal.metrics.conditions import Condition


def test_conditions_on_a_report():
    meter = segcal.CalibrationMeter(2)
    meter.update_probs(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    report = meter.compute(resamples=0)  # accuracy 0.5, ECE 0.4
    assert "40.00 %" in Condition.parse("ece>0.35").broken_by(report)
    assert Condition.parse(" accuracy < 0.6 ").broken_by(report)
    for kept in ("ece>0.45", "accuracy<0.5", "coverage_at_risk_1<0.0"):
        assert not Condition.parse(kept).broken_by(report)
    assert "not known" in Condition.parse("image_ece>1").broken_by(report)


@pytest.mark.parametrize(
    "text", ["ece", "ece=0.1", "class_iou>0.1", "dece>0.1", "ece>x", "ece>-", "ece>5%"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"ece>0\.05"):
        Condition.parse(text)
