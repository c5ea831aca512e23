"""Labels of several raters count 1/R each."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.metrics.regions import boundary
from segcal.metrics.scores import SCORES
from segcal.pixels import each_rater

K, R, N, H, W = 4, 3, 5, 6, 7


def _batch(seed=0, *, multilabel=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(N, K, H, W, generator=generator)
    shape = (R, N, K, H, W) if multilabel else (R, N, H, W)
    labels = torch.randint(2 if multilabel else K, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.1] = 255
    return logits, labels


def _report(logits, labels, *, resamples=20, **settings):
    meter = segcal.CalibrationMeter(K, per_image=True, **settings)
    meter.update(logits, labels, names=list("abcde"))
    return meter.compute(resamples=resamples)


def _values(report):
    found = {name: np.asarray(getattr(report, name), float) for name in SCORES}
    for name, interval in report.intervals.items():
        found[f"{name} interval"] = np.array([interval.low, interval.high])
    return found


@pytest.mark.parametrize("multilabel", [False, True])
def test_equal_raters_give_the_scores_of_one(multilabel):
    logits, labels = _batch(multilabel=multilabel)
    one = _report(logits, labels[0], multilabel=multilabel)
    equal = labels[:1].expand(R, *labels.shape[1:])
    several = _report(logits, equal, multilabel=multilabel, raters=R)
    for name, value in _values(one).items():
        np.testing.assert_allclose(_values(several)[name], value, rtol=1e-9, atol=1e-12)
    assert several.protocol.pixels == one.protocol.pixels
    assert several.protocol.images == one.protocol.images == N
    assert several.images.table == one.images.table


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_sums_are_the_mean_of_those_of_each_rater(multilabel, tmp_path):
    logits, labels = _batch(multilabel=multilabel)
    report = _report(logits, labels, multilabel=multilabel, raters=R)
    parts = [_report(logits, one, multilabel=multilabel) for one in labels]

    def mean(of):
        return np.mean([of(part) for part in parts], 0)

    for of in (
        *(lambda r, i=i: r.top.sums[i] for i in range(3)),
        *(lambda r, i=i: r.classes.sums[i] for i in range(3)),
        *(lambda r, i=i: r.fine.sums[i] for i in range(3)),
        lambda r: r.class_fine.right,
        lambda r: r.confusion,
        lambda r: r.nll_sum,
        lambda r: r.brier_sum,
    ):
        np.testing.assert_allclose(of(report), mean(of), rtol=1e-9)
    report.save(tmp_path / "report.json")
    assert segcal.Report.load(tmp_path / "report.json") == report


def test_meters_of_raters_are_added_saved_and_read():
    logits, labels = _batch()
    whole = segcal.CalibrationMeter(K, raters=R)
    whole.update(logits, labels)
    parts = [segcal.CalibrationMeter(K, raters=R) for _ in range(2)]
    parts[0].update_probs(logits[:2].softmax(1), labels[:, :2])
    parts[1].update(logits[2:], labels[:, 2:])
    assert (parts[0] + parts[1]).compute().ece == pytest.approx(whole.compute().ece, rel=1e-6)
    with pytest.raises(ValueError, match="raters"):
        whole.update(logits, labels[:2])
    with pytest.raises(ValueError, match="raters"):
        whole.update(logits[:3], labels)
    with pytest.raises(ValueError, match="settings"):
        whole + segcal.CalibrationMeter(K)


@pytest.mark.parametrize("spec", ["nll+mdca", "svls+nacl", "dicece+ace"])
def test_a_loss_of_equal_raters_is_that_of_one(spec):
    logits, labels = _batch()
    one = segcal.build_loss(spec, ignore_index=255)
    several = segcal.build_loss(spec, ignore_index=255, raters=R)
    equal = labels[:1].expand(R, *labels.shape[1:])
    torch.testing.assert_close(several(logits, equal), one(logits, labels[0]))
    assert several.mass(equal) == R * one.mass(labels[0])


def test_a_loss_of_raters_is_the_mean_over_them():
    logits, labels = _batch()
    labels = labels % K  # none is ignored
    found = segcal.build_loss("fl", raters=R)(logits, labels)
    each = [segcal.build_loss("fl")(logits, one) for one in labels]
    torch.testing.assert_close(found, torch.stack(each).mean())
    with pytest.raises(ValueError, match="raters"):
        segcal.build_loss("fl", raters=R)(logits, labels[0])


@pytest.mark.parametrize("kind", [segcal.TemperatureScaling, segcal.LocalTemperatureScaling])
def test_a_calibrator_is_fitted_on_all_raters(kind):
    logits, labels = _batch()
    once = kind().fit(logits, labels[0])
    equal = kind().fit(*each_rater(logits, labels[:1].expand(R, -1, -1, -1)))
    assert equal.nll_before_ == pytest.approx(once.nll_before_, rel=1e-6)
    if kind is segcal.TemperatureScaling:
        assert equal.temperature_.item() == pytest.approx(once.temperature_.item(), rel=1e-6)


def _save(folder, logits, labels, **more):
    folder.mkdir(exist_ok=True)
    for i, one in enumerate(logits.numpy()):
        np.savez(folder / f"{i}.npz", logits=one, labels=labels[:, i].numpy(), **more)
    return folder


def test_saved_predictions_of_several_raters(tmp_path):
    logits, labels = _batch()
    whole = segcal.evaluate_source(
        segcal.open_source(_save(tmp_path / "test", logits, labels)),
        holdout=segcal.open_source(_save(tmp_path / "holdout", *_batch(1))),
        posthoc=["ts"],
        operate=["coverage=0.5"],
        conformal=["miss=0.6"],
        regions=["boundary:1", "foreground"],
        uncertainty=True,
        overlays="random",
        num_overlays=1,
        resamples=20,
    )
    report = whole.reports["none"]
    direct = [_report(logits, one) for one in labels]
    for r, expected in enumerate(direct):
        found = report.regions[f"rater {r + 1}"]
        assert found.ece == pytest.approx(expected.ece, rel=1e-9)
        assert found.aurc == pytest.approx(expected.aurc, rel=1e-9)
    pooled = _report(logits, labels, raters=R)
    assert report.ece == pytest.approx(pooled.ece, rel=1e-9)
    assert report.detection[0].correct.sum() == pytest.approx(pooled.fine.correct.sum())
    point = report.operating_points[0]
    assert 0 < point.coverage < 1

    y = labels.flatten(1).numpy()
    pairs = [
        (y[r] == y[s])[(y[r] != 255) & (y[s] != 255)] for r in range(R) for s in range(R) if r != s
    ]
    assert report.raters.ceiling == pytest.approx(np.concatenate(pairs).mean())
    two = (y != 255).sum(0) > 1
    same = [len({*column} - {255}) == 1 for column in y.T]
    assert report.raters.agreement == pytest.approx(np.mean(np.array(same)[two]))
    assert any("raters" in note for note in whole.notes)
    page = whole.save(tmp_path / "out")
    assert "Raters" in page.read_text()
    assert segcal.load_evaluation(tmp_path / "out").reports["none"] == report


def test_folders_of_several_raters(tmp_path):
    logits, labels = _batch()
    inside = segcal.open_source(_save(tmp_path / "inside", logits, labels))
    beside = tmp_path / "beside"
    for i, one in enumerate(logits.numpy()):
        beside.mkdir(exist_ok=True)
        np.savez(beside / f"{i}.npz", logits=one)
        for r in range(R):
            (tmp_path / f"rater{r}").mkdir(exist_ok=True)
            np.save(tmp_path / f"rater{r}" / f"{i}.npy", labels[r, i].numpy())
    folders = [tmp_path / f"rater{r}" for r in range(R)]
    source = segcal.open_source(beside, labels=folders)
    assert source.raters == inside.raters == R
    for one, other in zip(source, inside, strict=True):
        assert torch.equal(one.labels, other.labels)
    (beside / "manifest.yaml").write_text(
        f"labels: [{', '.join(f'../rater{r}' for r in range(R))}]"
    )
    assert segcal.open_source(beside).raters == R


def test_top_1_files_of_several_raters(tmp_path):
    logits, labels = _batch()
    confidence, predicted = logits.softmax(1).max(1)
    folders = [tmp_path / f"rater{r}" for r in range(R)]
    for folder in (*folders, tmp_path / "top"):
        folder.mkdir()
    for i in range(N):
        stored = (65535 * confidence[i]).round().numpy().astype(np.uint16)
        Image.fromarray(stored).save(tmp_path / "top" / f"{i}_conf.png")
        Image.fromarray(predicted[i].numpy().astype(np.uint8)).save(tmp_path / f"top/{i}_pred.png")
        for r, folder in enumerate(folders):
            Image.fromarray(labels[r, i].numpy().astype(np.uint8)).save(folder / f"{i}.png")
    source = segcal.open_source(tmp_path / "top", labels=folders, num_classes=K)
    report = segcal.evaluate_source(source, overlays="none", resamples=0).reports["none"]
    assert report.accuracy == pytest.approx(_report(logits, labels, raters=R).accuracy)
    assert report.raters is not None


def test_one_hot_labels_are_not_raters(tmp_path):
    logits, labels = _batch()
    one_hot = torch.nn.functional.one_hot(labels[0] % K, K).movedim(-1, 0)
    with pytest.raises(ValueError, match="one-hot"):
        segcal.open_source(_save(tmp_path / "a", logits, one_hot))[0]
    assert math.isnan(segcal.CalibrationMeter(K, raters=R).compute().ece)


def test_volumes_of_several_raters(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 4, 5, 6, generator=generator)
    labels = torch.randint(2, (R, 1, 4, 5, 6), generator=generator)
    source = segcal.open_source(_save(tmp_path / "a", logits, labels))
    report = segcal.evaluate_source(source, regions=["boundary:1"], resamples=0).reports["none"]
    inside = [boundary(1)(one) for one in labels]
    assert report.regions["boundary:1"].protocol.pixels == round(
        float(sum(map(torch.sum, inside))) / R
    )
