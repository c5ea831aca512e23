"""Top-1 files: the predicted class and its confidence as two PNG files of each image."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.folder import load_evaluation
from segcal.files import BadFile
from segcal.metrics import CalibrationMeter, counting
from segcal.metrics.scores import NEED_ALL_CLASSES, SCORES
from segcal.sources import open_source
from segcal.sources.members import Members

C, H, W, IMAGES = 5, 24, 32, 6
EXACT = ("accuracy", "miou", "dice")  # they do not look at the confidence


def write(folder, bits, *, images=IMAGES, seed=0):
    """The same predictions as logits and as top-1 files; (confidence, right) of the latter."""
    rng = np.random.default_rng(seed)
    top = 2**bits - 1
    rounded, right = [], []
    for place in ("logits", "top", "labels"):
        (folder / place).mkdir()
    for i in range(images):
        labels = rng.integers(0, C, (H, W)).astype(np.uint8)
        logits = rng.normal(size=(C, H, W)) + 2.5 * np.eye(C)[labels].transpose(2, 0, 1)
        labels[:3] = 255
        probs = torch.from_numpy(logits).softmax(0).numpy()
        predicted, confidence = probs.argmax(0).astype(np.uint8), probs.max(0)
        stored = np.round(confidence * top).astype(np.uint8 if bits == 8 else np.uint16)
        predicted[0] = 200  # where the label is ignored, it may be anything
        np.savez(folder / "logits" / f"im{i}.npz", logits=logits, labels=labels)
        Image.fromarray(predicted).save(folder / "top" / f"im{i}_pred.png")
        Image.fromarray(stored).save(folder / "top" / f"im{i}_conf.png")
        Image.fromarray(labels).save(folder / "labels" / f"im{i}.png")
        rounded.append((stored / top)[labels != 255])
        right.append((predicted == labels)[labels != 255])
    return np.concatenate(rounded), np.concatenate(right)


def opened(folder, **stated):
    return open_source(folder / "top", labels=folder / "labels", num_classes=C, **stated)


@pytest.mark.parametrize("bits", [8, 16])
def test_scores_are_those_of_logits_files_within_the_bit_depth(tmp_path, bits):
    confidence, right = write(tmp_path, bits)
    whole = evaluate_source(
        open_source(tmp_path / "logits"), regions=("boundary:2",), overlays="none"
    )
    found = evaluate_source(opened(tmp_path), regions=("boundary:2",), overlays="none")
    ours, theirs = found.reports["none"], whole.reports["none"]
    step = 0.5 / (2**bits - 1)
    (our_part,), (their_part,) = ours.regions.values(), theirs.regions.values()
    for mine, all_classes in ((ours, theirs), (our_part, their_part)):
        np.testing.assert_array_equal(mine.confusion, all_classes.confusion)
        for name in EXACT:
            assert getattr(mine, name) == getattr(all_classes, name)
        for name in ("mean_confidence", "ks"):
            assert abs(getattr(mine, name) - getattr(all_classes, name)) <= step * 1.01
    # Independent: the 15 bins in numpy, of the rounded confidence.
    bins = np.maximum(np.ceil(confidence * 15 - 1e-9).astype(int) - 1, 0)
    gaps = np.bincount(bins, confidence - right, 15)
    assert ours.ece == pytest.approx(np.abs(gaps).sum() / len(right), abs=1e-6)
    worst = np.abs(gaps)[np.bincount(bins, minlength=15) > 0]
    counts = np.bincount(bins, minlength=15)
    assert ours.mce == pytest.approx((worst / counts[counts > 0]).max(), abs=1e-6)
    # Rounding moves a confidence by half a step, and pixels so close to an edge to the next bin.
    edges = np.abs(confidence[:, None] - np.arange(16) / 15).min(1) <= step
    for name in ("ece", "overconfidence", "adaptive_ece", "smece", "auroc", "aurc"):
        assert abs(getattr(ours, name) - getattr(theirs, name)) <= step + 2 * edges.mean(), name
    assert {"accuracy", "miou", "ece"} <= ours.intervals.keys()
    assert not ours.intervals.keys() & set(NEED_ALL_CLASSES)
    assert [image.name for image in ours.worst_images] == [
        image.name for image in theirs.worst_images
    ]


def test_other_scores_need_all_classes_and_it_is_said_once(tmp_path):
    write(tmp_path, 8)
    evaluation = evaluate_source(opened(tmp_path), protocols=("image",), num_overlays=1)
    report = evaluation.reports["none"]
    unknown = {name for name in SCORES if np.isnan(getattr(report, name)).all()}
    assert unknown == {*NEED_ALL_CLASSES, "mask_changed"} and report.top_only
    assert np.isnan(report.protocols["image"]["sce"])
    page = evaluation.save(tmp_path / "out").read_text()
    for text in (page, (tmp_path / "out" / "table.md").read_text()):
        assert text.count("need all classes") == 1
    assert json.loads((tmp_path / "out" / "report.json").read_text())["scores"]["nll"] is None
    assert load_evaluation(tmp_path / "out").reports["none"] == report


def test_thresholds_are_chosen_and_checked(tmp_path):
    write(tmp_path, 16)
    (tmp_path / "other").mkdir()
    confidence, right = write(tmp_path / "other", 16, seed=1)
    found = evaluate_source(
        opened(tmp_path / "other"), holdout=opened(tmp_path), operate=["accuracy=0.95"]
    )
    point = found.reports["none"].operating_points[0]
    taken = confidence > point.threshold
    assert 0 < point.coverage < 1
    assert point.coverage == pytest.approx(taken.mean(), abs=1e-12)
    assert point.accuracy == pytest.approx(right[taken].mean(), abs=1e-12)


def test_both_passes_count_alike(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, C, H, W, generator=generator)
    top = torch.zeros_like(probs).scatter(1, probs.argmax(1, True), probs.amax(1, True))
    labels = torch.randint(0, C, (3, H, W), generator=generator)

    def count():
        meter = CalibrationMeter(C, top_only=True, per_image=True)
        meter.update_probs(top, labels)
        with pytest.raises(ValueError, match="Expected prob"):
            meter.update_probs(probs + 0.4, labels)
        return meter.compute()

    compiled = count()
    monkeypatch.setattr(counting, "compiled", lambda: None)
    plain = count()
    np.testing.assert_array_equal(compiled.top.count, plain.top.count)
    np.testing.assert_array_equal(compiled.confusion, plain.confusion)
    assert compiled.ece == pytest.approx(plain.ece, abs=1e-12)


def test_what_cannot_be_done_is_refused(tmp_path):
    write(tmp_path, 8)
    source, whole = opened(tmp_path), open_source(tmp_path / "logits")
    for options in ({"posthoc": ["ts"]}, {"conformal": [0.1]}, {"uncertainty": True}):
        with pytest.raises(ValueError, match="need all classes"):
            evaluate_source(source, holdout=whole, **options)
    with pytest.raises(ValueError, match="both"):
        evaluate_source(source, holdout=whole, operate=["accuracy=0.9"])
    with pytest.raises(ValueError, match="members need all classes"):
        Members([source, source])
    with pytest.raises(ValueError, match="state num_classes"):
        open_source(tmp_path / "top", labels=tmp_path / "labels")
    pred, conf = (tmp_path / "top" / f"im0_{what}.png" for what in ("pred", "conf"))
    Image.open(pred).resize((W // 2, H // 2)).save(pred)
    with pytest.raises(BadFile, match="size"):
        source[0]
    Image.open(conf).resize((W // 2, H // 2)).save(conf)
    with pytest.raises(BadFile, match="size of the labels"):
        source[0]
    Image.fromarray(np.full((H, W), C, np.uint8)).save(pred)
    Image.fromarray(np.zeros((H, W, 3), np.uint8)).save(conf)
    with pytest.raises(BadFile, match="grey"):
        source[0]
    Image.fromarray(np.zeros((H, W), np.uint8)).save(conf)
    with pytest.raises(BadFile, match="predicted class"):
        source[0]
    conf.unlink()
    with pytest.raises(BadFile, match="im0_conf.png"):
        source[0]
