"""The Hippocampus script: what it writes is a prediction folder, and a finished run stays."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "hippocampus.py"


@pytest.mark.slow
def test_a_short_training_writes_predictions_that_segcal_reads(tmp_path):
    import nibabel as nib

    rng = np.random.default_rng(0)
    for i in range(90):
        labels = np.zeros((9, 10 + i % 3, 8), np.uint8)
        labels[2:5, 3:6, 2:5], labels[5:8, 3:6, 2:5] = 1, 2
        image = labels + rng.normal(size=labels.shape).astype(np.float32)
        for folder, values in (("images", image), ("labels", labels)):
            (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
            file = tmp_path / "data" / folder / f"hippocampus_{i:03}.nii.gz"
            nib.save(nib.Nifti1Image(values, np.eye(4)), file)
    command = [sys.executable, TOOL, tmp_path / "data", tmp_path / "runs", "--epochs", "1"]
    subprocess.run([*command, "--loss", "dicece+mdca"], check=True)

    from segcal import evaluate_source, open_source

    run = tmp_path / "runs" / "dicece+mdca-s0"
    holdout, test = open_source(run / "holdout"), open_source(run / "test")
    assert (holdout.num_images, test.num_images) == (20, 60)
    report = evaluate_source(test, holdout=holdout, posthoc=("ts",), overlays="none").reports["ts"]
    assert report.protocol.pixels == sum(9 * (10 + int(n[-3:]) % 3) * 8 for n in test.names)
    again = subprocess.run([*command, "--loss", "dicece+mdca"], capture_output=True, text=True)
    assert "is finished" in again.stdout
