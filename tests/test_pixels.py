import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import segcal
from segcal import CalibrationMeter
from segcal.pixels import check_batch, flatten, is_distribution, label_mass
from segcal.sources.saved import PredictionFolder


def rows_of(pixels):
    """(P, C) logits of the valid pixels, in order."""
    return pixels.dense.movedim(1, 2)[pixels.valid]


def labels_of(pixels):
    return pixels.target[pixels.valid]


def test_an_ignore_index_is_a_number_and_no_class():
    logits, labels = torch.zeros(1, 2, 3), torch.zeros(1, 3).long()
    for ignore_index in (1.5, "255", 2**63, -(10**30)):
        with pytest.raises(ValueError, match="ignore_index must be an integer"):
            flatten(logits, labels, ignore_index)
    for ignore_index in (0, 1):
        with pytest.raises(ValueError, match="is one of the 2 classes"):
            flatten(logits, labels, ignore_index)
        with pytest.raises(ValueError, match="is one of the 2 classes"):
            CalibrationMeter(2, ignore_index=ignore_index)
    flatten(logits, labels, 2)
    with pytest.raises(ValueError, match="is one of the 2 classes"):
        CalibrationMeter(5, ignore_index=1, multilabel=True)
    assert CalibrationMeter(5, ignore_index=2, multilabel=True).settings.ignore_index == 2


@pytest.mark.parametrize(("classes", "ignored"), [(2, 255), (255, 255), (256, -100), (1000, -100)])
def test_the_default_ignore_index_is_no_class(classes, ignored):
    labels = torch.tensor([[0, ignored, classes - 1]])
    assert labels_of(flatten(torch.zeros(1, classes, 3), labels)).tolist() == [0, classes - 1]
    assert CalibrationMeter(classes).settings.ignore_index == ignored
    with pytest.raises(ValueError, match="Expected labels"):
        flatten(torch.zeros(1, classes, 3), labels, -7)


def test_compact_view_lists_valid_pixels_in_image_order():
    logits = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).reshape(2, 3, 2, 2)
    labels = torch.tensor([[[0, 255], [2, 1]], [[255, 255], [1, 0]]])
    pixels = flatten(logits, labels)
    assert labels_of(pixels).tolist() == [0, 2, 1, 1, 0]
    # Pixel (n, h, w) of class c holds 12 n + 4 c + 2 h + w.
    assert rows_of(pixels).tolist() == [
        [0, 4, 8],
        [2, 6, 10],
        [3, 7, 11],
        [14, 18, 22],
        [15, 19, 23],
    ]


@given(
    spatial=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from(
        [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64]
    ),
    ignore=st.sampled_from([100, 3, -1]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_label_dtype_equals_a_loop(spatial, dtype, ignore, seed):
    ignore = ignore if dtype.is_signed else 100
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, *spatial, generator=generator)
    labels = torch.randint(0, 3, (2, *spatial), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = ignore
    rows, wanted = [], []
    for index in torch.ones_like(labels).nonzero().tolist():
        n, *at = index
        if labels[tuple(index)] != ignore:
            rows.append(logits[(n, slice(None), *at)])
            wanted.append(int(labels[tuple(index)]))
    pixels = flatten(logits, labels.to(dtype), ignore)
    assert labels_of(pixels).tolist() == wanted
    assert torch.equal(rows_of(pixels), torch.stack(rows) if rows else torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_keep_their_dtype_and_storage(dtype):
    logits = torch.zeros(2, 3, 4, 4, dtype=dtype)
    pixels = flatten(logits, torch.zeros(2, 4, 4, dtype=torch.uint8))
    assert pixels.dense.dtype is dtype
    assert pixels.dense.data_ptr() == logits.data_ptr()


def test_one_by_one_output_takes_plain_class_labels():
    logits, labels = torch.randn(4, 3, 1, 1), torch.tensor([0, 1, 2, 255])
    assert torch.equal(
        rows_of(flatten(logits, labels)), rows_of(flatten(logits[..., 0, 0], labels))
    )


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (torch.zeros(3), torch.zeros(3).long(), r"\(N, C, \*S\), but got \(3,\)"),
        (torch.zeros(2, 3).long(), torch.zeros(2).long(), "floating dtype, but got torch.int64"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4).long(), r"2 classes.*\(2, 1, 4, 4\)"),
        (torch.zeros(2, 3), torch.zeros(2), "integer dtype, but got torch.float32"),
        (torch.zeros(2, 3), torch.zeros(2).bool(), "integer dtype, but got torch.bool"),
        (
            torch.zeros(2, 3, 4, 4),
            torch.zeros(2, 1, 4, 4).long(),
            r"shape \(2, 4, 4\) for logits of shape \(2, 3, 4, 4\), but got \(2, 1, 4, 4\)",
        ),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 8, 8).long(), r"\(2, 4, 4\).*\(2, 8, 8\)"),
    ],
)
def test_shape_and_dtype_mistakes_name_expected_and_got(logits, labels, says):
    with pytest.raises(ValueError, match=says):
        flatten(logits, labels)


def test_out_of_range_labels_are_named_counted_and_placed():
    logits, labels = torch.zeros(2, 21, 1, 3), torch.tensor([[[20, 0, 0]], [[255, 21, 21]]])
    with pytest.raises(ValueError) as error:
        flatten(logits, labels)
    assert str(error.value) == (
        "Expected labels in 0..20 (21 classes) or ignore_index=255, but got 21 in 2 pixels, first "
        "at image 1 of the batch, pixel (0, 1); if label 21 means ignored, state --ignore-index 21"
    )
    with pytest.raises(ValueError, match=r"got -1, 22 in 3 pixels, .* pixel \(0, 0\)$"):
        flatten(logits, labels.masked_fill(labels == 21, 22).masked_fill(labels == 20, -1))


class OnAccelerator(torch.Tensor):
    """Says that it is on a GPU, and refuses to be looked at, which would wait for the GPU."""

    @property
    def device(self):
        return torch.device("cuda")

    def _look(self, *_):
        raise AssertionError("waits for the device")

    __bool__ = __int__ = __float__ = __index__ = item = tolist = numpy = cpu = nonzero = _look


@pytest.mark.parametrize("spatial", [(), (3,), (2, 3)], ids=str)
def test_accelerator_masks_and_counts_labels_out_of_range_without_waiting(spatial):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, *spatial, generator=generator)
    labels = torch.randint(-2, 7, (9, *spatial), generator=generator)
    labels[0] = 255
    outside = ((labels < 0) | (labels > 3)) & (labels != 255)
    found = flatten(logits.as_subclass(OnAccelerator), labels.as_subclass(OnAccelerator))
    expected = flatten(logits, labels.masked_fill(outside, 255))
    assert found.out_of_range.as_subclass(torch.Tensor) == outside.sum() > 0
    for name in ("dense", "target", "valid"):
        tensor = getattr(found, name)
        assert isinstance(tensor, OnAccelerator)
        assert torch.equal(tensor.as_subclass(torch.Tensor), getattr(expected, name))


def test_the_stand_in_for_an_accelerator_notices_a_look():
    with pytest.raises(AssertionError, match="waits for the device"):
        bool(torch.ones(2).as_subclass(OnAccelerator).any())


def test_mass_of_labels_counts_what_is_valid_by_its_class():
    labels = torch.tensor([[0, 2, 255], [1, 1, 255]])
    assert label_mass(labels, 255) == 4
    assert label_mass(labels, 255, torch.tensor([1.0, 10.0, 100.0])) == 121
    several = torch.tensor([[[0, 1], [1, 255]]])  # (1, K = 2, 2)
    assert label_mass(several, 255, torch.tensor([1.0, 10.0]), multilabel=True) == 12
    assert label_mass(several[:, 0], 255, torch.tensor([3.0]), multilabel=True) == 6


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounded_softmax_is_a_distribution(dtype):
    for k in (2, 21, 1000):
        torch.manual_seed(k)
        check_rounded((3 * torch.randn(500, k, dtype=torch.float64)).softmax(1), dtype)


def check_rounded(probs, dtype):
    assert is_distribution(probs.to(dtype), 1).all()
    assert is_distribution(probs.to(dtype).double(), 1, rounded_to=dtype).all()
    assert is_distribution(probs.to(dtype).T, 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_by_hand(dtype):
    off = {torch.float16: 8 / 1024, torch.bfloat16: 8 / 128}.get(dtype, 1e-4)
    values = [[0.5, 0.5], [1.0, 0.0], [1.2, -0.2], [0.5, 0.5 + 2 * off], [0.5, 0.5 + off / 2]]
    values += [[0.5, float("nan")], [float("inf"), 0.0], [0.2, 0.2], [2.0, 1.0]]
    expected = [True, True, False, False, True, False, False, False, False]
    assert is_distribution(torch.tensor(values, dtype=dtype), 1).tolist() == expected


def asked(probs, folder):
    """Who takes two pixels of these (C,) probabilities: meter, file, overlay."""
    image = torch.stack([probs, probs], 1)[:, :, None]  # (C, 2, 1)
    labels = torch.tensor([[0], [1]])
    np.savez(folder / "a.npz", probs=image.numpy(), labels=labels.numpy())
    takers = {
        "meter": lambda: segcal.CalibrationMeter(len(probs)).update_probs(
            image[None], labels[None]
        ),
        "file": lambda: PredictionFolder(folder)[0],
        "overlay": lambda: segcal.viz.calibration_overlay(None, image, labels),
    }
    found = {}
    for name, take in takers.items():
        try:
            take()
            found[name] = True
        except ValueError as error:
            assert "probabilities" in str(error)
            found[name] = False
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "values", [[0.7, 0.3], [1.0, 0.0], [1.2, -0.2], [0.8, 0.3], [0.4, 0.4], [3.0, -2.0]]
)
def test_meter_files_and_overlays_agree(tmp_path, values, dtype):
    probs = torch.tensor(values, dtype=dtype)
    expected = bool(is_distribution(probs, 0))
    assert asked(probs, tmp_path) == dict.fromkeys(("meter", "file", "overlay"), expected)


INF = math.inf
LOGITS = {  # of one pixel with label 0: (values, whether it can be counted)
    "finite": ([1.0, 2.0, 3.0], True),
    "a masked class": ([1.0, -INF, 3.0], True),
    "finfo.min": ([1.0, torch.finfo(torch.float32).min, 3.0], True),
    "masked but for the label": ([1.0, -INF, -INF], True),
    "the label is masked": ([-INF, 2.0, 3.0], False),
    "all are masked": ([-INF, -INF, -INF], False),
    "nan": ([1.0, math.nan, 3.0], False),
    "inf": ([1.0, INF, 3.0], False),
}


@pytest.mark.parametrize("name", LOGITS)
def test_meter_and_validator_take_the_same_logits(name):
    values, fine = LOGITS[name]
    logits = torch.tensor([[0.0, 0.0, 0.0], values]).T[None]  # (1, 3, 2)
    for label, taken in ((0, fine), (255, True)):
        labels = torch.tensor([[0, label]])
        for take in (check_batch, CalibrationMeter(3).update):
            if taken:
                take(logits, labels)
            else:
                with pytest.raises(ValueError, match=r"pixel \(1\)"):
                    take(logits, labels)
    if name != "the label is masked":  # without labels, the predicted class must be possible
        if fine:
            check_batch(logits)
        else:
            with pytest.raises(ValueError, match=r"pixel \(1\)"):
                check_batch(logits)


def test_sigmoid_outputs_are_checked_one_by_one():
    z = torch.tensor([[[0.0, 3.0], [-INF, 2.0]]])  # (1, K = 2, 2)
    labels = torch.tensor([[[0, 1], [0, 255]]])
    check_batch(z, labels, multilabel=True)
    check_batch(z, multilabel=True)
    with pytest.raises(ValueError, match=r"finite NLL .* pixel \(0\), class 1"):
        check_batch(z, labels.masked_fill(z == -INF, 1), multilabel=True)
    for bad in (math.nan, INF):
        with pytest.raises(ValueError, match=r"finite logits.* pixel \(0\), class 1"):
            check_batch(z.masked_fill(z == -INF, bad), labels, multilabel=True)
    check_batch(z.sigmoid(), labels, probs=True, multilabel=True)
    rounded = torch.tensor([[[1 + 2 * torch.finfo(torch.float32).eps]]])
    check_batch(rounded, probs=True, multilabel=True)
    with pytest.raises(ValueError, match=r"0\.\.1, but got 3 .* pixel \(1\), class 0"):
        check_batch(z, probs=True, multilabel=True)
