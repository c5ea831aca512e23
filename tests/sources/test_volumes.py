"""Saved predictions of volumes: npz, npy, NIfTI, in either order of axes; one image each."""

import nibabel
import numpy as np
import pytest
import torch

from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.measure import measure
from segcal.evaluation.overlays import draw, worst_planes
from segcal.files import BadFile
from segcal.metrics import CalibrationMeter
from segcal.metrics.regions import named_regions
from segcal.sources.saved import PredictionFolder
from tests.support.framework_batches import CLASSES, batches

SIZE = (12, 10, 9)
FORMATS = ["compressed", "npy", "nii", "nii.gz"]


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


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_as_it_was_saved(form, tmp_path):
    folder = PredictionFolder(tmp_path, **save(tmp_path, form))
    assert folder.names == ["case0", "case1", "case2"] and folder.num_classes == CLASSES
    for found, (logits, labels) in zip(folder, volumes(), strict=True):
        np.testing.assert_array_equal(found.values[0], logits)
        np.testing.assert_array_equal(found.labels[0], labels)


def test_a_volume_is_one_image_of_the_report(tmp_path):
    stated = save(tmp_path, "nii.gz", block=True)
    source = PredictionFolder(tmp_path, **stated)
    regions = named_regions(["boundary:3", "interior:3", "foreground"], CLASSES)
    report = measure(source, {"none": None}, regions=regions)["none"].report
    assert report.protocol.images == 3
    meter = CalibrationMeter(CLASSES)
    for logits, labels in volumes(block=True):
        meter.update(torch.from_numpy(logits)[None], torch.from_numpy(labels)[None])
    assert report.ece == pytest.approx(meter.compute().ece, rel=1e-12)
    edges, rest = (report.regions[name].protocol.pixels for name in ("boundary:3", "interior:3"))
    assert edges + rest == report.protocol.pixels and min(edges, rest) > 0


def test_one_sigmoid_may_have_labels_without_the_axis_of_classes(tmp_path):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(1, *SIZE)), rng.integers(0, 2, SIZE)
    np.savez(tmp_path / "a.npz", sigmoid_logits=logits, labels=labels)
    report = measure(PredictionFolder(tmp_path), {"none": None})["none"].report
    right = (logits[0] > 0) == (labels == 1)
    assert report.accuracy == pytest.approx(right.mean())
    np.savez(tmp_path / "a.npz", sigmoid_logits=logits.repeat(2, 0), labels=labels)
    with pytest.raises(ValueError, match="fit labels"):
        PredictionFolder(tmp_path)[0]


# Axes: nibabel and NIfTI count x, y, z; SimpleITK, nnU-Net and segcal z, y, x --------------------


def save_mixed(folder, size, order, *, nifti="labels"):
    """A perfect prediction and its labels: one of them in NIfTI, the other an array in `order`."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, size)  # z, y, x
    logits = 20.0 * (np.arange(CLASSES)[:, None, None, None] == labels)
    (folder / "labels").mkdir(parents=True)
    image = nibabel.Nifti1Image((labels if nifti == "labels" else logits).T.astype(float), None)
    if nifti == "labels":
        image.to_filename(folder / "labels" / "a.nii.gz")
        np.savez(
            folder / "a.npz", logits=logits if order == "zyx" else logits.transpose(0, 3, 2, 1)
        )
    else:
        image.to_filename(folder / "a.nii.gz")
        np.save(folder / "labels" / "a.npy", labels if order == "zyx" else labels.T)
    return {"kind": "logits", "labels": folder / "labels"}


def accuracy(folder, **stated):
    source = PredictionFolder(folder, **stated)
    return measure(source, {"none": None})["none"].report.accuracy


@pytest.mark.parametrize("nifti", ["labels", "predictions"])
@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_the_order_of_axes_is_found_by_shape_where_only_one_fits(tmp_path, order, nifti):
    stated = save_mixed(tmp_path, (5, 6, 7), order, nifti=nifti)
    assert accuracy(tmp_path, **stated) == 1
    assert accuracy(tmp_path, **stated, axes=order) == 1


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_a_cube_fits_both_ways_so_the_order_must_be_stated(tmp_path, order):
    stated = save_mixed(tmp_path, (6, 6, 6), order)
    with pytest.raises(BadFile, match=r"axes xyz .* zyx") as caught:
        PredictionFolder(tmp_path, **stated)[0]
    assert "\n" not in str(caught.value)
    assert accuracy(tmp_path, **stated, axes=order) == 1
    other = {"xyz": "zyx", "zyx": "xyz"}[order]
    assert accuracy(tmp_path, **stated, axes=other) < 0.6
    (tmp_path / "manifest.yaml").write_text(f"axes: {order}\n")
    assert accuracy(tmp_path, **stated) == 1


def test_arrays_of_one_file_have_one_order(tmp_path):
    ((logits, labels),) = volumes(1)
    turned = {"logits": logits.transpose(0, 3, 2, 1), "labels": labels.T, "image": labels.T}
    np.savez(tmp_path / "a.npz", **turned)
    as_they_are, read = (PredictionFolder(tmp_path, axes=axes) for axes in (None, "xyz"))
    np.testing.assert_array_equal(as_they_are[0].labels[0], labels.T)
    np.testing.assert_array_equal(read[0].values[0], logits)
    np.testing.assert_array_equal(read[0].labels[0], labels)
    np.testing.assert_array_equal(read.image(0), labels)
    np.testing.assert_array_equal(as_they_are.image(0), labels.T)


def test_smaller_predictions_keep_their_order(tmp_path):
    stated = save_mixed(tmp_path, (8, 6, 4), "xyz")
    with np.load(tmp_path / "a.npz") as stored:
        np.savez(tmp_path / "a.npz", logits=stored["logits"][:, ::2, ::2, ::2])
    assert PredictionFolder(tmp_path, **stated)[0].values.shape[2:] == (8, 6, 4)


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


def test_the_worst_plane_of_each_axis_is_drawn(tmp_path):
    save(tmp_path)
    source = PredictionFolder(tmp_path)
    (logits, labels) = volumes()[1]
    planes = worst_planes(source, source[1])
    assert planes == [(axis, literal_worst(logits, labels, axis)) for axis in range(3)]
    drawn = draw(source, [1], {"none": None})["none"]
    assert [d.name for d in drawn] == [f"case1 {'zyx'[axis]}={place}" for axis, place in planes]
    assert {d.of for d in drawn} == {"case1"}  # by which the table of images finds them
    for (axis, place), one in zip(planes, drawn, strict=True):
        np.testing.assert_array_equal(one.labels, labels.take(place, axis))
        assert one.image.dtype == np.uint8


def test_volumes_are_evaluated_and_fitted(tmp_path):
    save(tmp_path / "test")
    save(tmp_path / "fit", seed=10)
    test, fit = (PredictionFolder(tmp_path / name) for name in ("test", "fit"))
    found = evaluate_source(
        test, holdout=fit, posthoc=["ts"], regions=["boundary:1"], num_overlays=1, resamples=50
    )
    report = found.reports["none"]
    assert report.protocol.images == 3 and report.protocol.pixels == 3 * 12 * 9 * 9
    assert found.reports["ts"].ece < report.ece
    temperature = float(found.calibrators["ts"].temperature_)
    assert temperature == pytest.approx(2, rel=0.1)  # what the labels were drawn with
    assert len(found.overlays["ts"]) == 3
