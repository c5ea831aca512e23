"""Evaluations under shift: the images are the changed ones, and what is stored is made once."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.data import build
from segcal.data.shift import Shift
from segcal.evaluation import shifts as shifting
from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.folder import load_evaluation, place
from segcal.evaluation.states import compare_states
from segcal.sources.network import RunSource

QUICK = {"resamples": 0, "overlays": "none"}


@pytest.fixture
def digits(runs):
    return RunSource(runs / "digits", workers=0)


@pytest.fixture
def seg(runs):
    return RunSource(runs / "seg", workers=0)


@pytest.fixture
def passes(monkeypatch):
    """The names of the passes over shifted images."""
    made = []
    measured = shifting.measure

    def measure(source, *arguments, **options):
        made.append(source.name)
        return measured(source, *arguments, **options)

    monkeypatch.setattr(shifting, "measure", measure)
    return made


def test_rotated_digits(digits):
    found = evaluate_source(digits, posthoc=["ts"], shifts=["rotation:45"], **QUICK)
    data = build(replace(digits.data_config, rotation=45.0))
    pairs = [data.test[i] for i in range(len(data.test))]
    images, labels = zip(*pairs, strict=True)
    loader = [(torch.stack(images), torch.stack(labels))]
    for method in ("none", "ts"):
        expected = segcal.evaluate(
            digits.model,
            loader,
            num_classes=10,
            progress=False,
            transform=found.calibrators.get(method),
        )
        assert found.reports[method, "rotation:45"].nll == pytest.approx(expected.nll)
    alone = evaluate_source(digits, posthoc=["ts"], **QUICK)
    for method in ("none", "ts"):  # the clean images and the hold-out stay as they were
        assert found.reports[method] == alone.reports[method]


@pytest.mark.parametrize("shift", ["gaussian_noise:3", "fog:5", "jpeg:1"])
def test_shifted_files_give_the_same_scores(shift, seg, tmp_path, runs):
    """The changed images as PNG files, brought by data:ROOT, and the shift agree."""
    other = shutil.copytree(runs / "data", tmp_path / "other")
    name, _, severity = shift.partition(":")
    for image in seg.names:
        path = other / "test" / "images" / f"{image}.png"
        changed = Shift(name, int(severity)).apply(np.asarray(Image.open(path)), key=image)
        Image.fromarray(changed).save(path)
    shutil.rmtree(other / "train")  # a folder of shifted images needs its test part alone
    brought = Shift("data", str(other))
    found = evaluate_source(seg, posthoc=["ts"], shifts=[shift, brought], **QUICK)
    for method in ("none", "ts"):
        assert found.reports[method, shift] == found.reports[method, str(brought)]
        assert found.reports[method, shift].ece != found.reports[method].ece


def test_what_is_kept_is_not_made_again(seg, passes, tmp_path):
    def evaluated(*shifts, source=seg, **options):
        passes.clear()
        found = evaluate_source(source, shifts=shifts, cache=tmp_path, **{**QUICK, **options})
        return found, [name.partition(", ")[2] for name in passes]

    first, made = evaluated("fog:2,4")
    assert made == ["fog:2", "fog:4"]
    again, made = evaluated("snow,fog:4")
    assert made == ["snow:3"]
    assert again.reports["none", "fog:4"] == first.reports["none", "fog:4"]
    both, made = evaluated("fog:4", posthoc=["ts"])
    assert made == ["fog:4"]  # for ts alone
    assert both.reports["none", "fog:4"] == first.reports["none", "fog:4"]
    for options in (
        {"num_bins": 10},
        {"resamples": 5},
        {"source": RunSource(seg.folder, weights="last", workers=0)},
    ):
        assert evaluated("fog:4", **options)[1] == ["fog:4"], options
        assert evaluated("fog:4", **options)[1] == [], options
    assert evaluated("fog:4", source=seg.limited(3))[1] == ["fog:4"]
    _, made = evaluated("fog:2")
    assert made == []
    (tmp_path / place("none", "fog:2") / "report.json").unlink()  # was killed while it wrote
    assert evaluated("fog:2")[1] == ["fog:2"]


def test_what_was_saved_is_found_again(seg, passes, tmp_path, undrawn):
    options = {**QUICK, "resamples": 10}
    found = evaluate_source(seg, posthoc=["ts"], shifts=["fog:1,5"], cache=tmp_path, **options)
    found.save(tmp_path)
    passes.clear()
    again = evaluate_source(seg, posthoc=["ts"], shifts=["fog:1,5"], cache=tmp_path, **options)
    under_shift = [key for key in found.reports if isinstance(key, tuple)]
    assert passes == [] and again.reports.keys() == found.reports.keys()
    assert all(again.reports[key] == found.reports[key] for key in under_shift)
    kept = load_evaluation(tmp_path)
    assert kept.shifts == ["fog:1", "fog:5"] and kept.reports == found.reports
    for key, report in kept.reports.items():
        assert kept.meters[key].compute(resamples=0).ece == report.ece
    (rows,) = compare_states([tmp_path, tmp_path / "ts"], shift=True, resamples=10).values()
    expected = kept.reports["ts", "fog:5"].ece - kept.reports["none", "fog:5"].ece
    assert rows["fog:5"]["ece"].value == pytest.approx(expected)
    rows = (tmp_path / "shift.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4
    evaluate_source(seg, **QUICK).save(tmp_path)  # without shifts: their tables go, not the cache
    assert not (tmp_path / "shift.csv").exists() and (tmp_path / "fog-1").is_dir()
    assert load_evaluation(tmp_path).shifts == []


def test_changed_files_are_evaluated_again(runs, seg, passes, tmp_path):
    other = shutil.copytree(runs / "data", tmp_path / "other")
    shift = Shift("data", str(other))
    for _ in range(2):
        evaluate_source(seg, shifts=[shift], cache=tmp_path / "out", **QUICK)
    assert len(passes) == 1
    path = other / "test" / "images" / "test0.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    evaluate_source(seg, shifts=[shift], cache=tmp_path / "out", **QUICK)
    assert len(passes) == 2


def test_a_part_of_the_images_is_the_same_part_under_every_shift(seg):
    source = seg.limited(4).shard(1, 2)
    found = evaluate_source(source, posthoc=["ts"], shifts=["fog:1"], resamples=5, overlays="none")
    assert source.names == ["test1", "test4"]
    assert {tuple(meter.names) for meter in found.meters.values()} == {("test1", "test4")}
    whole = evaluate_source(seg, posthoc=["ts"], **QUICK)
    temperatures = [e.calibrators["ts"].temperature_ for e in (found, whole)]
    assert temperatures[0] == temperatures[1]  # the hold-out is whole


def test_one_image_is_drawn_under_shifts(seg):
    found = evaluate_source(
        seg, posthoc=["ts"], shifts=["fog:1,3,5,snow"], resamples=0, overlays="test1"
    )
    for overlays in found.overlays.values():
        names = [overlay.name for overlay in overlays]
        assert names == ["test1", "test1, clean", "test1, fog:3", "test1, snow:3"]


def test_shifts_that_cannot_be(digits, seg):
    with pytest.raises(ValueError, match="domain"):
        evaluate_source(digits, shifts=["domain:art"])
    with pytest.raises(ValueError, match="masks"):
        evaluate_source(seg, shifts=["rotation:15"])
    with pytest.raises(ValueError, match="nowhere"):
        evaluate_source(seg, shifts=[Shift("data", "/nowhere")])
    with pytest.raises(ValueError, match="test images"):
        evaluate_source(seg.holdout(), shifts=[Shift("data", "elsewhere")])
    with pytest.raises(ValueError, match="one folder"):
        shifting.open_shifts(
            type("Any", (), {"shifted": lambda self, shift: shift})(),
            [Shift("data", "a/x"), Shift("data", "b/x")],
        )
