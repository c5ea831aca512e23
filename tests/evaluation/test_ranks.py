"""Evaluating and fitting on two ranks gives what one gives."""

import pytest
import torch

from segcal.evaluation.evaluate import evaluate_source
from segcal.metrics.objects import ObjectRule
from segcal.sources.saved import PredictionFolder
from tests.support.evaluated import assert_close
from tests.support.networks import Network, network_source
from tests.support.ranks import run_on_ranks
from tests.support.saved import save_folder


def everything(rank, folder):
    source = PredictionFolder(folder, skip_bad=True)
    found = evaluate_source(
        source,
        holdout=PredictionFolder(folder, skip_bad=True),
        posthoc=("ts", "vs"),
        protocols=["image", "foreground", "batch:3"],
        operate=["accuracy=0.9"],
        conformal=[0.2],
        objects=ObjectRule((1,), calibrate="ts"),
        overlays="worst" if rank == 0 else "none",
        num_overlays=1,
    )
    network = network_source(Network())
    network.split = "test"  # whose hold-out it is then
    again = evaluate_source(network, posthoc=("ts",), overlays="none")
    return {
        "saved": {name: report.to_dict() for name, report in found.reports.items()},
        "skipped": found.skipped,
        "drawn": len(found.overlays.get("ts", [])),
        "network": again.reports["none"].to_dict(),
        "calibrators": {name: c.state_dict() for name, c in found.calibrators.items()},
        "temperature": again.calibrators["ts"].temperature_,
    }


@pytest.mark.slow
def test_two_ranks_give_the_reports_and_the_fits_of_one(tmp_path):
    save_folder(tmp_path, 7, size=16, temperature=2.0)
    (tmp_path / "bad0.npz").write_bytes(b"")
    (tmp_path / "bad1.npz").write_bytes(b"")
    alone = everything(0, tmp_path)
    assert set(alone["skipped"]) == {"bad0", "bad1"}
    assert alone["saved"]["none"]["protocol"]["images"] == 7
    assert alone["network"]["protocol"]["images"] == 23
    for result in run_on_ranks(everything, tmp_path):
        assert result["skipped"] == alone["skipped"] and result["drawn"] in (0, 1)
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
    network = Network()
    for _ in range(2):
        source = network_source(network)
        source.split, source.key = "test", "weights"
        result = evaluate_source(
            source, shifts=["fog:3"], resamples=0, overlays="none", cache=place
        )
        found.append(result.reports["none", "fog:3"].to_dict())
        seen = network.seen
    return found, place.exists(), seen


@pytest.mark.slow
def test_two_ranks_keep_the_results_of_one(tmp_path):
    (first, again), _, seen = under_shift(0, tmp_path / "alone")
    assert first == again and seen == 23 * 3  # clean twice, and the shift once
    assert first["protocol"]["images"] == 23
    (zero, wrote, _), (one, other_wrote, seen) = run_on_ranks(under_shift, tmp_path / "two")
    assert zero[0] == zero[1] == one[1] and wrote and not other_wrote
    assert seen == 11 * 3
    assert_close(zero[0], first, 1e-5)
