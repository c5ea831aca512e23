"""MONAI: a 3-D network with sliding windows, its engine, and its own calibration metric."""

import pytest
import torch
from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
from monai.engines import SupervisedEvaluator
from monai.inferers import SlidingWindowInferer
from monai.metrics import CalibrationErrorMetric, DiceMetric
from monai.networks import one_hot
from monai.networks.nets import UNet

from segcal.integrations.monai import CalibrationHandler, CalibrationMetric
from segcal.metrics import CalibrationMeter
from tests.support.framework_batches import CLASSES, assert_same, batches, report_of

SIZE = (12, 10, 8)


def test_all_the_forms_of_a_batch_count_alike():
    data = batches(3, size=SIZE)
    data = [(logits, labels.where(labels != 255, 0)) for logits, labels in data]  # for one-hot
    stacked, listed, hot = (CalibrationMetric(CLASSES, per_image=True) for _ in range(3))
    probs = CalibrationMetric(CLASSES, per_image=True, probs=True)
    for logits, labels in data:
        y = labels[:, None]
        stacked(logits, y)
        listed(decollate_batch(MetaTensor(logits)), decollate_batch(MetaTensor(y.float())))
        hot(y_pred=logits, y=one_hot(y, CLASSES))
        probs(logits.softmax(1), y)
    report = report_of(data, per_image=True)
    for metric in (stacked, listed, hot):
        assert_same(metric.report(), report)
    assert probs.report().ece == pytest.approx(report.ece, abs=1e-6)
    assert stacked.aggregate()["ece"] == stacked.report().ece


def test_sigmoid_outputs():
    ((logits, _),) = batches(1, size=SIZE)
    labels = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))) > 0
    options = {"multilabel": True, "per_image": True}
    metric, meter = CalibrationMetric(CLASSES, **options), CalibrationMeter(CLASSES, **options)
    metric(logits, labels.float())
    for one, label in zip(logits, labels.long(), strict=True):
        meter.update(one[None], label[None])
    assert_same(metric.report(), meter.compute())


@pytest.mark.parametrize(
    ("y", "multilabel", "problem"),
    [
        (torch.zeros(1, 2, 4, 4, 4), False, "shape"),
        (torch.full((1, 1, 4, 4, 4), 0.5), False, "whole numbers"),
        (torch.full((1, CLASSES, 4, 4, 4), 0.7), True, "whole numbers"),
        (torch.ones(1, CLASSES, 4, 4, 4), False, "one-hot"),
    ],
)
def test_other_labels_are_refused(y, multilabel, problem):
    metric = CalibrationMetric(CLASSES, multilabel=multilabel)
    with pytest.raises(ValueError, match=problem):
        metric(torch.zeros(1, CLASSES, 4, 4, 4), y)


def test_means_over_images_are_those_of_monai_but_for_classes_that_an_image_does_not_show():
    """The score image_ace is MONAI's with the reduction "average" where every class is there."""
    data = [(logits, labels.where(labels != 255, 0)) for logits, labels in batches(2, size=SIZE)]
    ours = CalibrationMetric(CLASSES, per_image=True, num_bins=20)
    theirs = CalibrationErrorMetric(num_bins=20, calibration_reduction="average")
    for logits, labels in data:
        ours(logits, labels[:, None])
        theirs(logits.softmax(1), one_hot(labels[:, None], CLASSES))
    assert ours.report().image_ace == pytest.approx(theirs.aggregate().item(), rel=1e-4)
    ours.reset()
    theirs.reset()
    for logits, labels in data:
        labels = labels.where(labels != 3, 0)  # no image shows class 3
        ours(logits, labels[:, None])
        theirs(logits.softmax(1), one_hot(labels[:, None], CLASSES))
    shown = theirs.get_buffer()[:, :3].mean()
    assert ours.report().image_ace == pytest.approx(shown.item(), rel=1e-4)
    assert theirs.aggregate().item() > 1.1 * ours.report().image_ace


def test_an_evaluator_of_a_random_unet_with_sliding_windows():
    torch.manual_seed(0)
    network = UNet(3, 1, CLASSES, channels=(4, 8), strides=(2,))
    items = [
        {"image": torch.randn(1, 20, 18, 16), "label": torch.randint(0, CLASSES, (1, 20, 18, 16))}
        for _ in range(3)
    ]
    inferer = SlidingWindowInferer(roi_size=(16, 16, 16), overlap=0.25)
    handler = CalibrationHandler(CLASSES, per_image=True, scores=("ece", "nll", "image_ece"))
    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=DataLoader(Dataset(items), batch_size=2),
        network=network,
        inferer=inferer,
        key_val_metric={"ece": handler["ece"]},
        additional_metrics={"calibration": handler},
    )
    evaluator.run()
    with torch.no_grad():
        report = report_of(
            [(inferer(item["image"][None], network.eval()), item["label"]) for item in items],
            per_image=True,
        )
    found = evaluator.state.metrics
    assert evaluator.state.best_metric == found["ece"] == pytest.approx(report.ece, rel=1e-6)
    assert found["nll"] == pytest.approx(report.nll, rel=1e-6)
    assert found["image_ece"] == pytest.approx(report.image_ece, rel=1e-6)
    assert handler.metric.report().protocol.images == 3


def test_without_background_is_the_dice_of_monai():
    ((logits, labels),) = batches(1, size=SIZE)
    y = labels.where(labels != 255, 0)[:1, None]
    metric = CalibrationMetric(CLASSES, include_background=False, per_image=True)
    metric(logits[:1], y)
    dice = DiceMetric(include_background=False)  # of one image, so over all its voxels
    dice(one_hot(logits[:1].argmax(1, keepdim=True), CLASSES), one_hot(y, CLASSES))
    found = metric.aggregate()
    assert found["foreground_dice"] == pytest.approx(dice.aggregate().item(), rel=1e-6)
    assert found["foreground_ace"] == pytest.approx(
        sum(metric.report().class_ace[1:]) / (CLASSES - 1)
    )
    assert "dice" not in found and {"ece", "sce"} <= found.keys()


def test_a_batch_without_channels_is_one_line():
    metric = CalibrationMetric(CLASSES)
    with pytest.raises(ValueError, match=r"\(B, C, \*S\)"):
        metric(torch.tensor(1.0), torch.tensor(1))
