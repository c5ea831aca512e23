"""Evaluating and fitting on two ranks gives what one gives."""

import pytest
import torch

from segcal.data.shift import Shift
from segcal.evaluation.calibrate import choose_on_holdout, fit_calibrators
from segcal.evaluation.evaluate import measure
from segcal.evaluation.saved import PredictionFolder
from segcal.evaluation.shifted import evaluate_shift
from segcal.metrics.triage import Target
from tests.support.evaluated import reports
from tests.support.networks import Network, network_source
from tests.support.ranks import run_on_ranks
from tests.support.saved import save_folder


def everything(rank, folder):
    source = PredictionFolder(folder, skip_bad=True)
    calibrators = fit_calibrators(("ts", "vs"), lambda: source)
    found = reports(source, calibrators, protocols=["image", "foreground", "batch:3"])
    triage = choose_on_holdout(
        lambda: source, calibrators, targets=[Target("accuracy", 0.9)], misses=[0.2]
    )
    measure(
        source, calibrators, observers={name: chosen.observers for name, chosen in triage.items()}
    )
    network = network_source(Network())
    return {
        "saved": {name: triage[name].complete(report).to_dict() for name, report in found.items()},
        "skipped": source.skipped,
        "network": reports(network)["none"].to_dict(),
        "calibrators": {name: calibrators[name].state_dict() for name in ("ts", "vs")},
        "temperature": fit_calibrators(("ts",), lambda: network)["ts"].temperature_,
    }


def assert_close(one, other, rel):
    """Equal, but for the last digits of floating numbers: sums are added in another order."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], rel)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, rel)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rel, abs=1e-9)
    else:
        assert one == other


def test_two_ranks_give_the_reports_and_the_fits_of_one(tmp_path):
    save_folder(tmp_path, 7, size=16, temperature=2.0)
    (tmp_path / "bad0.npz").write_bytes(b"")
    (tmp_path / "bad1.npz").write_bytes(b"")
    alone = everything(0, tmp_path)
    assert set(alone["skipped"]) == {"bad0", "bad1"}
    assert alone["saved"]["none"]["protocol"]["images"] == 7
    assert alone["network"]["protocol"]["images"] == 23
    for result in run_on_ranks(everything, tmp_path):
        assert result["skipped"] == alone["skipped"]
        assert_close(result["saved"]["none"], alone["saved"]["none"], 1e-12)
        assert_close(result["network"], alone["network"], 1e-5)  # batches differ, and so rounding
        torch.testing.assert_close(result["temperature"], alone["temperature"], rtol=1e-4, atol=0)
        torch.testing.assert_close(result["calibrators"]["ts"], alone["calibrators"]["ts"])
        torch.testing.assert_close(
            result["calibrators"]["vs"], alone["calibrators"]["vs"], rtol=1e-3, atol=1e-3
        )


def under_shift(rank, folder):
    """Twice, so that the second finds what the first kept; no other rank sees the files."""
    place, found = folder / f"rank{rank}", []
    for _ in range(2):
        source = network_source(Network())
        reports = evaluate_shift(
            source,
            {"none": None},
            place,
            run="net",
            shift=Shift("fog", 3),
            key="weights",
            resamples=0,
        )
        found.append({name: report.to_dict() for name, report in reports.items()})
    return found, place.exists()


def test_two_ranks_keep_the_results_of_one(tmp_path):
    (first, again), _ = under_shift(0, tmp_path / "alone")
    assert first == again and first["none"]["protocol"]["images"] == 23
    (zero, wrote), (one, other_wrote) = run_on_ranks(under_shift, tmp_path / "two")
    assert zero[0] == zero[1] and wrote
    assert one == [{}, {}] and not other_wrote
    assert_close(zero[0], first, 1e-5)
