"""How often intervals hold, in small runs of the tool."""

import sys

import interval_coverage as tool
import numpy as np
import pytest
import torch

from segcal.metrics.intervals import Estimate, ImageScores, combine, unit_sums
from tests.support.synthetic_reports import images, measured


def held_in(population, number, data_sets=60):
    """How often the intervals of the first model, and of the difference, held."""
    true = [tool.true_scores(sums) for sums in population]
    rng = np.random.default_rng(0)
    one, difference = tool.Held(), tool.Held()
    for seed in range(data_sets):
        rows = rng.integers(len(population[0]["pixels"]), size=number)
        sample = [{name: array[rows] for name, array in m.items()} for m in population]
        models = [ImageScores(sums) for sums in sample]
        first, second = (tool.true_in(s, t) for s, t in zip(sample, true, strict=True))
        one.add(combine(models[:1], [1.0], resamples=100, seed=seed), first)
        found = combine(models, [-1.0, 1.0], resamples=100, seed=seed)
        difference.add(found, {name: second[name] - first[name] for name in tool.SCORES})
    return one, difference


@pytest.mark.parametrize("correlated", [False, True])
def test_intervals_hold(correlated):
    """Logits × 1.15 and × 0.8751 are wrong in opposite ways by as much."""
    population = tool.two_models((1.15, 0.8751), correlated=correlated, thousands=4)
    for number in (2, 4, 20):
        for found in held_in(population, number):
            assert all(np.mean(held) >= 0.85 for held in found.held.values()), number


def test_miou_of_rare_classes_is_withheld_or_holds(monkeypatch):
    one, _ = held_in(tool.rare_classes(10, 0.7), 30, 50)
    assert 15 <= len(one.held["miou"]) <= 45
    assert np.mean(one.held["miou"]) >= 0.85


def test_groups_hold_where_images_do_not():
    generator = torch.Generator().manual_seed(1)
    population = tool.image_sums(
        *tool.draw_calibrated(4000, generator, correlated=True, hard=True, group=10)
    )
    true = tool.true_scores(population)
    rng = np.random.default_rng(0)
    grouped, single = tool.Held(), tool.Held()
    for seed in range(60):
        rows = (10 * rng.integers(400, size=20)[:, None] + np.arange(10)).ravel()
        sample = {name: array[rows] for name, array in population.items()}
        sample["unit"] = np.repeat(np.arange(20), 10)
        for held, sums in ((grouped, unit_sums(sample)), (single, sample)):
            found = combine([ImageScores(sums)], [1.0], resamples=20, seed=seed)
            held.add(found, tool.true_in(sample, true))
    assert np.mean(grouped.held["accuracy"]) >= 0.85 > 0.8 > np.mean(single.held["accuracy"])


def test_counts_of_what_held():
    held, true = tool.Held(), dict.fromkeys(tool.SCORES, 0.5)
    held.add({"ece": Estimate(0.5, 0.4, 0.6), "miou": Estimate(0.5, 0.4, 0.6)}, true)
    held.add({"ece": Estimate(0.7, 0.6, 0.8)}, true)
    assert (held.percent("ece"), held.percent("miou"), held.percent("sce")) == (
        "50",
        "100 (50)",
        "–",
    )
    assert held.missed("ece") == "50.0"


def test_miou_against_other_intervals():
    population = tool.objects(0.8)
    sample = {name: array[:60] for name, array in population.items()}
    value = tool.class_iou(sample).mean()
    found = tool.miou_intervals(sample, value, np.random.default_rng(0))
    low, high = found["jackknife t (segcal)"]
    ours = ImageScores(
        {
            **sample,
            "hits": sample["intersection"].sum(1),
            "pixels": sample["truth"].sum(1),
            "class_pixels": sample["truth"],
            "top_gap": np.zeros((60, 2)),
            "class_gap": np.zeros((60, 11, 2)),
        }
    )
    interval = combine([ours], [1.0], resamples=1, seed=0)["miou"]
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    for low, high in found.values():
        assert 0 <= low < value < high <= 1


def test_command(tmp_path, capsys, monkeypatch):
    logits, labels = images(12, torch.Generator().manual_seed(0))
    names = [f"{i:02d}" for i in range(12)]
    paths = [str(tmp_path / f"{i}.npz") for i in (0, 1)]
    for path, scale in zip(paths, (1.0, 0.5), strict=True):
        measured(scale * logits, labels, names).save(path)
    arguments = ["scores", "--images", "6", "--data-sets", "3", "--population", *paths]
    monkeypatch.setattr(sys, "argv", ["interval_coverage.py", *arguments])
    tool.main()
    out = capsys.readouterr().out
    assert out.count("| saved states |") == 2 and "6 images" in out
    ece = measured(logits, labels).compute().ece
    assert f"| saved states | {100 * ece:.2f} |" in out


@pytest.mark.slow
def test_every_table(capsys, monkeypatch):
    tables = ["seeds", "groups", "miou", "triage", "bands"]
    arguments = [*tables, "--images", "30", "--data-sets", "2"]
    monkeypatch.setattr(sys, "argv", ["interval_coverage.py", *arguments])
    monkeypatch.setattr(tool, "SPREADS", (0.05,))
    tool.main()
    assert capsys.readouterr().out.count("|  | ") == 7
