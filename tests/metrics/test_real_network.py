"""A real VOC network's report, against numbers computed the slow way on the same pixels."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import interpolate

from segcal import CalibrationMeter

IMAGES = 12


@pytest.fixture(scope="module")
def predictions(shared_data):
    """(N, 21, 257, 257) logits and (N, 257, 257) labels of the first images."""
    data = np.load(shared_data / "deeplabv3_voc_logits" / "val.npz", allow_pickle=False)
    logits = torch.from_numpy(data["logits33"][:IMAGES]).float().movedim(-1, 1)
    logits = interpolate(logits, size=(257, 257), mode="bilinear", align_corners=True)
    return logits, torch.from_numpy(data["labels"][:IMAGES])


def test_scores_of_a_real_network(predictions):
    logits, labels = predictions
    meter = CalibrationMeter(21)
    for z, y in zip(logits.split(5), labels.split(5), strict=True):
        meter.update(z, y)
    report = meter.compute()
    valid = labels != 255
    probs = logits.double().softmax(1).movedim(1, -1)[valid].numpy()  # (P, K)
    truth = labels[valid].numpy()
    confidence, predicted = probs.max(1), probs.argmax(1)
    correct = predicted == truth
    bins = np.ceil(confidence * 15) - 1
    gaps = [abs((confidence - correct)[bins == b].sum()) for b in range(15)]
    assert report.protocol.pixels == len(truth)
    assert report.accuracy == correct.mean()
    # The float32 of torch.softmax would be off by 4e-8: it loses small terms of its sums.
    assert report.ece == pytest.approx(sum(gaps) / len(truth), abs=1e-9)
    onehot = np.eye(21)[truth]
    assert report.brier == pytest.approx(((probs - onehot) ** 2).sum(1).mean(), abs=1e-9)
    nll = -np.log(probs[np.arange(len(truth)), truth])
    assert report.nll == pytest.approx(nll.mean(), rel=1e-9)
    # What docs/conventions.md says of the fine histogram.
    assert report.auroc == pytest.approx(roc_auc_score(correct, confidence), abs=1e-5)
