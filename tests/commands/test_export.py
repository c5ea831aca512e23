"""`segcal export`: the file gives the probabilities of the run, calibrated."""

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.cli import main
from segcal.sources.network import RunSource

QUICK = ["--workers", "0", "--device", "cpu"]


@pytest.mark.parametrize("name", ["seg", "digits"])
def test_the_file_gives_calibrated_probabilities(runs, tmp_path, capsys, name):
    out = tmp_path / "model.pt2"
    command = ["export", str(runs / name), "--posthoc", "ts", "--out", str(out), *QUICK]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{out}: images (N, 3, ")
    run = RunSource(runs / name)
    size = run.splits.test[0][0].shape
    images = torch.stack([item[0] for item in run.splits.test if item[0].shape == size])
    holdout = [(run.model(x[None]).detach(), y[None]) for x, y in run.splits.holdout]
    calibrator = segcal.TemperatureScaling().fit(holdout)
    with torch.no_grad():
        expected = calibrator(run.model(images)).softmax(1)
        found = torch.export.load(out).module()(images)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_onnx_and_another_size(runs, tmp_path):
    import onnxruntime

    out = tmp_path / "model.onnx"
    assert main(["export", str(runs / "seg"), "--size", "32x16", "--out", str(out), *QUICK]) == 0
    images = torch.randn(3, 3, 32, 16)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = RunSource(runs / "seg").model(images).softmax(1)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", [[], ["--calibrate", "members"]])
def test_an_ensemble_is_one_file(runs, tmp_path, how):
    """Of equal members the mean is each of them, calibrated before or after it."""
    out, seg = tmp_path / "model.pt2", str(runs / "seg")
    command = ["export", "--ensemble", seg, seg, "--posthoc", "ts", "--out", str(out), *how]
    assert main([*command, *QUICK]) == 0
    run = RunSource(runs / "seg")
    images = run.samples[0][0][None]
    holdout = [(run.model(x[None]).detach(), y[None]) for x, y in run.splits.holdout]
    calibrator = segcal.TemperatureScaling().fit(holdout)
    with torch.no_grad():
        expected = calibrator(run.model(images)).softmax(1)
        found = torch.export.load(out).module()(images)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


GLUE = """
import torch
from torch import nn

def network(head):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 3, 3, stride=2, padding=1), head)

def logits():
    return network(nn.Identity())

def scores():
    return network(nn.Sigmoid())

def probs():
    return network(nn.Softmax(1))
"""


@pytest.mark.parametrize("outputs", ["logits", "scores", "probs"])
def test_the_file_of_a_network_by_name_is_its_source(tmp_path, outputs):
    """Scores are divided by their sum, and joined classes added, in the file too."""
    rng = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (tmp_path / "data" / "test" / folder).mkdir(parents=True)
    for i in range(4):
        image, mask = rng.integers(0, 256, (18, 24, 3)), rng.integers(0, 2, (18, 24))
        for folder, array in (("images", image), ("masks", mask)):
            path = tmp_path / "data" / "test" / folder / f"{i}.png"
            Image.fromarray(array.astype(np.uint8)).save(path)
    (tmp_path / "glue.py").write_text(GLUE)
    (tmp_path / "merge.yaml").write_text("a: [0, 2]\nb: 1\n")
    stated = {"classes": tmp_path / "merge.yaml", "outputs": outputs, "num_classes": 2}
    spec, place, out = f"{tmp_path}/glue.py:{outputs}", f"masks:{tmp_path}/data", tmp_path / "m.pt2"
    words = [word for name, value in stated.items() for word in (f"--{name}", str(value))]
    command = ["export", "--model", spec, "--data", place, *words, "--out", str(out), *QUICK]
    assert main([*command, "--tolerance", "-1"]) == 2 and not out.exists()
    assert main(command) == 0
    source = segcal.open_source(spec, data=place, **stated, workers=0)
    found = torch.export.load(out).module()(source.samples[0][0][None])
    torch.testing.assert_close(found, source[0].probs, atol=1e-6, rtol=0)


def test_wrong_arguments_are_one_line(runs, tmp_path, capsys):
    for arguments, reason in [
        (["{seg}", "{seg}", "--out", "{tmp}/m.pt2"], "--ensemble"),
        (["{seg}"], "--out"),
        (["{seg}", "--out", "{tmp}/model.bin"], ".onnx"),
        (["{seg}", "--out", "{tmp}/m.pt2", "--posthoc", "ts,vs"], "one method"),
        (["{seg}", "--out", "{tmp}/m.pt2", "--posthoc", "tz"], "choose from none, ts"),
        (["{seg}", "--out", "{tmp}/m.pt2", "--size", "big"], "big"),
        (["{tmp}", "--out", "{tmp}/m.pt2"], "config.yaml"),
    ]:
        places = {"seg": runs / "seg", "tmp": tmp_path}
        assert main(["export", *(a.format(**places) for a in arguments), *QUICK]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert reason in err
        assert list(tmp_path.iterdir()) == []
