"""Conformal class sets: λ by its definition, counts by hand, and the promise kept."""

import json
import math
from dataclasses import replace

import pytest
import torch

from segcal import Report
from segcal.metrics.report import Interval
from segcal.metrics.triage import ClassSets, MissRates, SetCounts, check_miss, thresholds
from tests.support.synthetic_reports import K, images, synthetic_report


def batch(n, seed=0, **options):
    return images(n, torch.Generator().manual_seed(seed), **options)


def rates_of(*batches):
    rates = MissRates()
    for logits, labels in batches:
        rates.update(logits, labels)
    return rates


def slow_miss_rate(logits, labels, threshold):
    """The mean over images of the share of labelled pixels whose set lacks the label."""
    per_image = []
    for z, y in zip(logits, labels, strict=True):
        seen = [(z[:, i].softmax(0), int(y[i])) for i in range(len(y)) if y[i] != 255]
        if seen:
            per_image.append(sum(p[label].item() < threshold for p, label in seen) / len(seen))
    return sum(per_image) / len(per_image), len(per_image)


@pytest.mark.parametrize("alpha", [0.08, 0.2, 0.5])
def test_lambda_is_its_definition(alpha):
    logits, labels = batch(14, pixels=9)
    labels[:, 0], labels[5] = 255, 255
    rates = rates_of((logits, labels))
    lam, miss = rates.choose(alpha)
    slow, n = slow_miss_rate(logits, labels, 1 - lam)
    assert (rates.images, miss) == (n, pytest.approx(slow)) == (13, miss)
    assert (n * slow + 1) / (n + 1) <= alpha
    grid = thresholds().tolist()
    smaller = grid[grid.index(1 - lam) + 1]
    too_much, _ = slow_miss_rate(logits, labels, smaller)
    assert (n * too_much + 1) / (n + 1) > alpha


def test_grid_is_exact_and_reaches_both_ends():
    grid = thresholds()
    assert (grid[0], grid[-1]) == (0, 1) and (grid.diff() > 0).all()
    assert torch.equal(1 - (1 - grid.double()), grid.double())
    steps = grid[1:-1].diff() / torch.minimum(grid[1:-2], 1 - grid[2:-1])
    assert steps.max() < 0.05  # the resolution of λ, relative to its distance from 0 or 1


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 9), (0.3, 3), (0.5, 1)])
def test_too_few_images_are_refused(alpha, least):
    logits, labels = batch(least)
    assert rates_of((logits, labels)).choose(alpha)[0] <= 1
    few = rates_of((logits[1:], labels[1:]))
    message = f"at least {least} images in the hold-out to promise a miss rate of {alpha}, but got"
    with pytest.raises(ValueError, match=message):
        few.choose(alpha)


def test_batches_and_shapes_do_not_matter(monkeypatch):
    logits, labels = batch(10, pixels=12)
    one = rates_of((logits, labels)).choose(0.2)
    parts = [
        (logits[p].view(-1, K, 4, 3), labels[p].view(-1, 4, 3)) for p in (slice(3), slice(3, 10))
    ]
    assert rates_of(*parts).choose(0.2) == pytest.approx(one)
    monkeypatch.setattr("segcal.metrics.triage._MOST_CELLS", 1)
    assert rates_of((logits, labels)).choose(0.2) == pytest.approx(one)


def test_sets_by_hand():
    """Two images: λ = 0.7, so the set has the classes with p >= 0.3."""
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]], [[0.8, 0.1, 0.1], [0.9, 0.1, 0]]])
    logits = probs.double().log().movedim(1, 2)  # (N, C, L)
    counts = SetCounts(0.7)
    counts.update(logits, torch.tensor([[1, 2], [0, 255]]))
    sets = counts.sets(0.1, 30, 0.09)
    # Sets {0, 1}, {0, 1}, {0}; the second label is missed.
    assert sets.set_size == pytest.approx(5 / 3)
    assert sets.miss_rate == pytest.approx((0.5 + 0) / 2)
    assert (sets.empty, sets.holdout_images, sets.holdout_miss, sets.miss) == (0, 30, 0.09, 0.1)
    assert sets.interval.low <= 0.25 <= sets.interval.high
    sure = SetCounts(0.05)
    sure.update(logits, torch.tensor([[1, 2], [0, 255]]))
    assert (sure.sets(0.1, 30, 0.09).empty, sure.sets(0.1, 30, 0.09).set_size) == (1, 0)


def test_classification_is_images_of_one_pixel():
    logits, labels = batch(200, pixels=1)
    flat = rates_of((logits.squeeze(2), labels.squeeze(1)))
    assert flat.choose(0.1) == rates_of((logits, labels)).choose(0.1)


@pytest.mark.parametrize("alpha", [0.1, 0.25])
def test_promise_is_kept(alpha):
    """Over 300 data sets of 19 images the mean miss rate of other images is at most α."""
    generator = torch.Generator().manual_seed(0)
    large = rates_of(images(4000, generator, pixels=16))
    true_rates = large.means()
    found = []
    for _ in range(300):
        lam, _ = rates_of(images(19, generator, pixels=16)).choose(alpha)
        found.append(true_rates[1 - lam])
    mean = sum(found) / 300
    assert alpha - 2.5 / 20 < mean <= alpha  # not kept by sets of all classes alone
    assert max(found) > mean + 0.01  # single data sets may miss more: the promise is an average


@pytest.mark.parametrize("text", ["0.1", "miss", "miss=0", "miss=1", "miss=x", "risk=0.1"])
def test_other_promises_are_refused(text):
    with pytest.raises(ValueError, match="Expected miss=A with A between 0 and 1, but got"):
        check_miss(text)


def test_sets_survive_json():
    sets = (
        ClassSets(0.1, 0.7, 30, 0.08, 0.09, Interval(0.05, 0.12), 1.4, 0.0),
        ClassSets(0.1, 0.7, 30, 0.08, math.nan, None, 1.4, 0.0),
    )
    report = replace(synthetic_report(images=2), class_sets=sets)
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report and again.class_sets[0] == sets[0]
