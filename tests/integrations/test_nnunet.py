"""Files laid out as `nnUNetv2_predict --save_probabilities` leaves them."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch

from segcal.cli import main
from segcal.evaluation.measure import measure
from segcal.integrations.nnunet import ChannelLabels, NnunetFolder, mdca_trainer
from segcal.losses import build_loss
from segcal.metrics import CalibrationMeter, Report

SIZE, CLASSES = (10, 9, 8), 3
LABELS = {"background": 0, "liver": 1, "tumour": 2, "ignore": 3}
AFFINE = np.diag([0.7, 0.7, 3.0, 1.0])


def write_nifti(array, path, affine=AFFINE):
    """(z, y, x) as NIfTI has it, x first."""
    nibabel.Nifti1Image(np.asarray(array).T, affine).to_filename(path)


@pytest.fixture
def case(tmp_path):
    """The folders OUT, labelsTs and imagesTs, with two cases; true probabilities and labels."""
    rng = np.random.default_rng(0)
    out, labels_ts, images_ts = (tmp_path / name for name in ("OUT", "labelsTs", "imagesTs"))
    for folder in (out, labels_ts, images_ts):
        folder.mkdir()
    (out / "dataset.json").write_text(json.dumps({"labels": LABELS, "channel_names": {"0": "CT"}}))
    (out / "plans.json").write_text("{}")
    known = []
    for name in ("case_001", "case_002"):
        logits = 2 * rng.normal(size=(CLASSES, *SIZE))
        probs = np.exp(logits) / np.exp(logits).sum(0)
        labels = rng.integers(0, 4, SIZE).astype(np.uint8)
        np.savez_compressed(out / f"{name}.npz", probabilities=probs.astype(np.float16))
        (out / f"{name}.pkl").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")  # never opened
        write_nifti(probs.argmax(0).astype(np.uint8), out / f"{name}.nii.gz")
        write_nifti(labels, labels_ts / f"{name}.nii.gz")
        write_nifti(rng.normal(size=SIZE).astype(np.float32), images_ts / f"{name}_0000.nii.gz")
        known.append((probs, labels))
    return out, labels_ts, images_ts, known


def test_probabilities_and_labels_are_at_the_same_voxels(case):
    out, labels, _, known = case
    folder = NnunetFolder(out, labels=labels)
    assert folder.names == ["case_001", "case_002"]
    assert folder.class_names == ("background", "liver", "tumour")
    assert (folder.num_classes, folder.ignore_index) == (3, 3)
    for found, (probs, truth) in zip(folder, known, strict=True):
        np.testing.assert_array_equal(found.labels[0], truth)
        np.testing.assert_allclose(found.values[0], probs, atol=2e-3)
        assert found.values.dtype == torch.float32 and found.kind == "probs"


def test_the_command(case, tmp_path, monkeypatch):
    out, labels, images, known = case
    monkeypatch.chdir(tmp_path)
    command = ["eval", "--predictions", str(out), "--format", "nnunet", "--labels", str(labels)]
    assert main([*command, "--images", str(images), "--resamples", "20"]) == 0
    report = Report.load(out / "eval/report.json")
    meter = CalibrationMeter(CLASSES, ignore_index=3)
    for probs, truth in known:
        meter.update_probs(torch.from_numpy(probs)[None], torch.from_numpy(truth)[None])
    assert report.protocol.pixels == meter.compute().protocol.pixels
    assert report.ece == pytest.approx(meter.compute().ece, abs=1e-3)
    assert report.protocol.images == 2 and report.class_names[1] == "liver"
    assert len(list((out / "eval/overlays").glob("*.png"))) == 6
    assert not (tmp_path / "pickled").exists()


def test_voxels_outside_the_box_are_background_and_counted(case, caplog):
    out, labels, _, known = case
    probs = known[0][0].astype(np.float32)
    probs[:, :2] = 0
    np.savez_compressed(out / "case_001.npz", probabilities=probs)
    found = NnunetFolder(out, labels=labels)[0]
    assert (found.values[0, 0, :2] == 1).all() and (found.values[0, 1:, :2] == 0).all()
    assert f"{2 * 9 * 8} voxels were not predicted" in caplog.text


@pytest.mark.parametrize(
    "damage, problem",
    [
        ("moved", r"case_001\.npz: .* elsewhere"),
        ("cropped", r"case_001\.npz"),
        ("flipped", "axes flipped"),
        ("key", "probabilities is not among softmax"),
        ("no labels", r"case_001\.nii\.gz is not in"),
        ("sums", "sum 0.9"),
    ],
)
def test_what_does_not_fit_is_refused(case, damage, problem):
    out, labels, _, known = case
    probs, truth = known[0]
    if damage == "moved":
        write_nifti(truth, labels / "case_001.nii.gz", np.diag([0.7, 0.7, 2.5, 1.0]))
    elif damage == "cropped":
        write_nifti(truth[1:], labels / "case_001.nii.gz")
    elif damage == "flipped":
        write_nifti(probs.argmax(0)[::-1].astype(np.uint8), out / "case_001.nii.gz")
    elif damage == "key":
        np.savez(out / "case_001.npz", softmax=probs)
    elif damage == "no labels":
        (labels / "case_001.nii.gz").unlink()
    else:
        np.savez(out / "case_001.npz", probabilities=0.9 * probs)
    with pytest.raises(ValueError, match=problem):
        NnunetFolder(out, labels=labels)[0]


def test_folders_of_another_kind_are_refused(case, tmp_path):
    out, labels, _, _ = case
    with pytest.raises(ValueError, match="needs --labels"):
        NnunetFolder(out)
    with pytest.raises(ValueError, match="save_probabilities"):
        NnunetFolder(labels, labels=labels)
    (out / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "liver": 2}}))
    with pytest.raises(ValueError, match=r"but are \[0, 2\]"):
        NnunetFolder(out, labels=labels)


def test_regions_are_sigmoid_outputs(case):
    out, labels, _, known = case
    names = {"background": 0, "whole": [1, 2], "tumour": 2, "ignore": 3}
    (out / "dataset.json").write_text(json.dumps({"labels": names, "regions_class_order": [1, 2]}))
    rng = np.random.default_rng(1)
    meter = CalibrationMeter(2, multilabel=True, per_image=True)
    for name, (_, truth) in zip(("case_001", "case_002"), known, strict=True):
        probs = rng.random((2, *SIZE)).astype(np.float32)
        np.savez_compressed(out / f"{name}.npz", probabilities=probs)
        target = np.stack([(truth == 1) | (truth == 2), truth == 2]).astype(np.int64)
        target[:, truth == 3] = 255
        values = torch.from_numpy(probs)[None]
        meter.update_probs(values, torch.from_numpy(target)[None], names=[name])
    folder = NnunetFolder(out, labels=labels)
    assert folder.class_names == ("whole", "tumour") and folder.multilabel
    report = measure(folder, {"none": None})["none"].report
    expected = meter.compute()
    assert report.ece == pytest.approx(expected.ece, rel=1e-9)
    assert report.protocol.pixels == expected.protocol.pixels
    assert report.protocol.images == 2 and report.protocol.multilabel


def test_the_loss_of_the_trainer_takes_labels_with_a_channel():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, CLASSES, *SIZE, generator=generator)
    labels = torch.randint(0, 4, (2, 1, *SIZE), generator=generator)
    loss = ChannelLabels("dicece+mdca", ignore_index=3)(logits, labels.float())
    assert loss == build_loss("dicece+mdca", ignore_index=3)(logits, labels[:, 0])
    # Regions: one sigmoid each, and a last channel that marks what is ignored.
    hot = torch.cat([labels >= 1, labels >= 2, labels == 2, labels == 3], 1)
    loss = ChannelLabels("nll+mdca", ignore_index=3, multilabel=True)(logits, hot.float())
    known = hot[:, :3].long().masked_fill(hot[:, 3:], 255)
    torch.testing.assert_close(loss, build_loss("nll+mdca", multilabel=True)(logits, known))


def test_the_folds_of_a_training_are_one_holdout_with_labels_of_their_own(case, tmp_path):
    out, labels_ts, _, _ = case
    trainer, labels_tr = tmp_path / "nnUNetTrainer__nnUNetPlans__3d_fullres", tmp_path / "labelsTr"
    labels_tr.mkdir()
    for fold, name in (("0", "case_002"), ("1", "case_001"), ("all", "case_001")):
        validation = trainer / f"fold_{fold}" / "validation"
        validation.mkdir(parents=True)
        for suffix in ("npz", "nii.gz"):
            shutil.copy(out / f"{name}.{suffix}", validation)
    for path in labels_ts.iterdir():
        shutil.copy(path, labels_tr / path.name)
    shutil.copy(out / "dataset.json", trainer)
    whole = NnunetFolder(trainer, labels=labels_tr)
    assert whole.names == ["case_001", "case_002"] and whole.class_names[1] == "liver"
    one = NnunetFolder(trainer / "fold_0" / "validation", labels=labels_tr)
    assert one.names == ["case_002"] and one.class_names == whole.class_names
    base = ["eval", "--format", "nnunet", "--predictions", str(out), "--labels", str(labels_ts)]
    base += ["--fit-labels", str(labels_tr)]
    fitted = [*base, "--fit-predictions", str(trainer), "--posthoc", "ts", "--overlays", "none"]
    assert main([*fitted, "--out", str(tmp_path / "eval")]) == 0
    assert "fitted on 2 hold-out images" in (tmp_path / "eval" / "table.md").read_text()
    assert main(base) == 2  # labels of a hold-out that is not there
    shutil.copy(out / "case_001.npz", trainer / "fold_0" / "validation")
    with pytest.raises(ValueError, match="one name"):
        NnunetFolder(trainer, labels=labels_tr)


def test_the_file_in_the_docs_is_a_trainer(tmp_path, monkeypatch):
    """nnU-Net imports the files of nnUNet_extTrainer and takes what has the trainer's name.

    Stand-ins take the place of its base class and of its wrapper for deep supervision.
    """
    path = "nnunetv2.training"
    modules = ["nnunetv2", path, f"{path}.loss", f"{path}.loss.deep_supervision"]
    modules += [f"{path}.nnUNetTrainer", f"{path}.nnUNetTrainer.nnUNetTrainer"]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    wrapper = sys.modules[f"{path}.loss.deep_supervision"]
    wrapper.DeepSupervisionWrapper = lambda loss, weights: (loss, weights)
    base = type("nnUNetTrainer", (), {"_get_deep_supervision_scales": lambda self: [1, 0.5, 0.25]})
    sys.modules[modules[-1]].nnUNetTrainer = base
    docs = Path(__file__).parents[2] / "docs" / "frameworks.md"
    (code,) = re.findall(
        r"```python\n(from segcal\.integrations\.nnunet.*?)```", docs.read_text(), re.S
    )
    (tmp_path / "mdca.py").write_text(code)
    found = runpy.run_path(str(tmp_path / "mdca.py"))["nnUNetTrainerMDCA"]
    assert issubclass(found, base) and found.__name__ == "nnUNetTrainerMDCA"

    trainer = found()
    trainer.label_manager = SimpleNamespace(ignore_label=3, has_regions=False)
    trainer.enable_deep_supervision = False
    logits, labels = torch.randn(2, 3, 4, 5, 6), torch.randint(0, 4, (2, 1, 4, 5, 6))
    expected = build_loss("dicece+mdca", ignore_index=3)(logits, labels[:, 0])
    assert trainer._build_loss()(logits, labels.float()) == expected
    trainer.enable_deep_supervision = True
    loss, weights = trainer._build_loss()
    assert loss(logits, labels.float()) == expected
    np.testing.assert_allclose(weights, [2 / 3, 1 / 3, 0])


def test_the_trainer_needs_nnunet():
    with pytest.raises(ImportError, match=r"nnunetv2 .* pip install 'segcal\[nnunet\]'"):
        mdca_trainer()
