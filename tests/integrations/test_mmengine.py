"""The metric for mmengine's evaluator, with data samples as mmsegmentation makes them."""

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement, PixelData

from segcal.integrations.mmengine import CalibrationMetric
from segcal.metrics import CalibrationMeter
from segcal.pixels import scores_to_probs
from tests.support.framework_batches import CLASSES, assert_same, batches, report_of


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
    assert_same(metric.report, report_of(data, per_image=True, num_bins=5))


def test_a_binary_model_gives_one_sigmoid_output():
    probs = torch.rand(1, 1, 8, 6, generator=torch.Generator().manual_seed(0))
    labels = (probs[:, 0] > 0.4).long()
    metric = CalibrationMetric(2)
    metric.process(None, [sample.to_dict() for sample in samples(probs, labels)])
    metric.evaluate(1)
    meter = CalibrationMeter(2)
    meter.update_probs(torch.cat([1 - probs, probs], 1), labels)
    assert_same(metric.report, meter.compute())


def mask_scores(seed=0):
    """Scores as MaskFormer's: Σ over queries of softmax(class) · sigmoid(mask), in 0..1.5."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randn(5, CLASSES + 1, generator=generator).softmax(1)[:, :CLASSES]
    masks = torch.randn(2, 5, 8, 6, generator=generator).sigmoid() / 2
    return torch.einsum("qc,nqhw->nchw", classes, masks)


def test_a_pixel_that_no_query_covers_has_equal_probabilities():
    scores = torch.tensor([[[0.0, 0.3], [0.0, 0.1]]])
    torch.testing.assert_close(scores_to_probs(scores), torch.tensor([[[0.5, 0.75], [0.5, 0.25]]]))


@pytest.mark.parametrize("outputs", [None, "scores"])
def test_scores_of_a_mask_head_are_divided_by_their_sum(outputs, caplog):
    scores, (_, labels) = mask_scores(), batches(1)[0]
    assert (scores.sum(1) - 1).abs().max() > 0.1
    metric = CalibrationMetric(CLASSES, outputs=outputs)
    metric.process(None, [sample.to_dict() for sample in samples(scores, labels)])
    metric.evaluate(2)
    meter = CalibrationMeter(CLASSES)
    meter.update_probs(scores / scores.sum(1, keepdim=True), labels)
    assert metric.report.ece == pytest.approx(meter.compute().ece, rel=1e-9)
    assert metric.report.nll == pytest.approx(meter.compute().nll, rel=1e-6)
    assert caplog.text.count("taken for scores") == (outputs is None)  # said once, not per image


def test_logits_are_counted_as_logits_if_stated_or_beyond_the_range(caplog):
    scores, (logits, labels) = mask_scores(), batches(1)[0]
    for values, outputs in [(scores, "logits"), (logits, None)]:
        metric = CalibrationMetric(CLASSES, outputs=outputs)
        metric.process(None, [sample.to_dict() for sample in samples(values, labels)])
        metric.evaluate(2)
        expected = report_of([(values, labels)])
        assert metric.report.ece == pytest.approx(expected.ece, rel=1e-9)
    assert "scores" not in caplog.text
    with pytest.raises(ValueError, match="outputs"):
        CalibrationMetric(CLASSES, outputs="masks")
