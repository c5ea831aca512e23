"""Saved predictions: what is read is what was written, and a bad file is one line with its name."""

import gc
import io
import os
import re
import warnings
import weakref
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from segcal import files
from segcal.files import BadFile
from segcal.sources.saved import PredictionFolder

C, H, W = 4, 6, 8


def maps(seed=0, size=(H, W), classes=C):
    """(C, *size) float32 logits and (H, W) labels with one ignored pixel."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, (H, W)).astype(np.uint8)
    labels[0, 0] = 255
    return rng.normal(size=(classes, *size)).astype(np.float32), labels


def softmax(logits, axis):
    exp = np.exp(logits - logits.max(axis, keepdims=True))
    return exp / exp.sum(axis, keepdims=True)


def test_a_manifest_of_comments_states_nothing(tmp_path):
    logits, labels = maps()
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
    (tmp_path / "manifest.yaml").write_text("# kind: logits\n")
    assert PredictionFolder(tmp_path).num_classes == C


def test_one_npz_an_image(tmp_path):
    for i in (1, 0):
        logits, labels = maps(i)
        np.savez(tmp_path / f"im{i}.npz", logits=logits, labels=labels)
    folder = PredictionFolder(tmp_path)
    assert folder.names == ["im0", "im1"]
    assert (len(folder), folder.num_classes, folder.ignore_index) == (2, C, 255)
    assert folder.class_names == ("class 0", "class 1", "class 2", "class 3")
    for i, prediction in enumerate(folder):
        logits, labels = maps(i)
        assert (prediction.names, prediction.kind) == ([f"im{i}"], "logits")
        np.testing.assert_array_equal(prediction.values[0].numpy(), logits)
        np.testing.assert_array_equal(prediction.labels[0].numpy(), labels)
        assert prediction.logits is prediction.values


@pytest.mark.parametrize(
    ("suffix", "layout", "kind", "dtype"),
    [
        (".npz", "chw", "logits", np.float16),
        (".npz", "hwc", "probs", np.float32),
        (".npy", "chw", "probs", np.float64),
        (".npy", "hwc", "logits", ">f4"),
        (".npz", "chw", "probs", np.longdouble),
        (".npy", "hwc", "probs", np.float16),
        (".npz", "hwc", "logits", np.longdouble),
    ],
)
def test_every_way_of_writing_it_reads_the_same(tmp_path, suffix, layout, kind, dtype):
    logits, labels = maps()
    values = (logits if kind == "logits" else softmax(logits, 0)).astype(dtype)
    stored = values if layout == "chw" else values.transpose(1, 2, 0)
    if suffix == ".npz":
        np.savez_compressed(tmp_path / "a.npz", labels=labels, **{kind: stored})
        prediction = PredictionFolder(tmp_path, layout=layout)[0]
    else:
        np.save(tmp_path / "a.npy", stored)
        (tmp_path / "truth").mkdir()
        np.save(tmp_path / "truth" / "a.npy", labels)
        prediction = PredictionFolder(
            tmp_path, layout=layout, kind=kind, labels=tmp_path / "truth"
        )[0]
    assert prediction.kind == kind
    np.testing.assert_array_equal(prediction.values[0].double(), values.astype(np.float64))
    np.testing.assert_array_equal(prediction.labels[0], labels)
    torch.testing.assert_close(
        prediction.logits.softmax(1)[0].double(),
        torch.from_numpy(softmax(logits, 0)).double(),
        atol=1e-3 if dtype is np.float16 else 1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_label_images_give_class_numbers_not_colours(tmp_path, mode):
    logits, labels = maps()
    np.savez(tmp_path / "a.npz", logits=logits)
    (tmp_path / "truth").mkdir()
    image = Image.fromarray(labels.astype(np.uint16) if mode == "I;16" else labels)
    if mode == "P":
        image.putpalette(np.random.default_rng(0).bytes(768))
    assert image.mode == mode
    image.save(tmp_path / "truth" / "a.png")
    prediction = PredictionFolder(tmp_path, labels=tmp_path / "truth")[0]
    np.testing.assert_array_equal(prediction.labels[0], labels)


@pytest.mark.parametrize("name", ["manifest.yaml", "manifest.json"])
def test_a_manifest_states_what_flags_would_and_flags_go_first(tmp_path, name):
    logits, labels = maps()
    np.save(tmp_path / "a.npy", logits.transpose(1, 2, 0))
    (tmp_path / "truth").mkdir()
    Image.fromarray(labels).save(tmp_path / "truth" / "a.png")
    text = (
        '{"kind": "logits", "layout": "hwc", "labels": "truth", "ignore_index": 9, '
        '"class_names": ["sky", "road", "car", "dog"], "group": "^p[0-9]"}'
    )
    (tmp_path / name).write_text(text)
    labels[0, 0] = 9  # 255 is no longer ignored
    Image.fromarray(labels).save(tmp_path / "truth" / "a.png")
    folder = PredictionFolder(tmp_path)
    assert (folder.ignore_index, folder.num_classes) == (9, 4)
    assert folder.class_names == ("sky", "road", "car", "dog")
    np.testing.assert_array_equal(folder[0].values[0], logits)
    assert PredictionFolder(tmp_path, ignore_index=-1).ignore_index == -1
    assert folder.groups_of(["p1_01", "p1_02", "q"]) == ["p1", "p1", "q"]
    assert PredictionFolder(tmp_path, group="^q").group == "^q"


@pytest.mark.parametrize("align_corners", [False, True])
def test_small_predictions_are_resized_to_the_labels(tmp_path, align_corners):
    logits, labels = maps(size=(3, 4))
    np.savez(tmp_path / "a.npz", logits=logits.astype(np.float16), labels=labels)
    np.savez(tmp_path / "b.npz", probs=softmax(logits, 0).astype(np.float16), labels=labels)
    a, b = PredictionFolder(tmp_path, align_corners=align_corners)
    x = torch.from_numpy(logits.astype(np.float16)).float()[None]
    expected = interpolate(x, (H, W), mode="bilinear", align_corners=align_corners)
    torch.testing.assert_close(a.values, expected)
    assert b.values.shape == (1, C, H, W)
    assert a.labels.shape == b.labels.shape == (1, H, W)


def test_resizing_by_hand(tmp_path):
    logits = np.zeros((2, 2, 2), np.float32)
    logits[1] = [[0, 4], [8, 12]]
    np.savez(tmp_path / "a.npz", logits=logits, labels=np.zeros((3, 3), np.int64))
    values = PredictionFolder(tmp_path, align_corners=True)[0].values
    torch.testing.assert_close(values[0, 1], torch.tensor([[0.0, 2, 4], [4, 6, 8], [8, 10, 12]]))


def test_classification_is_the_same_format_without_space(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3)).astype(np.float32)
    labels = np.array([0, 2, 1, 255, 2])
    for i in range(5):
        np.savez(tmp_path / f"{i}.npz", logits=logits[i], labels=labels[i])
    one_by_one = list(PredictionFolder(tmp_path))
    np.savez(tmp_path / "table", logits=logits, labels=labels)
    (table,) = PredictionFolder(tmp_path / "table.npz")
    assert table.values.shape == (5, 3)
    assert table.names == ["table:0", "table:1", "table:2", "table:3", "table:4"]
    torch.testing.assert_close(torch.cat([p.values for p in one_by_one]), table.values)
    torch.testing.assert_close(torch.cat([p.labels for p in one_by_one]), table.labels)


def test_class_255_counts_where_there_are_more_classes(tmp_path):
    logits = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
    np.savez(tmp_path / "a.npz", logits=logits, labels=np.array([255, 299]))
    assert PredictionFolder(tmp_path).ignore_index == -100


def test_the_layout_that_was_not_stated_is_refused_where_only_it_fits(tmp_path):
    logits, labels = maps(size=(3, 4), classes=9)
    np.savez(tmp_path / "a.npz", logits=logits.transpose(1, 2, 0), labels=labels)
    with pytest.raises(BadFile, match=r"a\.npz: .*layout hwc"):
        PredictionFolder(tmp_path)[0]
    assert PredictionFolder(tmp_path, layout="hwc")[0].values.shape == (1, 9, H, W)
    # A network that squeezed the image into a square is no reason to refuse.
    np.savez(tmp_path / "a.npz", logits=maps(size=(5, 5), classes=7)[0], labels=labels % 7)
    assert PredictionFolder(tmp_path)[0].values.shape == (1, 7, H, W)


def test_images_to_draw_on(tmp_path):
    logits, labels = maps()
    image = np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels, image=image)
    np.savez(tmp_path / "b.npz", logits=logits, labels=labels)
    folder = PredictionFolder(tmp_path)
    np.testing.assert_array_equal(folder.image(0), image)
    assert folder.image(1) is None
    (tmp_path / "images").mkdir()
    Image.fromarray(image).save(tmp_path / "images" / "b.png")
    folder = PredictionFolder(tmp_path, images=tmp_path / "images")
    np.testing.assert_array_equal(folder.image(1), image)
    with pytest.raises(BadFile, match=r"a\.npz: its image"):
        folder.image(0)


def test_nan_matters_only_where_pixels_count(tmp_path):
    logits, labels = maps()
    logits[:, 0, 0] = np.nan  # the ignored pixel
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
    assert PredictionFolder(tmp_path)[0].values.shape == (1, C, H, W)


def header_only(shape):
    """A .npy that claims `shape` and holds nothing."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def bad_files():
    logits, labels = maps()
    nan, out_of_range = logits.copy(), labels.copy()
    nan[1, 2, 3] = np.nan
    out_of_range[1, 1] = 77
    good = io.BytesIO()
    np.savez(good, logits=logits, labels=labels)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w") as archive:
        archive.writestr("logits.npy", header_only((10**4, 10**5, 10**5)))
    two = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(two, "w") as archive:
        warnings.simplefilter("ignore")  # of the second one
        for array in (logits, logits + 1):
            with archive.open("logits.npy", "w") as member:
                np.save(member, array)
    return {
        "no labels": ({"logits": logits}, "no labels"),
        "no values": ({"labels": labels}, "one key"),
        "both kinds": ({"logits": logits, "probs": logits, "labels": labels}, "one key"),
        "four axes": ({"logits": logits[None], "labels": labels}, "fit"),
        "flat labels": ({"logits": logits, "labels": labels.ravel()}, "fit"),
        "small labels": ({"logits": logits, "labels": labels[1:]}, "shrunk"),
        "empty": ({"logits": logits[:, :0], "labels": labels[:0]}, "empty"),
        "classes": ({"logits": logits[:3], "labels": labels}, "4 classes"),
        "label range": ({"logits": logits, "labels": out_of_range}, "77"),
        "float labels": ({"logits": logits, "labels": labels / 1.0}, "integer"),
        "whole logits": ({"logits": labels[None], "labels": labels}, "floating|classes"),
        "nan": ({"logits": nan, "labels": labels}, "nan"),
        "infinite": ({"logits": logits + np.inf, "labels": labels}, "inf"),
        "all classes masked": ({"logits": logits - np.inf, "labels": labels}, "inf"),
        "not probs": ({"probs": logits, "labels": labels}, "probabilities"),
        "unnormalised": ({"probs": np.full_like(logits, 0.2), "labels": labels}, "sum"),
        "pickle": ({"logits": np.array([{}], dtype=object), "labels": labels}, "pickled"),
        "text": ({"logits": np.array(["a"]), "labels": labels}, "numbers"),
        "truncated": (good.getvalue()[:-40], "damaged"),
        "flipped bit": (good.getvalue().replace(logits.tobytes()[8:16], b"12345678"), "CRC"),
        "no archive": (b"hello", "damaged"),
        "nothing": (b"", "damaged"),
        "absurd size": (bomb.getvalue(), "damaged"),
        "two of one name": (two.getvalue(), "one name"),
    }


def test_a_bad_file_is_one_line_that_names_it(tmp_path):
    for case in bad_files():
        contents, reason = bad_files()[case]
        logits, labels = maps()
        np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
        if isinstance(contents, bytes):
            (tmp_path / "bad one.npz").write_bytes(contents)
        else:
            np.savez(tmp_path / "bad one.npz", **contents)
        folder = PredictionFolder(tmp_path)
        assert folder[0].names == ["a"]
        with pytest.raises(BadFile, match=reason) as caught:
            folder[1]
        assert re.match(r"\S*bad one\.npz: ", str(caught.value))
        assert "\n" not in str(caught.value)


def test_the_first_bad_file_does_not_hide_the_number_of_classes(tmp_path):
    logits, labels = maps()
    (tmp_path / "a.npz").write_bytes(b"")
    np.savez(tmp_path / "b.npz", logits=logits, labels=labels)
    folder = PredictionFolder(tmp_path)
    assert folder.num_classes == C
    (tmp_path / "b.npz").write_bytes(b"")
    with pytest.raises(BadFile, match=r"a\.npz"):
        PredictionFolder(tmp_path)


@pytest.mark.parametrize("contents", [None, b"not a png", "rgb"])
def test_bad_label_images_are_named(tmp_path, contents):
    logits, _ = maps()
    np.savez(tmp_path / "a.npz", logits=logits)
    (tmp_path / "truth").mkdir()
    path = tmp_path / "truth" / "a.png"
    if contents == "rgb":
        Image.new("RGB", (W, H)).save(path)
    elif contents is not None:
        path.write_bytes(contents)
    with pytest.raises(BadFile, match=r"/a\.(npz|png): "):
        PredictionFolder(tmp_path, labels=tmp_path / "truth")[0]


def test_an_array_larger_than_the_limit_is_not_loaded(tmp_path, monkeypatch):
    logits, labels = maps()
    wide = np.zeros((C, 60, 80), np.float32)
    np.savez_compressed(tmp_path / "a.npz", logits=wide, labels=np.zeros((60, 80), np.uint8))
    np.savez(tmp_path / "b.npz", logits=logits, labels=np.zeros((600, 800), np.uint8))
    monkeypatch.setattr(files, "MAX_BYTES", 10_000)
    folder = PredictionFolder(tmp_path, num_classes=C)
    for index in (0, 1):  # too large as stored, too large once resized
        with pytest.raises(BadFile, match="GiB"):
            folder[index]


@pytest.mark.parametrize("ending", [".npy", ".nii.gz"])
def test_files_without_keys_must_say_what_they_hold(tmp_path, ending):
    logits, _ = maps()
    with (tmp_path / f"a{ending}").open("wb") as file:
        np.save(file, logits)
    with pytest.raises(BadFile, match=rf"a{ending}: .*kind=logits"):
        PredictionFolder(tmp_path)[0]


def test_a_bad_manifest_is_one_line(tmp_path):
    for text, reason in [
        ("layout: nchw", "layout"),
        ("kind: scores", "kind"),
        ("axes: xy", "axes"),
        ("classes: 4", "classes"),
        ("num_classes: [4]", "num_classes"),
        ("num_classes: 1", "at least 2"),
        ("{num_classes: 3, class_names: [a, b]}", "class_names"),
        ("labels: nowhere", "labels must be a folder"),
        ("- a\n- b", "key: value"),
        ("a: [", "manifest.yaml: "),
        ("!!python/object/apply:os.system ['true']", "manifest.yaml: "),
    ]:
        np.savez(tmp_path / "a.npz", logits=maps()[0])
        (tmp_path / "manifest.yaml").write_text(text)
        with pytest.raises(ValueError, match=reason) as caught:
            PredictionFolder(tmp_path)
        assert "\n" not in str(caught.value)


def test_folders_without_predictions_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        PredictionFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no predictions"):
        PredictionFolder(tmp_path)
    np.save(tmp_path / "a.npy", maps()[0])
    np.savez(tmp_path / "a.npz", logits=maps()[0])
    with pytest.raises(ValueError, match=r"a\.npy and .*a\.npz"):
        PredictionFolder(tmp_path)


@settings(max_examples=150)
@given(data=st.data())
def test_damage_anywhere_is_found_or_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    logits, labels = maps()
    np.savez(folder / "a.npz", logits=logits, labels=labels)
    raw = bytearray((folder / "a.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))]
    (folder / "a.npz").write_bytes(raw)
    try:
        prediction = PredictionFolder(folder)[0]
    except BadFile as error:
        assert "a.npz: " in str(error)
        assert "\n" not in str(error)
    else:
        assert prediction.values.isfinite().all()


def test_nothing_of_a_file_is_kept(tmp_path):
    for i in range(4):
        logits, labels = maps(i)
        np.savez(tmp_path / f"{i}.npz", logits=logits, labels=labels)
    folder = PredictionFolder(tmp_path)
    seen = []
    for index in range(len(folder)):
        prediction = folder[index]
        seen.append(weakref.ref(prediction.values))
        del prediction
        gc.collect()
        assert all(reference() is None for reference in seen)


def sigmoid_maps(seed=0, size=(H, W)):
    """(C, *size) float32 logits, and labels (C, H, W) of 0 and 1 with one ignored in one class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (C, H, W)).astype(np.uint8)
    labels[1, 0, 0] = 255
    return rng.normal(size=(C, *size)).astype(np.float32), labels


@pytest.mark.parametrize(
    ("layout", "kind", "labels_in"),
    [
        ("chw", "sigmoid_logits", "npz"),
        ("hwc", "sigmoid_probs", "npy"),
        ("hwc", "sigmoid_logits", "png"),
    ],
)
def test_sigmoid_outputs_have_a_label_map_for_each_class(tmp_path, layout, kind, labels_in):
    logits, labels = sigmoid_maps()
    values = logits if kind == "sigmoid_logits" else 1 / (1 + np.exp(-logits))
    stored = values if layout == "chw" else values.transpose(1, 2, 0)
    stated = {"layout": layout, "class_names": ("a", "b", "c", "d")}
    if labels_in == "npz":
        np.savez(tmp_path / "x.npz", labels=labels, **{kind: stored})
    else:
        np.savez(tmp_path / "x.npz", **{kind: stored})
        stated["labels"] = tmp_path / "truth"
        for name, mask in zip(stated["class_names"], labels, strict=True):
            (tmp_path / "truth" / name).mkdir(parents=True)
            if labels_in == "png":
                Image.fromarray(mask).save(tmp_path / "truth" / name / "x.png")
        if labels_in == "npy":
            np.save(tmp_path / "truth" / "x.npy", labels)
    folder = PredictionFolder(tmp_path, **stated)
    assert folder.multilabel and folder.num_classes == C
    prediction = folder[0]
    assert prediction.multilabel and prediction.kind == kind
    np.testing.assert_array_equal(prediction.labels[0], labels)
    np.testing.assert_array_equal(prediction.values[0], values)
    np.testing.assert_allclose(prediction.logits[0], logits, atol=1e-5)
    np.testing.assert_allclose(prediction.probs[0], 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_small_sigmoid_outputs_are_resized_and_one_output_is_binary(tmp_path):
    logits, labels = sigmoid_maps(size=(H // 2, W // 2))
    np.savez(tmp_path / "x.npz", sigmoid_logits=logits, labels=labels)
    resized = PredictionFolder(tmp_path)[0].values
    expected = interpolate(torch.from_numpy(logits)[None], (H, W), mode="bilinear")
    torch.testing.assert_close(resized, expected)
    np.savez(tmp_path / "x.npz", sigmoid_logits=logits[:1], labels=labels[0])
    folder = PredictionFolder(tmp_path)
    assert folder.num_classes == 1 and folder[0].labels.shape == (1, 1, H, W)


@pytest.mark.parametrize("shape", [(C,), (5, C)])
def test_sigmoid_outputs_of_whole_images(tmp_path, shape):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, shape)
    np.savez(tmp_path / "x.npz", sigmoid_logits=rng.normal(size=shape), labels=labels)
    folder = PredictionFolder(tmp_path)
    images = 1 if len(shape) == 1 else shape[0]
    assert (folder.num_images, folder.num_classes) == (images, C)
    assert folder[0].labels.shape == folder[0].values.shape == (images, C)


BAD_SIGMOIDS = {
    "a label map for all": (lambda x, y: (x, y[0]), "fit"),
    "labels": (lambda x, y: (x, y + (y == 1)), "2"),
    "nan": (lambda x, y: (x * np.nan, y), "nan"),
    "layout": (lambda x, y: (x.transpose(1, 2, 0), y), "fit"),
}


def test_bad_sigmoid_outputs_are_one_line(tmp_path):
    for name in BAD_SIGMOIDS:
        spoil, message = BAD_SIGMOIDS[name]
        values, labels = spoil(*sigmoid_maps())
        np.savez(tmp_path / "x.npz", sigmoid_logits=values, labels=labels)
        with pytest.raises(BadFile, match=f"x.npz: .*{message}"):
            PredictionFolder(tmp_path, num_classes=C)[0]


def test_class_masks_that_are_missing_or_of_another_size_are_named(tmp_path):
    logits, labels = sigmoid_maps()
    np.savez(tmp_path / "x.npz", sigmoid_logits=logits)
    for name, mask in zip("abcd", labels, strict=True):
        (tmp_path / "truth" / name).mkdir(parents=True)
        Image.fromarray(mask).save(tmp_path / "truth" / name / "x.png")
    stated = {"labels": tmp_path / "truth"}
    with pytest.raises(BadFile, match=r"x.npz: .*class_names"):
        PredictionFolder(tmp_path, **stated)[0]
    stated["class_names"] = tuple("abcd")
    Image.fromarray(labels[2, 1:]).save(tmp_path / "truth" / "c" / "x.png")
    with pytest.raises(BadFile, match=r"c/x.png has the size"):
        PredictionFolder(tmp_path, **stated)[0]
    (tmp_path / "truth" / "b" / "x.png").unlink()
    with pytest.raises(BadFile, match=r"x.npz: its label .*truth/b"):
        PredictionFolder(tmp_path, **stated)[0]


def test_files_of_softmax_and_sigmoids_do_not_mix(tmp_path):
    logits, labels = sigmoid_maps()
    np.savez(tmp_path / "a.npz", sigmoid_logits=logits, labels=labels)
    np.savez(tmp_path / "b.npz", logits=logits, labels=labels[0])
    folder = PredictionFolder(tmp_path)
    with pytest.raises(BadFile, match=r"b.npz: .*one kind"):
        folder[1]


def test_a_masked_class_is_fine_in_files_as_in_the_meter(tmp_path):
    logits, labels = maps()
    wrong = (labels + 1) % C
    np.put_along_axis(logits, wrong[None].astype(int), -np.inf, 0)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
    assert PredictionFolder(tmp_path)[0].values.isinf().any()
    wrong[labels != 255] = labels[labels != 255]
    np.put_along_axis(logits, wrong[None].astype(int), -np.inf, 0)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
    with pytest.raises(BadFile, match=r"a\.npz: "):
        PredictionFolder(tmp_path)[0]


def test_a_label_of_the_wrong_size_is_found_before_anything_is_unpacked(tmp_path, monkeypatch):
    logits, labels = maps()
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels[1:])
    folder = PredictionFolder(tmp_path)
    monkeypatch.setattr(files, "_read_array", lambda *_, **__: pytest.fail("an array was read"))
    with pytest.raises(BadFile, match="shrunk"):
        folder[0]


@pytest.mark.parametrize("place", ["a.npz", "manifest.yaml", "truth/b.png"])
def test_a_pipe_does_not_hang(tmp_path, place):
    logits, labels = maps()
    (tmp_path / "truth").mkdir()
    np.savez(tmp_path / "b.npz", logits=logits)
    os.mkfifo(tmp_path / place)
    with pytest.raises(ValueError, match=r"regular file|its label"):
        list(PredictionFolder(tmp_path, labels=tmp_path / "truth"))
    if place == "a.npz":
        Image.fromarray(labels).save(tmp_path / "truth" / "b.png")
        folder = PredictionFolder(tmp_path, labels=tmp_path / "truth", skip_bad=True)
        assert [batch.names for batch in folder] == [["b"]]
        assert "regular" in folder.skipped["a"]


def test_a_fingerprint_changes_with_files_and_format(tmp_path):
    logits, labels = maps()
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels)
    first = PredictionFolder(tmp_path).fingerprint()
    assert first == PredictionFolder(tmp_path).fingerprint()
    assert first != PredictionFolder(tmp_path, ignore_index=254).fingerprint()
    np.savez(tmp_path / "a.npz", logits=logits + 1, labels=labels)
    assert first != PredictionFolder(tmp_path).fingerprint()


def test_some_of_the_files(tmp_path):
    for i in range(7):
        logits, labels = maps(i)
        np.savez(tmp_path / f"{i}.npz", logits=logits, labels=labels)
    folder = PredictionFolder(tmp_path)
    assert folder.shard(1, 3).names == ["1", "4"]
    assert folder.limited(3).names == ["0", "3", "6"] and folder.limited(9).names == folder.names
    assert folder.limited(3).num_images == 3 == len(list(folder.limited(3)))
    with pytest.raises(ValueError, match="too few"):
        folder.shard(0, 8)
    with pytest.raises(ValueError, match="--model"):
        folder.shifted(None)
