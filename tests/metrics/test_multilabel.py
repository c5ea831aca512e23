"""Sigmoid outputs are K two-class problems: the meter counts each of them as it counts softmax."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error, binary_jaccard_index

from segcal import CalibrationMeter, Report
from segcal.metrics import counting, meter, paired_differences, update_together
from segcal.metrics.scores import SCORES
from tests.support import metric_oracles as oracle
from tests.support.loss_batches import multilabel_batch
from tests.support.ranks import run_on_ranks
from tests.support.states import restated

K = 3


@pytest.fixture(params=["compiled", "torch"])
def counted_by(request):
    """For laws of counting, which hold for both passes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(counting, "counting_pass", lambda device_type: counting.count_in_torch)
        else:
            assert counting.counting_pass("cpu") is counting.count_compiled
        yield request.param


def batch(n=5, space=(6, 7), k=K):
    logits, labels = multilabel_batch(*space, n=n, k=k)
    return 2 * logits, labels


def measured(logits, labels, **settings):
    found = CalibrationMeter(logits.shape[1], multilabel=True, **settings)
    found.update(logits, labels)
    return found


def assert_same(a, b, tolerance=1e-12):
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("space", [(), (6, 7), (2, 3, 4)])
def test_equals_the_definition(space):
    logits, labels = batch(5 if space else 60, space)
    probs = logits.sigmoid()
    report = measured(logits, labels).compute()
    top, every = [[] for _ in range(15)], []
    for c in range(K):
        pair = torch.stack([1 - probs[:, c], probs[:, c]], 1)
        problem, classes, confusion = oracle.tables(pair, labels[:, c])
        assert report.classes.count[c].tolist() == [len(b) for b in classes[1]]
        assert report.classes.hits[c].tolist() == [sum(h for _, h in b) for b in classes[1]]
        assert report.class_ece[c] == pytest.approx(oracle.ece(classes[1]), abs=1e-12)
        assert report.confusion[c].tolist() == confusion
        (_, wrong), (missed, right) = confusion
        assert report.class_iou[c] == pytest.approx(right / (right + wrong + missed))
        assert report.class_dice[c] == pytest.approx(2 * right / (2 * right + wrong + missed))
        top = [a + b for a, b in zip(top, problem, strict=True)]
        every.append((oracle.nll(pair, labels[:, c]), oracle.brier(pair, labels[:, c])))
    decisions = (labels != 255).flatten(2).sum((0, 2)).tolist() if space else None
    decisions = decisions or (labels != 255).sum(0).tolist()
    assert report.top.count.tolist() == [len(b) for b in top]
    assert report.class_fine.accepted[:, 0].tolist() == report.confusion[:, :, 1].sum(1).tolist()
    assert report.class_fine.right[:, 0].tolist() == report.confusion[:, 1, 1].tolist()
    assert report.protocol.pixels == sum(decisions) and report.protocol.images == len(logits)
    assert report.protocol.average == "decision"
    assert report.ece == pytest.approx(oracle.ece(top), abs=1e-12)
    assert report.sce == pytest.approx(report.class_ece.mean(), abs=1e-12)
    assert report.miou == pytest.approx(report.class_iou.mean(), abs=1e-12)
    nll, brier = (np.average(values, weights=decisions) for values in zip(*every, strict=True))
    assert (report.nll, report.brier) == pytest.approx((nll, brier), abs=1e-12)


def exclusive(logits, labels):
    """Two classes of a softmax as two sigmoid outputs of which one is present."""
    margin = logits[:, 1] - logits[:, 0]
    other = torch.where(labels == 255, 255, 1 - labels)
    return torch.stack([-margin, margin], 1), torch.stack([other, labels], 1)


def two_classes():
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(9, 2, 5, 6, generator=generator, dtype=torch.float64)
    labels = (logits[:, 1] + torch.randn(9, 5, 6, generator=generator) > logits[:, 0]).long()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = 255
    return logits, labels


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("probs", [False, True])
def test_two_exclusive_classes_are_a_softmax_of_two(probs):
    """In every score, in every interval, and in the worst images."""
    logits, labels = two_classes()
    softmax, sigmoid = (CalibrationMeter(2, per_image=True, multilabel=m) for m in (False, True))
    z, y = exclusive(logits, labels)
    if probs:
        softmax.update_probs(logits.softmax(1), labels)
        sigmoid.update_probs(z.sigmoid(), y)
    else:
        softmax.update(logits, labels)
        sigmoid.update(z, y)
    a, b = sigmoid.compute(), softmax.compute()
    assert a.protocol.pixels == 2 * b.protocol.pixels
    # Terms of 1/n, and n is twice as large; of sigmoid outputs no class is background.
    others = {"aurc", "augrc", "prr", "foreground_dice", "foreground_ace"}
    for name in set(SCORES) - others:
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-6, nan_ok=True), name
    assert (a.aurc, a.prr) == pytest.approx((b.aurc, b.prr), abs=2e-3)
    for name in b.intervals.keys() - others:
        interval, got = b.intervals[name], a.intervals[name]
        assert (got.low, got.high) == pytest.approx((interval.low, interval.high), abs=1e-6), name
    assert [i.name for i in a.worst_images] == [i.name for i in b.worst_images]
    assert a.images.class_ace == pytest.approx(b.images.class_ace, abs=1e-6)


def test_one_output_is_the_binary_problem():
    logits, labels = two_classes()
    margin = (logits[:, 1] - logits[:, 0]).unsqueeze(1)
    found, same = (measured(margin, y).compute() for y in (labels, labels.unsqueeze(1)))
    assert found == same and found.protocol.num_classes == 1
    pair = CalibrationMeter(2)
    pair.update(torch.cat([0 * margin, margin], 1), labels)
    pair = pair.compute()
    np.testing.assert_array_equal(found.classes.count[0], pair.classes.count[1])
    assert (found.ece, found.nll, found.smece) == (pair.ece, pair.nll, pair.smece)
    assert found.confusion[0].tolist() == pair.confusion.tolist()
    assert found.class_ece[0] == pair.class_ece[1]


def test_agrees_with_torchmetrics():
    """Its binary calibration error is the class-j-ECE, with bins [lo, hi)."""
    logits, labels = batch(20)
    report = measured(logits, labels, edge_rule="left").compute()
    for c in range(K):
        known = labels[:, c] != 255
        p, y = logits[:, c].sigmoid()[known], labels[:, c][known]
        expected = binary_calibration_error(p, y, n_bins=15, norm="l1")
        assert report.class_ece[c] == pytest.approx(float(expected), abs=1e-6)
        assert report.class_iou[c] == pytest.approx(float(binary_jaccard_index(p, y)), abs=1e-6)


def test_ignored_labels_are_of_their_class_alone():
    logits, labels = batch()
    labels[:, 1] = 255
    logits[:, 1] = torch.nan
    report = measured(logits, labels, per_image=True).compute()
    others = measured(logits[:, ::2], labels[:, ::2], per_image=True).compute()
    for name in (name for name in SCORES if not name.startswith("class_")):
        assert getattr(report, name) == pytest.approx(
            getattr(others, name), rel=1e-12, nan_ok=True
        ), name
    assert np.isnan(report.class_ece[1]) and np.isnan(report.class_iou[1])
    assert report.class_ece[::2].tolist() == others.class_ece.tolist()
    assert report.intervals == others.intervals
    unknown = report.images.class_intervals["class_ece"][1]
    assert (unknown.low, unknown.high) == (0, 1)
    assert Report.from_dict(report.to_dict()) == report


def test_an_image_counts_if_any_decision_does():
    logits, labels = batch(4)
    labels[0], labels[1, 1:], labels[2, :-1] = 255, 255, 255
    report = measured(logits, labels, per_image=True).compute()
    assert report.protocol.images == 3
    assert "image 0" not in [image.name for image in report.worst_images]


def test_probabilities_are_the_sigmoids():
    logits, labels = batch()
    found = CalibrationMeter(K, multilabel=True, per_image=True)
    found.update_probs(logits.sigmoid(), labels)
    assert_same(found, measured(logits, labels, per_image=True), 1e-10)


def test_half_is_absent():
    """As sklearn and torchmetrics have it: a class is predicted above p = 0.5."""
    report = measured(torch.zeros(1, 1, 2), torch.tensor([[[0, 1]]])).compute()
    assert report.confusion.tolist() == [[[1, 0], [1, 0]]]


@pytest.mark.parametrize("per_image", [False, True])
def test_streamed_is_merged_is_loaded_is_one_shot(tmp_path, per_image):
    logits, labels = batch(7)
    whole = measured(logits, labels, per_image=per_image)
    streamed = CalibrationMeter(K, multilabel=True, per_image=per_image)
    merged = CalibrationMeter(K, multilabel=True, per_image=per_image)
    for part in (slice(0, 2), slice(2, 2), slice(2, 7)):
        streamed.update(logits[part], labels[part])
        merged += measured(logits[part], labels[part], per_image=per_image)
    assert_same(streamed, whole)
    assert_same(merged, whole)
    whole.save(tmp_path / "meter.npz")
    loaded = CalibrationMeter.load(tmp_path / "meter.npz")
    assert_same(loaded, whole, 0)
    assert loaded.compute() == whole.compute()
    whole.compute().save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == whole.compute()


def _share(rank):
    logits, labels = batch(7)
    mine = slice(0, 5) if rank == 0 else slice(5, 7)
    found = CalibrationMeter(K, multilabel=True, per_image=True)
    found.update(logits[mine], labels[mine], names=[f"image{i}" for i in range(7)[mine]])
    return found.sync().state_dict()


@pytest.mark.slow
def test_over_ranks_is_one_shot():
    logits, labels = batch(7)
    whole = CalibrationMeter(K, multilabel=True, per_image=True)
    whole.update(logits, labels, names=[f"image{i}" for i in range(7)])
    for state in run_on_ranks(_share):
        synced = CalibrationMeter(K, multilabel=True, per_image=True)
        synced.load_state_dict(restated(state, synced=False))
        assert_same(synced, whole)


def test_masks_are_of_decisions():
    logits, labels = batch()
    inside = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    meters = [CalibrationMeter(K, multilabel=True, per_image=True) for _ in range(3)]
    update_together(meters, logits, labels, inside=[None, inside, ~inside])
    assert_same(meters[0], measured(logits, labels, per_image=True))
    for found, mask in zip(meters[1:], (inside, ~inside), strict=True):
        assert_same(found, measured(logits, labels.masked_fill(~mask, 255), per_image=True))


def test_paired_differences_of_exclusive_classes_are_those_of_the_softmax():
    logits, labels = two_classes()
    found = []
    for multilabel in (False, True):
        models = []
        for sharpness in (1, 3):
            model = CalibrationMeter(2, per_image=True, multilabel=multilabel)
            z = logits * sharpness
            model.update(*(exclusive(z, labels) if multilabel else (z, labels)))
            models.append([model])
        found.append(paired_differences(*models))
    for name, difference in found[0].items():
        other = found[1][name]
        assert (other.value, other.low, other.high) == pytest.approx(
            (difference.value, difference.low, difference.high), abs=1e-6, nan_ok=True
        )


BAD = {
    "nan": (
        lambda z, y: z[1, 2, 3, 4].fill_(torch.nan),
        r"finite logits, .* got nan at image 1 of the batch, pixel \(3, 4\), class 2",
    ),
    "inf": (lambda z, y: z[0, 1, 5, 6].fill_(torch.inf), r"got inf at image 0 .* class 1"),
    "-inf": (
        lambda z, y: (z[2, 0, 1, 1].fill_(-torch.inf), y[2, 0, 1, 1].fill_(1)),
        r"finite NLL .* got -inf at image 2 .* \(1, 1\), class 0",
    ),
    "label": (
        lambda z, y: y[3, 1, 0, 2].fill_(2),
        r"labels in 0..1 .* but got 2 in 1 pixel, first at image 3 .* \(0, 2\), class 1",
    ),
}


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("name", BAD)
def test_failed_update_changes_nothing(name):
    spoil, message = BAD[name]
    found = measured(*batch(), per_image=True)
    before = found.compute()
    logits, labels = batch()
    labels[labels == 255] = 0
    spoil(logits, labels)
    with pytest.raises(ValueError, match=message):
        found.update(logits, labels)
    assert found.compute() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_are_checked_one_by_one(dtype):
    logits, labels = batch()
    found = CalibrationMeter(K, multilabel=True)
    with pytest.raises(ValueError, match=r"probabilities in 0..1, but got .* class .*update\(\)"):
        found.update_probs(logits.to(dtype), labels)
    found.update_probs(logits.sigmoid().to(dtype), labels)
    assert found.compute().ece == pytest.approx(measured(logits, labels).compute().ece, abs=0.02)


def test_a_masked_class_that_is_absent_counts():
    report = measured(torch.tensor([[-torch.inf, 3.0]]), torch.tensor([[0, 1]])).compute()
    assert report.classes.count[0, 0] == 1 and report.accuracy == 1


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="num_classes must be an integer >= 1"):
        CalibrationMeter(0, multilabel=True)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\), but got \(2, 4\)"):
        CalibrationMeter(3, multilabel=True).update(
            torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64)
        )
    with pytest.raises(ValueError, match="multilabel True and False"):
        CalibrationMeter(3, multilabel=True) + CalibrationMeter(3)
    with pytest.raises(ValueError, match="multilabel"):
        CalibrationMeter(3).load_state_dict(CalibrationMeter(3, multilabel=True).state_dict())


def test_bad_batch_on_an_accelerator_adds_nothing_and_is_reported(monkeypatch):
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: counting.count_in_torch)
    monkeypatch.setattr(meter, "_can_look", lambda tensor: False)
    found = measured(*batch(), per_image=True)
    before = found.state_dict()
    logits, labels = batch()
    labels[labels == 255] = 0
    logits[1, 2, 2, 4] = torch.nan
    found.update(logits, labels)
    with pytest.raises(ValueError, match=r"labels in 0..1 or 255, .* 1 pixels with logits not"):
        found.compute()
    after = found.state_dict()
    for name in before:
        if name not in ("faults", "about") and not name.startswith("image."):
            assert torch.equal(before[name], after[name]), name
    assert not after["image.class_gap"][5:].any()
