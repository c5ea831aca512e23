"""How often intervals hold and models are called different, in small runs of the tool."""

import sys

import interval_coverage as tool
import numpy as np
import pytest
import torch
from interval_coverage import SHOWN, SOURCES, Truth, large_sample, trials

from tests.support.synthetic_reports import images, measured


@pytest.fixture(scope="module")
def truths():
    """The truth about each source, from fewer images than the tool takes."""
    found = {}

    def truth(name):
        source = SOURCES[name].truth
        if source not in found:
            found[source] = Truth(large_sample(source, 4000), exact=False)
        return found[source]

    return truth


@pytest.mark.parametrize("name", ["× 1.15, × 0.8751", "× 1.15, × 0.8751, correlated"])
def test_equal_errors_are_seldom_called_different(name, truths):
    """Logits × 1.15 and × 0.8751 are wrong in opposite ways by as much."""
    every = list(trials(SOURCES[name].draw, truths(name), 20, 60))
    for score in ("ece", "sce"):
        sure = [low > 0 or high < 0 for (_, low, high), _ in (o.difference[score] for o in every)]
        assert np.mean(sure) <= 0.15, score
        for part in (0, 1):
            held = [low <= true <= high for (_, low, high), true in (o[part][score] for o in every)]
            assert np.mean(held) >= 0.9, (score, part)


def test_clear_differences_are_called_so(truths):
    name = "× 1.3, × 1"
    every = list(trials(SOURCES[name].draw, truths(name), 40, 20))
    for score in ("ece", "sce"):
        assert np.mean([o.difference[score][0].high < 0 for o in every]) >= 0.9


@pytest.mark.parametrize("number", [2, 4])
def test_few_images(number, truths):
    name = "× 1.15, × 0.8751, correlated"
    every = list(trials(SOURCES[name].draw, truths(name), number, 50))
    for score in SHOWN:
        held = [low <= true <= high for (_, low, high), true in (o.first[score] for o in every)]
        assert np.mean(held) >= 0.9, score


def test_miou_with_rare_classes(truths):
    """Where an interval is given, it holds; where a class is too rare, none is given."""
    name = "10 classes, some rare"
    every = list(trials(SOURCES[name].draw, truths(name), 30, 50))
    given = [o.first["miou"] for o in every if o.first["miou"] is not None]
    assert 15 <= len(given) <= 45
    assert np.mean([low <= true <= high for (_, low, high), true in given]) >= 0.9


def test_command(tmp_path, capsys, monkeypatch):
    logits, labels = images(12, torch.Generator().manual_seed(0))
    names = [f"{i:02d}" for i in range(12)]
    paths = [str(tmp_path / f"{i}.npz") for i in (0, 1)]
    for path, scale in zip(paths, (1.0, 0.5), strict=True):
        measured(scale * logits, labels, names).save(path)
    arguments = ["--images", "6", "--data-sets", "3", "--population", *paths]
    monkeypatch.setattr(sys, "argv", ["interval_coverage.py", *arguments])
    tool.main()
    out = capsys.readouterr().out
    assert out.count("| population") == 4 and "6 images" in out
    ece = measured(logits, labels).compute().ece
    assert f"| population: first | {100 * ece:.2f} |" in out


def test_bands_hold_about_as_often_as_they_should():
    meter = tool.CalibrationMeter(4, ignore_index=tool._IGNORE)
    meter.update(*tool.triage_images(2000, torch.Generator().manual_seed(1)))
    found = tool.bands_held(meter.compute(), 20, 25)
    held = np.concatenate([held[count > 0] for count, held in found])
    assert len(held) > 200 and 0.9 < held.mean() < 1
