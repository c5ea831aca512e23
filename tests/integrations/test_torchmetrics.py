"""The metric of torchmetrics counts what the meter counts, whatever torchmetrics does with it."""

import copy
import pickle

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from segcal.integrations.torchmetrics import CalibrationMetric
from tests.support.framework_batches import CLASSES, assert_same, batches, report_of

SCORES = ("accuracy", "miou", "nll", "ece", "sce")


def assert_says(found, report, scores=SCORES):
    assert set(found) == set(scores)
    for name in scores:
        assert found[name].shape == ()
        assert float(found[name]) == pytest.approx(getattr(report, name), rel=1e-6)


def test_updates_add_up_and_reset_forgets():
    metric, data = CalibrationMetric(CLASSES), batches()
    for logits, labels in data:
        metric.update(logits, labels)
    assert_says(metric.compute(), report_of(data))
    assert_same(metric.report(), report_of(data))
    metric.reset()
    metric.update(*data[1])
    assert_says(metric.compute(), report_of(data[1:2]))


def test_forward_gives_the_batch_and_accumulates():
    metric, data = CalibrationMetric(CLASSES, per_image=True), batches()
    for logits, labels in data:
        assert_says(metric(logits, labels), report_of([(logits, labels)]))
    assert_same(metric.report(), report_of(data, per_image=True))


def test_probabilities_scores_and_options_of_the_meter():
    metric = CalibrationMetric(
        CLASSES, probs=True, scores=("image_ece", "brier"), per_image=True, num_bins=5
    )
    ((logits, labels),) = data = batches(1)
    metric.update(logits.softmax(1), labels)
    report = report_of(data, per_image=True, num_bins=5)
    assert_says(metric.compute(), report, ("image_ece", "brier"))


def test_n_bins_is_what_torchmetrics_calls_num_bins():
    ((logits, labels),) = data = batches(1)
    metric = CalibrationMetric(CLASSES, n_bins=5)
    metric.update(logits, labels)
    assert_same(metric.report(), report_of(data, num_bins=5))
    with pytest.raises(ValueError, match="n_bins"):
        CalibrationMetric(CLASSES, n_bins=5, num_bins=5)


def test_options_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="binz"):
        CalibrationMetric(CLASSES, binz=5)


def test_a_refused_batch_changes_nothing():
    metric, data = CalibrationMetric(CLASSES), batches(1)
    metric.update(*data[0])
    with pytest.raises(ValueError, match="Expected labels"):
        metric.update(data[0][0], data[0][1] + 100)
    assert_same(metric.report(), report_of(data))


def test_in_a_collection():
    collection = MetricCollection(
        {
            "calibration": CalibrationMetric(CLASSES),
            "top1": MulticlassAccuracy(CLASSES, average="micro", ignore_index=255),
        },
        prefix="val/",
    )
    data = batches()
    for logits, labels in data:
        collection.update(logits, labels)
    found, report = collection.compute(), report_of(data)
    assert float(found["val/ece"]) == pytest.approx(report.ece, rel=1e-6)
    # An independent reference in the same collection.
    assert float(found["val/accuracy"]) == pytest.approx(float(found["val/top1"]), rel=1e-6)


def test_copies_and_casts_keep_everything():
    metric, data = CalibrationMetric(CLASSES, per_image=True), batches()
    metric.update(*data[0])
    again = pickle.loads(pickle.dumps(copy.deepcopy(metric))).half().to("cpu")
    for one in (metric, again):
        one.update(*data[1])
        one.update(*data[2])
        assert_same(one.report(), report_of(data, per_image=True))
    assert again.sum_nll.dtype == torch.float64


def test_the_state_of_a_checkpoint_is_taken_over():
    metric, data = CalibrationMetric(CLASSES), batches()
    metric.persistent(True)
    metric.update(*data[0])
    other = CalibrationMetric(CLASSES)
    other.load_state_dict(metric.state_dict())
    other.persistent(True)
    other.update(*data[1])
    assert_same(other._meter().compute(), report_of(data[:2]))
