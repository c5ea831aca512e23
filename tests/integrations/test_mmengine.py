"""The metric for mmengine's evaluator, with data samples as mmsegmentation makes them."""

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement, PixelData

from segcal.integrations.mmengine import CalibrationMetric
from segcal.metrics import CalibrationMeter
from tests.support.framework_batches import CLASSES, batches, report_of


def samples(logits, labels, name="image"):
    """What a segmentor of mmsegmentation gives for a batch: SegDataSample is such an element."""
    made = []
    for i, (values, label) in enumerate(zip(logits, labels, strict=True)):
        sample = BaseDataElement(metainfo={"img_path": f"{name}{i}.png"})
        sample.seg_logits = PixelData(data=values)
        sample.pred_sem_seg = PixelData(data=values.argmax(0, keepdim=True))
        sample.gt_sem_seg = PixelData(data=label[None])
        made.append(sample)
    return made


def test_the_evaluator_builds_it_by_name_and_starts_again():
    config = {"type": "CalibrationMetric", "num_classes": CLASSES, "scores": ["ece", "miou"]}
    evaluator = Evaluator([config])
    for seed in (0, 1):
        data = batches(seed=seed)
        for logits, labels in data:
            evaluator.process(samples(logits, labels))
        report = report_of(data)
        assert evaluator.evaluate(6) == {
            "calibration/ece": pytest.approx(report.ece, rel=1e-9),
            "calibration/miou": pytest.approx(report.miou, rel=1e-9),
        }


def test_images_have_their_names_and_options_reach_the_meter():
    metric = CalibrationMetric(CLASSES, per_image=True, num_bins=5, prefix="val")
    ((logits, labels),) = data = batches(1)
    metric.process(None, [sample.to_dict() for sample in samples(logits, labels)])
    assert "val/ece" in metric.evaluate(2)
    assert metric.report.images is not None
    assert {image.name for image in metric.report.worst_images} == {"image0.png", "image1.png"}
    assert metric.report.image_ece == report_of(data, per_image=True, num_bins=5).image_ece


def test_a_binary_model_gives_one_sigmoid_output():
    probs = torch.rand(1, 1, 8, 6, generator=torch.Generator().manual_seed(0))
    labels = (probs[:, 0] > 0.4).long()
    metric = CalibrationMetric(2)
    metric.process(None, [sample.to_dict() for sample in samples(probs, labels)])
    metric.evaluate(1)
    meter = CalibrationMeter(2)
    meter.update_probs(torch.cat([1 - probs, probs], 1), labels)
    assert metric.report == meter.compute()
