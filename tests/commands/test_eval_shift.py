"""`segcal eval --rotation` and `--domain`: a run judged on changed test images."""

import shutil
from dataclasses import replace

import pytest
import torch

import segcal
from segcal.cli import main
from segcal.data import build_data
from segcal.run import open_run
from tests.support.datasets import write_pacs

pytestmark = pytest.mark.usefixtures("undrawn")
QUICK = ["--resamples", "0", "--workers", "0", "--device", "cpu"]


@pytest.fixture
def digits(runs, tmp_path):
    # Other tests may have evaluated the run where it is.
    evaluated = shutil.ignore_patterns("eval*")
    return shutil.copytree(runs / "digits", tmp_path / "digits", ignore=evaluated)


def test_turned_digits(digits):
    assert main(["eval", str(digits), *QUICK, "--rotation", "45", "--posthoc", "none,ts"]) == 0
    assert {p.name for p in digits.glob("eval*")} == {"eval-rotation-45"}
    found = segcal.Report.load(digits / "eval-rotation-45" / "report.json")
    run = open_run(digits)
    data = build_data(replace(run.config.data, rotation=45.0), seed=0)
    images, labels = zip(*(data.test[i] for i in range(len(data.test))), strict=True)
    loader = [(torch.stack(images), torch.stack(labels))]
    expected = segcal.evaluate(run.model, loader, num_classes=10, progress=False)
    assert found.scores["nll"] == pytest.approx(expected.nll)
    assert main(["eval", str(digits), *QUICK]) == 0
    upright = segcal.Report.load(digits / "eval" / "report.json")
    assert upright.nll != pytest.approx(expected.nll)
    scaled = digits / "eval-rotation-45" / "posthoc" / "ts"
    assert main(["eval", str(digits), *QUICK, "--posthoc", "ts"]) == 0
    again = segcal.posthoc.load(digits / "eval" / "posthoc" / "ts" / "scaler.safetensors")
    turned = segcal.posthoc.load(scaled / "scaler.safetensors")
    assert turned.temperature_ == again.temperature_  # the hold-out stays as it was


def test_domains(tmp_path, capfd):
    write_pacs(tmp_path)
    common = f"--data.name pacs --data.root {tmp_path} --data.resize 8 --model.name resnet8".split()
    common += ["--epochs", "1", "--workers", "0", "--device", "cpu"]
    run = tmp_path / "photos"
    assert main(["train", *common, "--out", str(run)]) == 0
    for domain, images in (("sketch", 21), ("art", 21)):
        assert main(["eval", str(run), *QUICK, "--domain", domain]) == 0
        report = segcal.Report.load(run / f"eval-domain-{domain}" / "report.json")
        assert report.protocol.images == images
    left_out = ["--data.train_domain", "others", "--data.domain", "sketch"]
    run = tmp_path / "others"
    assert main(["train", *common, *left_out, "--out", str(run)]) == 0
    capfd.readouterr()
    assert main(["eval", str(run), *QUICK, "--domain", "photo"]) == 2
    assert "left out, but got photo: it was trained on that" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--domain", "art"], "Expected domain to be unset for digits"),
        (["--rotation", "15", "--split", "holdout"], "Expected --split test with --rotation"),
    ],
)
def test_changes_that_cannot_be(digits, options, message, capfd):
    assert main(["eval", str(digits), *QUICK, *options]) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(digits.glob("eval*"))


def test_saved_predictions_cannot_be_turned(tmp_path, capfd):
    assert main(["eval", "--predictions", str(tmp_path), "--rotation", "15"]) == 2
    assert "Expected runs with --rotation and --domain" in capfd.readouterr().err
