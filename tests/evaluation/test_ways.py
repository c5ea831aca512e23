"""Calibrators that are fitted for other images than the hold-out's, without their labels."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from segcal.data.corruptions import CORRUPTIONS
from segcal.data.shift import parse_shifts
from segcal.evaluation import ways
from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.holdout import _Pairs
from segcal.posthoc.holdout import Holdout, PixelSampler
from segcal.sources.network import LoaderSource, RunSource
from segcal.sources.saved import PredictionFolder
from tests.support.holdouts import random_holdout
from tests.support.saved import save_folder

QUICK = {"resamples": 0, "overlays": "none"}


@pytest.fixture
def seg(runs):
    return RunSource(runs / "seg", workers=0)


def loader_source(network, inputs, labels=None, batch=2):
    labels = (
        torch.zeros(len(inputs), *inputs.shape[2:], dtype=torch.int64) if labels is None else labels
    )
    batches = list(zip(inputs.split(batch), labels.split(batch), strict=True))
    return LoaderSource(network, batches, num_classes=inputs.shape[1])


def test_a_tested_family_is_never_fitted(seg, monkeypatch):
    fitted = []
    fit_on = ways.fit_on

    def spy(methods, sources):
        fitted.append((tuple(methods), " ".join(source.name for source in sources)))
        return fit_on(methods, sources)

    monkeypatch.setattr(ways, "fit_on", spy)
    found = evaluate_source(
        seg,
        posthoc=["ts", "ts@shift"],
        shifts=["fog:3", "snow:3", "shot_noise:3"],
        fit_shift="fog:1,frost:1,gaussian_noise:2,jpeg:1",
        **QUICK,
    )
    assert found.methods == ["none", "ts", "ts@shift"]
    every, weather, noise = [names for methods, names in fitted if methods == ("ts@shift",)]
    assert all(shift in every for shift in ("fog:1", "frost:1", "gaussian_noise:2", "jpeg:1"))
    assert "fog" not in weather and "frost" not in weather and "gaussian_noise" in weather
    assert "gaussian_noise" not in noise and "fog:1" in noise
    assert {c.family for c in CORRUPTIONS.values()} == {"noise", "blur", "weather", "digital"}
    assert parse_shifts("rotation:45")[0].family == "rotation"


def test_each_image_is_copied_four_times(seg):
    holdout = seg.holdout()
    names = [n for _, part in ways._copies(holdout, "all:1,3") for n in part.names]
    assert sorted(names) == sorted(ways.COPIES * list(holdout.names))
    few = [part.names for _, part in ways._copies(holdout, "fog:3,jpeg:3")]
    assert few == [holdout.names, holdout.names]  # each only once under one shift


def test_copies_of_an_image_are_in_one_fold(seg):
    holdout = seg.holdout()
    pairs = _Pairs([holdout, holdout.shifted(parse_shifts("fog:3")[0])], "ts@shift")
    batches = Holdout(list(pairs))
    sampler = PixelSampler(batches, 10**6, 0)
    batches.survey(sampler)
    counts = sampler.finish().fold.bincount()
    assert [name for *_, names in pairs for name in names] == 2 * list(holdout.names)
    assert len(counts) == 3 and (counts % 2 == 0).all()


def test_unrelated_images_count_as_much_as_the_holdout():
    """The temperature has the least NLL(hold-out) − mean (1/K) Σ_c log p_c."""
    ((z, y),) = random_holdout(1, n=8, size=(32, 32), temperature=3)
    other = 3 * torch.randn(30, 5, 32, 32, generator=torch.Generator().manual_seed(1))
    holdout = loader_source(nn.Identity(), z, y)
    unrelated = ways.Changed(loader_source(nn.Identity(), other), ways.guesses)
    parts = ways.balanced([holdout, unrelated])
    counts = [sum(int((b.labels != 255).sum()) for b in part) for part in parts]
    assert counts[0] == int((y != 255).sum())
    assert counts[1] == pytest.approx(counts[0], rel=0.05)
    (found,) = ways.fit_on(["ts@ood"], parts).values()
    grid = torch.linspace(1, 20, 400)
    uniform = [-(other / t).log_softmax(1).mean() for t in grid]
    total = [
        cross_entropy(z / t, y, ignore_index=255) + u for t, u in zip(grid, uniform, strict=True)
    ]
    expected = float(grid[int(torch.stack(total).argmin())])
    assert float(found.temperature_) == pytest.approx(expected, rel=0.05)


def test_mixtures_are_labelled_with_the_first_image():
    """Worked by hand: each image is mixed with the one before, the first with the last one."""
    inputs = torch.zeros(3, 2, 1, 2)
    inputs[0, 0], inputs[1, 1], inputs[2, 0, 0, 0], inputs[2, 1, 0, 1] = 1.0, 1.0, 2.0, 2.0
    first, second = ways.mixtures(loader_source(nn.Identity(), inputs))
    assert first.labels.tolist() == [[[0, 0]], [[1, 1]]]  # classes 0 and 1, everywhere another
    torch.testing.assert_close(first.values[0, :, 0, 0], torch.tensor([0.65, 0.35]))
    torch.testing.assert_close(first.values[1, :, 0, 0], torch.tensor([0.35, 0.65]))
    assert second.labels.tolist() == [[[0, 255]]]  # the second pixel is class 1 in both
    torch.testing.assert_close(second.values[0, :, 0, 0], torch.tensor([1.3, 0.35]))


def test_statistics_and_the_temperature_they_predict():
    even = loader_source(nn.Identity(), torch.zeros(2, 4, 3, 3))
    expected = torch.tensor([0.25, np.log(4), 0.0]).double()
    torch.testing.assert_close(ways.statistics(even), expected)
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).double()
    known = [(row, float(0.1 * row[0] - 0.2 * row[1] + 0.3)) for row in x]
    probe = torch.tensor([0.5, 0.5, 0.5]).double()
    assert ways.predicted_temperature(known, probe) == pytest.approx(np.exp(0.25), rel=0.01)
    most = np.exp(max(log_t for _, log_t in known))
    far = torch.tensor([50.0, -50.0, 0.0]).double()
    assert ways.predicted_temperature(known, far) == pytest.approx(most)


def test_every_way_in_one_evaluation_that_is_saved_and_loaded(seg, runs, tmp_path, undrawn):
    images = runs / "data" / "test" / "images"
    methods = ("ts", "ts@shift", "ts@ood", "ts@target", "ts@set", "ets@shift", "ets@ood")
    found = evaluate_source(
        seg,
        posthoc=methods,
        shifts=["fog:3"],
        fit_shift="all:3",
        fit_ood=images,
        fit_target=images,
        cache=tmp_path,
        **QUICK,
    )
    assert found.methods == ["none", *methods]
    for method in methods:
        assert found.reports[method, "fog:3"].changed == 0
    assert "TS@set was fitted on statistics of the unlabelled test images" in " ".join(found.notes)
    found.save(tmp_path)
    assert (tmp_path / "ts-shift" / "calibrator.safetensors").exists()
    from segcal.evaluation.folder import load_evaluation

    assert load_evaluation(tmp_path).reports == found.reports


@pytest.mark.parametrize(
    ("posthoc", "given", "word"),
    [
        (["ts@ood"], {}, "--fit-ood"),
        (["ts"], {"fit_ood": "."}, "fit_ood is of use"),
        (["ts@shift"], {"fit_shift": "data:X"}, "brings other images"),
        (["lts@set"], {}, "temperature is all"),
        (["ts@tz"], {}, "ts@shift, ts@ood"),
    ],
)
def test_what_cannot_be_fitted(seg, posthoc, given, word):
    with pytest.raises(ValueError, match=word):
        evaluate_source(seg, posthoc=posthoc, **given, **QUICK)


def test_saved_predictions_cannot_be_changed(tmp_path):
    saved = PredictionFolder(save_folder(tmp_path))
    for method in ("ts@shift", "ts@target"):
        with pytest.raises(ValueError, match="network"):
            evaluate_source(saved, holdout=saved, posthoc=[method], **QUICK)


def test_a_shift_of_some_images_is_of_these_images(seg):
    part = seg.only([2, 0])
    assert part.shifted(parse_shifts("fog:3")[0]).names == part.names
