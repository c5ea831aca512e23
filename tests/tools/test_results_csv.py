"""The CSV of folders of results: units, what a calibrator changes, means over shifts."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from segcal.evaluation.evaluate import evaluate_source
from tests.support.networks import Network, network_source

TOOL = Path(__file__).parents[2] / "tools" / "results_csv.py"


def test_scores_differences_and_means_over_shifts(tmp_path):
    source = network_source(Network())
    result = evaluate_source(
        source,
        holdout=source,
        posthoc=["ts"],
        shifts=["contrast:3", "pixelate:3"],
        overlays="none",
        resamples=50,
    )
    result.save(tmp_path / "digits")
    out = tmp_path / "out.csv"
    subprocess.run(
        [sys.executable, TOOL, out, tmp_path / "digits", "--resamples", "50"], check=True
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["table"] for row in rows} == {"digits"}
    found = {(row["row"], row["column"]): float(row["value"]) for row in rows}
    close, none = {"rel": 1e-4, "abs": 1e-4}, result.reports["none"]
    assert found["clean none", "ECE (%)"] == pytest.approx(100 * none.ece, **close)
    assert found["clean ts", "temperature"] == pytest.approx(
        result.calibrators["ts"].temperature_.item(), **close
    )
    for row in ("clean", "contrast:3", "mean"):
        change = found[f"{row} ts", "ECE (%)"] - found[f"{row} none", "ECE (%)"]
        assert found[f"{row} ts", "ECE (%) minus none"] == pytest.approx(change, **close)
    each = [result.reports["ts", shift].sce for shift in ("contrast:3", "pixelate:3")]
    mean = 1000 * sum(each) / 2
    assert found["mean ts", "SCE (1e-3)"] == pytest.approx(mean, **close)
    assert found["mean ts", "SCE (1e-3) low"] < mean < found["mean ts", "SCE (1e-3) high"]
