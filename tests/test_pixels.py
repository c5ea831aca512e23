import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segcal.pixels import flatten, label_mass


@pytest.mark.parametrize("ignore_index", [None, 1.5, "255", 2**63, -(10**30)])
def test_an_ignore_index_is_a_number(ignore_index):
    with pytest.raises(ValueError, match="Expected ignore_index to be an integer, but got"):
        flatten(torch.zeros(1, 2, 3), torch.zeros(1, 3).long(), ignore_index)


def test_compact_view_lists_valid_pixels_in_image_order():
    logits = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).reshape(2, 3, 2, 2)
    labels = torch.tensor([[[0, 255], [2, 1]], [[255, 255], [1, 0]]])
    pixels = flatten(logits, labels)
    assert pixels.labels.tolist() == [0, 2, 1, 1, 0]
    # Pixel (n, h, w) of class c holds 12 n + 4 c + 2 h + w.
    assert pixels.logits.tolist() == [
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
    ignore=st.sampled_from([100, 2, -1]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_label_dtype_equals_a_loop(spatial, dtype, ignore, seed):
    ignore = ignore if dtype.is_signed else abs(ignore)
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
    assert pixels.labels.tolist() == wanted
    assert torch.equal(pixels.logits, torch.stack(rows) if rows else torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_keep_their_dtype_and_storage(dtype):
    logits = torch.zeros(2, 3, 4, 4, dtype=dtype)
    pixels = flatten(logits, torch.zeros(2, 4, 4, dtype=torch.uint8))
    assert pixels.dense.dtype is dtype
    assert pixels.dense.data_ptr() == logits.data_ptr()


def test_one_by_one_output_takes_plain_class_labels():
    logits, labels = torch.randn(4, 3, 1, 1), torch.tensor([0, 1, 2, 255])
    assert torch.equal(flatten(logits, labels).logits, flatten(logits[..., 0, 0], labels).logits)


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


def test_out_of_range_labels_are_named_and_counted():
    labels = torch.tensor([[20, 21, 21], [255, -1, 0]])
    with pytest.raises(ValueError) as error:
        flatten(torch.zeros(2, 21, 3), labels)
    assert str(error.value) == (
        "Expected labels in 0..20 (21 classes) or ignore_index=255, but got -1, 21 in 3 pixels"
    )


def test_ignore_index_may_be_a_class():
    pixels = flatten(torch.zeros(1, 3, 3), torch.tensor([[0, 1, 2]]), ignore_index=1)
    assert pixels.labels.tolist() == [0, 2]
    with pytest.raises(ValueError, match="255 in 1 pixel$"):
        flatten(torch.zeros(1, 3, 1), torch.tensor([[255]]), ignore_index=1)


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
