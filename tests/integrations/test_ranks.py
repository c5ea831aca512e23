"""Adapters whose framework runs on several ranks: uneven shares give what one rank gives."""

import pytest
import torch

from tests.support.framework_batches import CLASSES, batches, report_of
from tests.support.ranks import run_on_ranks

IMAGES = 5  # rank 0 has images 0, 2, 4, rank 1 has 1 and 3


def _images():
    return [
        (logits[None], label[None])
        for pair in batches(IMAGES, images=1)
        for logits, label in zip(*pair, strict=True)
    ]


def _on_rank(rank):
    from mmengine.evaluator import Evaluator
    from mmengine.structures import BaseDataElement, PixelData

    from segcal.integrations.mmengine import CalibrationMetric as ForMmengine
    from segcal.integrations.monai import CalibrationMetric as ForMonai
    from segcal.integrations.torchmetrics import CalibrationMetric as ForTorchmetrics

    options = {"per_image": True, "scores": ("ece", "image_ece")}
    data = _images()
    torchmetrics = ForTorchmetrics(CLASSES, **options)
    monai = ForMonai(CLASSES, **options)
    for logits, labels in data[rank::2]:
        torchmetrics.update(logits, labels)
        monai(logits, labels[:, None])
    mmengine = Evaluator(ForMmengine(CLASSES, **options))
    for logits, labels in [*data, data[0]][rank::2]:  # as its sampler does it
        sample = BaseDataElement()
        sample.seg_logits, sample.gt_sem_seg = PixelData(data=logits[0]), PixelData(data=labels)
        mmengine.process([sample])
    return {
        "torchmetrics": torchmetrics.compute(),
        "monai": monai.aggregate(),
        "mmengine": mmengine.evaluate(IMAGES),
        "low": torchmetrics.report().intervals["ece"].low,
        "own": int(torchmetrics.sum_images),
    }


def test_ranks_together_count_every_image_once():
    report = report_of(_images(), per_image=True)
    for rank, found in enumerate(run_on_ranks(_on_rank)):
        for framework in ("torchmetrics", "monai", "mmengine"):
            prefix = "calibration/" if framework == "mmengine" else ""
            for score in ("ece", "image_ece"):
                value = torch.as_tensor(found[framework][prefix + score]).item()
                assert value == pytest.approx(getattr(report, score), rel=1e-6), framework
        assert found["low"] == pytest.approx(report.intervals["ece"].low, rel=1e-6)
        assert found["own"] == (3, 2)[rank]  # torchmetrics gives a rank its own sums back
