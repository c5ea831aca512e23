"""Saved predictions of volumes: npz, npy, NIfTI; whole or in parts, one image each."""

import nibabel
import numpy as np
import pytest
import torch

from segcal.cli import main
from segcal.evaluation import saved as reading
from segcal.evaluation.calibrate import fit_calibrators
from segcal.evaluation.evaluate import measure
from segcal.evaluation.overlays import Plane, draw, worst_planes
from segcal.evaluation.saved import PredictionFolder
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.regions import named_regions
from tests.support.framework_batches import CLASSES, batches

SIZE = (12, 10, 9)
FORMATS = ["npz", "compressed", "npy", "nii", "nii.gz"]


def volumes(count=3, seed=0, block=False):
    """`count` pairs of (C, D, H, W) logits and (D, H, W) labels, drawn from half of them.

    With `block`, eight slices are of one class, so that there are voxels far from every edge.
    """
    made = []
    for i in range(count):
        ((logits, _),) = batches(1, images=1, size=SIZE, seed=seed + i)
        generator = torch.Generator().manual_seed(seed + i)
        odds = (logits[0] / 2).softmax(0).flatten(1).T
        labels = odds.multinomial(1, generator=generator).view(SIZE)
        labels[:, 0] = 255
        if block:
            labels[2:10] = 1
        made.append((logits[0].numpy(), labels.numpy().astype(np.uint8)))
    return made


def save(folder, form="npz", **options):
    """Write volumes in a format; what `PredictionFolder` must be told of it."""
    (folder / "labels").mkdir(parents=True)
    stated = (
        {} if form in ("npz", "compressed") else {"kind": "logits", "labels": folder / "labels"}
    )
    for i, (logits, labels) in enumerate(volumes(**options)):
        path = folder / f"case{i}.{form}"
        if form in ("npz", "compressed"):
            write = np.savez if form == "npz" else np.savez_compressed
            write(path.with_suffix(".npz"), logits=logits, labels=labels, image=logits[0])
        elif form == "npy":
            np.save(path, logits)
            np.save(folder / "labels" / f"case{i}.npy", labels)
        else:  # NIfTI counts x, y, z, class
            nibabel.Nifti1Image(logits.T, np.eye(4)).to_filename(path)
            label_file = folder / "labels" / f"case{i}.{form}"
            nibabel.Nifti1Image(labels.T, np.eye(4)).to_filename(label_file)
    return stated


@pytest.fixture
def in_parts(monkeypatch):
    """Reads volumes in parts of two slices."""
    monkeypatch.setattr(reading, "_WHOLE_VOXELS", 0)
    monkeypatch.setattr(reading, "_PART_VOXELS", 2 * CLASSES * SIZE[1] * SIZE[2])


def report_of(source):
    regions = named_regions(["boundary:3", "interior:3", "foreground"], CLASSES)
    return measure(source, {"none": None}, regions=regions)["none"].report()


def assert_same(report, other):
    assert report.protocol == other.protocol
    for name in [*report.scores, "image_ece", "image_ace"]:
        assert getattr(report, name) == pytest.approx(getattr(other, name), rel=1e-9, nan_ok=True)
    for name, interval in report.intervals.items():
        assert interval.low == pytest.approx(other.intervals[name].low, rel=1e-9)
    for name, part in report.regions.items():
        assert part.protocol.pixels > 0
        assert_same(part, other.regions[name])


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_as_it_was_saved(form, tmp_path):
    folder = PredictionFolder(tmp_path, **save(tmp_path, form))
    assert folder.names == ["case0", "case1", "case2"] and folder.num_classes == CLASSES
    for found, (logits, labels) in zip(folder, volumes(), strict=True):
        np.testing.assert_array_equal(found.values[0], logits)
        np.testing.assert_array_equal(found.labels[0], labels)


@pytest.mark.parametrize("form", FORMATS)
def test_parts_give_what_whole_volumes_give(form, tmp_path, request):
    stated = save(tmp_path, form, block=True)
    whole = report_of(PredictionFolder(tmp_path, **stated))
    request.getfixturevalue("in_parts")
    source = PredictionFolder(tmp_path, **stated)
    assert [batch.labels.shape[1] for batch in source] == [2] * 6 * 3
    assert_same(report_of(source), whole)
    assert whole.protocol.images == 3
    meter = CalibrationMeter(CLASSES)
    for logits, labels in volumes(block=True):
        meter.update(torch.from_numpy(logits)[None], torch.from_numpy(labels)[None])
    assert whole.ece == pytest.approx(meter.compute().ece, rel=1e-12)


def save_sigmoids(folder, form, k=3):
    """Write volumes of K sigmoids; class 0 fills eight slices: some voxels are far from edges."""
    folder.mkdir()
    labels_at = folder / "labels"
    labels_at.mkdir()
    for i in range(3):
        rng = np.random.default_rng(i)
        logits = rng.normal(scale=2, size=(k, *SIZE)).astype(np.float32)
        labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 2))).astype(np.uint8)
        labels[0, 2:10] = 1
        labels[:, :, 0] = 255
        path = folder / f"case{i}.{form}"
        if form == "npz":
            np.savez(path, sigmoid_logits=logits, labels=labels, image=logits[0])
        elif form == "npy":
            np.save(path, logits)
            np.save(labels_at / f"case{i}.npy", labels)
        else:
            nibabel.Nifti1Image(logits.T, np.eye(4)).to_filename(path)
            nibabel.Nifti1Image(labels.T, np.eye(4)).to_filename(labels_at / f"case{i}.nii.gz")
    return {} if form == "npz" else {"kind": "sigmoid_logits", "labels": labels_at}


@pytest.mark.parametrize("form", ["npz", "npy", "nii.gz"])
def test_sigmoid_volumes_in_parts_give_what_whole_ones_give(form, tmp_path, request):
    stated = save_sigmoids(tmp_path / "files", form)

    def opened():
        return PredictionFolder(tmp_path / "files", **stated)

    def report_and_temperature():
        names = ["boundary:3", "interior:3", "classes:1", "foreground"]
        regions = named_regions(names, 3, multilabel=True)
        report = measure(opened(), {"none": None}, regions=regions)["none"].report()
        return report, float(fit_calibrators(["ts"], opened)["ts"].temperature_)

    whole, temperature = report_and_temperature()
    request.getfixturevalue("in_parts")
    assert [batch.labels.shape[2] for batch in opened()][:3] == [2, 2, 2]
    parts, fitted = report_and_temperature()
    assert_same(parts, whole)
    assert whole.protocol.images == 3 and fitted == pytest.approx(temperature, rel=1e-6)


def test_one_sigmoid_may_have_labels_without_the_axis_of_classes(tmp_path, in_parts):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(1, *SIZE)), rng.integers(0, 2, SIZE)
    np.savez(tmp_path / "a.npz", sigmoid_logits=logits, labels=labels)
    source = PredictionFolder(tmp_path)
    report = measure(source, {"none": None})["none"].report()
    right = (logits[0] > 0) == (labels == 1)
    assert report.accuracy == pytest.approx(right.mean()) and len(list(source)) > 1
    np.savez(tmp_path / "a.npz", sigmoid_logits=logits.repeat(2, 0), labels=labels)
    with pytest.raises(ValueError, match=r"Expected labels of shape \(2, 12, 10, 9\), but got"):
        list(PredictionFolder(tmp_path).parts(0))


def test_a_temperature_fitted_on_parts_is_that_of_whole_volumes(tmp_path, request):
    save(tmp_path)
    found = []
    for fixture in (None, "in_parts"):
        if fixture:
            request.getfixturevalue(fixture)
        calibrators = fit_calibrators(["ts"], lambda: PredictionFolder(tmp_path))
        found.append(float(calibrators["ts"].temperature_))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(2, rel=0.1)  # what the labels were drawn with


def test_a_bad_part_leaves_out_its_whole_volume(tmp_path, in_parts):
    save(tmp_path, "npy")
    stated = {"kind": "logits", "labels": tmp_path / "labels"}
    logits = np.load(tmp_path / "case1.npy")
    logits[:, -1] = np.nan
    np.save(tmp_path / "case1.npy", logits)
    with pytest.raises(ValueError, match=r"case1\.npy: Expected finite logits"):
        report_of(PredictionFolder(tmp_path, **stated))
    source = PredictionFolder(tmp_path, **stated, skip_bad=True)
    report = report_of(source)
    assert report.protocol.images == 2 and list(source.skipped) == ["case1"]
    assert sorted(image.name for image in report.worst_images) == ["case0", "case2"]


def test_a_large_volume_must_have_labels_of_its_size_and_the_order_of_c(tmp_path, in_parts):
    ((logits, labels),) = volumes(1)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels[:-1])
    with pytest.raises(ValueError, match=r"a\.npz: Expected labels of shape \(12, 10, 9\)"):
        list(PredictionFolder(tmp_path).parts(0))
    np.savez(tmp_path / "a.npz", logits=np.asfortranarray(logits), labels=labels)
    with pytest.raises(ValueError, match=r"a\.npz: Expected a volume .* in C order"):
        list(PredictionFolder(tmp_path).parts(0))


def test_smaller_predictions_are_resized_in_three_dimensions(tmp_path):
    ((logits, labels),) = volumes(1)
    np.savez(tmp_path / "a.npz", logits=logits[:, ::2, ::2, ::3], labels=labels)
    (found,) = PredictionFolder(tmp_path)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(logits[None, :, ::2, ::2, ::3]), SIZE, mode="trilinear"
    )
    torch.testing.assert_close(found.values, expected)


def literal_worst(logits, labels, axis):
    """The plane with the largest sum over bins of |Σ (confidence - right)|."""
    probs = torch.from_numpy(logits).double().softmax(0)
    confidence, predicted = probs.max(0)
    labels = torch.from_numpy(labels.astype(np.int64))
    bins = (confidence * 15).ceil().clamp(1, 15).long()
    sums = []
    for place in range(SIZE[axis]):
        c, p, y, b = (x.select(axis, place) for x in (confidence, predicted, labels, bins))
        valid = y != 255
        gap = torch.zeros(16, dtype=torch.float64)
        gap.index_add_(0, b[valid], (c - (p == y).double())[valid])
        sums.append(float(gap.abs().sum()))
    return int(np.argmax(sums))


@pytest.mark.parametrize("fixture", [None, "in_parts"])
def test_the_worst_plane_of_each_axis_is_drawn(fixture, tmp_path, request):
    if fixture:
        request.getfixturevalue(fixture)
    save(tmp_path)
    source = PredictionFolder(tmp_path)
    (logits, labels) = volumes()[1]
    planes = worst_planes(source, 1)
    assert planes == [Plane(axis, literal_worst(logits, labels, axis)) for axis in range(3)]
    drawn = draw(source, [1], {"none": None})["none"]
    assert [d.name for d in drawn] == [
        f"case1 {letter}={plane.place}" for letter, plane in zip("zyx", planes, strict=True)
    ]
    assert {d.image for d in drawn} == {"case1"}  # by which the table of images finds them
    for plane, one in zip(planes, drawn, strict=True):
        np.testing.assert_array_equal(one.arrays["labels"], plane.of(labels))
        assert one.arrays["image"].dtype == np.uint8
        assert one.png[:4] == b"\x89PNG"


def test_the_command_evaluates_volumes(tmp_path, capsys):
    save(tmp_path / "test")
    save(tmp_path / "fit", seed=10)
    command = ["eval", "--predictions", str(tmp_path / "test"), "--posthoc", "none,ts"]
    command += ["--fit-predictions", str(tmp_path / "fit"), "--regions", "boundary:1"]
    assert main([*command, "--num-overlays", "1", "--resamples", "50"]) == 0
    report = Report.load(tmp_path / "test/eval/report.json")
    assert report.protocol.images == 3 and report.protocol.pixels == 3 * 12 * 9 * 9
    assert Report.load(tmp_path / "test/eval/posthoc/ts/report.json").ece < report.ece
    assert len(list((tmp_path / "test/eval/overlays").glob("*.png"))) == 3
