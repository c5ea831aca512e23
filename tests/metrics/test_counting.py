"""The compiled pass counts what the torch pass counts, and its parts are what they say."""

import logging
import sys

import numba
import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from segcal import CalibrationMeter
from segcal.metrics import counting, sums, update_together
from segcal.metrics.counting import count_compiled, count_in_torch
from segcal.metrics.sums import fine_edges
from segcal.pixels import resolve_ignore_index

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PASSES = {"compiled": count_compiled, "torch": count_in_torch}


def random_logits(dtype, scale=3.0, shape=(3, 21, 120, 121)):
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def on_edges(dtype):
    """One to six classes with equal logits, others far below: p is 1, 1/2 … 1/6, or near it."""
    logits = torch.full((6, 8, 40), -30.0, dtype=dtype)
    for i in range(6):
        logits[i, : i + 1] = torch.linspace(-3, 3, 40).to(dtype)
    return logits


def extreme(dtype):
    """Classes from so near that they tie to so far that exp underflows; and masked ones."""
    spread = torch.logspace(-8, 3, 50, dtype=torch.float64)
    logits = torch.stack([spread * c for c in range(6)]).to(dtype)[None]  # (1, 6, 50)
    masked = logits.clone()
    masked[:, 1] = -torch.inf
    masked[:, 2:4] = torch.finfo(dtype).min
    return torch.cat([logits, masked])


LOGITS = {
    "random": random_logits,
    "confident": lambda dtype: random_logits(dtype, scale=30),
    "flat": lambda dtype: random_logits(dtype, scale=0.1),
    "on edges": on_edges,
    "extreme": extreme,
    "many classes": lambda dtype: random_logits(dtype, shape=(2, 600, 500)),
    "classification": lambda dtype: random_logits(dtype, shape=(3000, 10)),
}


def labels_for(logits, ignored=0.1):
    """Random labels, but of no class that is masked: its NLL would be infinite, or nearly so."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(logits), *logits.shape[2:])
    labels = torch.randint(0, logits.shape[1], shape, generator=generator)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    masked = own <= torch.finfo(logits.dtype).min
    drawn = torch.rand(shape, generator=generator) < ignored
    return labels.masked_fill(masked | drawn, resolve_ignore_index(None, logits.shape[1]))


def count(way, values, labels, inside=(None,), **options):
    logits = options.pop("logits", True)
    options = {"per_image": True, **options}
    settings = CalibrationMeter(values.shape[1], **options).settings
    return PASSES[way](values, labels, inside, settings, logits=logits)


def assert_agree(values, labels, **options):
    """Counts exactly, sums to 1e-12."""
    (one,), (other,) = (count(way, values, labels, **options) for way in PASSES)
    for mine, theirs in zip(one, other, strict=True):
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-12, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", LOGITS)
def test_compiled_is_torch(name):
    for dtype in (torch.float32, torch.float64):
        logits = LOGITS[name](dtype)
        assert_agree(logits, labels_for(logits))


@pytest.mark.parametrize("name", ["on edges", "extreme", "classification"])
def test_compiled_is_torch_in_half_precision_and_other_bins(name):
    for dtype in DTYPES:
        logits = LOGITS[name](dtype)
        for num_bins, edge_rule in ((15, "right"), (100, "left"), (1, "right")):
            assert_agree(logits, labels_for(logits), num_bins=num_bins, edge_rule=edge_rule)


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("name", ["random", "confident", "flat"])
def test_float32_sums_are_those_of_float64(name, way):
    """Rounding of single probabilities evens out, but for the bias of numpy's exp: 2e-8."""
    logits = LOGITS[name](torch.float32)
    labels = labels_for(logits)
    (single,), (double,) = (count(way, x, labels) for x in (logits, logits.double()))
    for name in ("top_confidence", "class_confidence", "nll", "brier"):
        mine, theirs = single.sums[name], double.sums[name]
        torch.testing.assert_close(mine.sum(), theirs.sum(), rtol=2e-8, atol=0, msg=name)


@pytest.mark.parametrize("way", PASSES)
def test_the_predicted_class_has_the_largest_logit(way):
    """The first of equal ones, also where float32 has one probability for different logits."""
    logits = torch.tensor([[1.0, 0.0, -1.0], [-(2**-30), 0.0, -1.0], [0.0, 0.0, -1.0]])
    assert logits[1].exp()[0] == logits[1].exp()[1]
    (batch,) = count(way, logits, torch.zeros(3).long())
    assert batch.sums["confusion"].tolist() == [[2, 1, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_is_torch_on_a_real_network(shared_data, dtype):
    data = np.load(shared_data / "deeplabv3_voc_logits" / "val.npz", allow_pickle=False)
    logits = torch.from_numpy(data["logits33"][:6]).float().movedim(-1, 1)
    logits = interpolate(logits, size=(257, 257), mode="bilinear", align_corners=True)
    assert_agree(logits.to(dtype), torch.from_numpy(data["labels"][:6]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_are_counted_alike(dtype):
    logits = random_logits(dtype, shape=(2, 21, 500))
    probs = logits.double().softmax(1).to(dtype)
    assert_agree(probs, labels_for(logits), logits=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fine_bins_are_where_their_edges_say(dtype):
    """For every edge (lo, hi], and the numbers next to it."""
    edges = fine_edges()
    assert len(edges) == sums.FINE_BINS + 1 == 2242
    assert edges[[0, 1, 2, 960, -2, -1]].tolist() == [0, 2**-10, 2**-9, 15 / 16, 1 - 2**-24, 1]
    at = edges.to(dtype)
    down, up = at.nextafter(torch.zeros_like(at)), at.nextafter(torch.ones_like(at))
    p = torch.cat([at, down, up])
    p = p[p > 0.5]  # the largest of two
    expected = torch.bucketize(p.double(), edges) - 1
    for way in PASSES:
        (batch,) = count(way, torch.stack([p, 1 - p], 1), torch.zeros(len(p)).long(), logits=False)
        assert torch.equal(batch.sums["fine_correct"], expected.bincount(minlength=sums.FINE_BINS))


@pytest.mark.parametrize("probs", [False, True], ids=["logits", "probabilities"])
@pytest.mark.parametrize("way", PASSES)
def test_fine_histogram_by_class_counts_what_is_accepted(monkeypatch, way, probs):
    """Of each predicted class, the pixels above each edge, and those of them that are right."""
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    logits = random_logits(torch.float64, shape=(2, 5, 40, 50))
    values, labels = logits.softmax(1) if probs else logits, labels_for(logits)
    meter = CalibrationMeter(5)
    (meter.update_probs if probs else meter.update)(values, labels)
    report, counted = meter.compute(), labels != 255
    confidence, predicted = (x[counted] for x in logits.softmax(1).max(1))
    right = predicted == labels[counted]
    table = report.class_fine
    assert table.edges.tolist() == report.fine.edges[[*range(0, 2241, 16), -1]].tolist()
    for g in range(0, len(table.edges) - 1, 7):
        above = confidence > table.edges[g]
        assert table.accepted[:, g].tolist() == predicted[above].bincount(minlength=5).tolist()
        assert table.right[:, g].tolist() == predicted[above & right].bincount(minlength=5).tolist()
    assert table.accepted[:, 0].tolist() == report.overlap[1].tolist()


def some_masks(labels):
    """Overlapping masks, one that holds nothing, and None for everything."""
    generator = torch.Generator().manual_seed(1)
    scattered = torch.rand(labels.shape, generator=generator) < 0.5
    first = torch.arange(labels.numel()).view_as(labels) % 50 < 20
    return [None, first, ~first, scattered, torch.zeros_like(first), labels == 1]


@pytest.mark.parametrize(
    ("shape", "probs"),
    [
        ((3, 5, 20, 30), False),
        ((3, 5, 20, 30), True),
        ((40, 5), False),
        ((40, 5), True),
        ((2, 1100, 7), False),
        ((2, 1100, 7), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", PASSES)
def test_together_is_one_by_one(monkeypatch, way, shape, probs):
    """Meters updated together hold what each holds alone, of labels ignored outside its mask."""
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    values = random_logits(torch.float64, shape=shape)
    labels = labels_for(values)
    values = values.softmax(1) if probs else values
    masks = some_masks(labels)
    names = [str(i) for i in range(len(labels))]
    together = [CalibrationMeter(shape[1], per_image=True, region=str(m)) for m in masks]
    update_together(together, values, labels, inside=masks, names=names, probs=probs)
    for mask, meter in zip(masks, together, strict=True):
        alone = CalibrationMeter(shape[1], per_image=True)
        ignored = resolve_ignore_index(None, shape[1])
        part = labels if mask is None else labels.masked_fill(~mask, ignored)
        (alone.update_probs if probs else alone.update)(values, part, names=names)
        mine, theirs = meter.state_dict(), alone.state_dict()
        for name in mine:
            if name != "about":
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=1e-12)


def test_together_fails_for_all_or_none():
    logits = random_logits(torch.float32, shape=(1, 3, 8))
    labels = torch.zeros(1, 8, dtype=torch.int64)
    logits[0, 0, 7] = torch.nan
    first = torch.arange(8)[None] < 4
    meters = [CalibrationMeter(3), CalibrationMeter(3, region="first")]
    with pytest.raises(ValueError, match="got nan at image 0 of the batch, pixel \\(7\\)"):
        update_together(meters, logits, labels, inside=[None, first])
    assert not any(meter.compute().protocol.pixels for meter in meters)


@pytest.mark.parametrize(
    ("meters", "inside", "message"),
    [
        ([CalibrationMeter(3)], [], "a mask or None for each meter, but got 0 for 1"),
        ([CalibrationMeter(3), CalibrationMeter(3, 10)], None, "num_bins 15 and 10"),
        ([CalibrationMeter(3)], [torch.ones(1, 4)], "bool .* but got torch.float32"),
        ([CalibrationMeter(3)], [torch.ones(2) > 0], "shape \\(1, 4\\), but got torch.bool"),
    ],
)
def test_together_names_what_does_not_fit(meters, inside, message):
    logits, labels = torch.zeros(1, 3, 4), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        update_together(meters, logits, labels, inside=inside)


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, -2e38])
@pytest.mark.parametrize("way", PASSES)
def test_masked_classes_count_with_probability_zero(monkeypatch, way, least):
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    logits = random_logits(torch.float32, shape=(2, 6, 50))
    labels = labels_for(logits)
    labels[(labels == 1) | (labels > 3)] = 0
    logits[:, [1, 4, 5]] = least
    meter, rest = CalibrationMeter(6), CalibrationMeter(3)
    meter.update(logits, labels)
    renamed = torch.tensor([0, 9, 1, 2])[labels.clamp_max(3)].masked_fill(labels > 3, 255)
    rest.update(logits[:, [0, 2, 3]], renamed)
    report, expected = meter.compute(), rest.compute()
    assert report.classes.count[[1, 4, 5], 0].tolist() == [report.protocol.pixels] * 3
    assert not report.classes.confidence_sum[[1, 4, 5]].any()
    assert report.nll == pytest.approx(expected.nll, rel=1e-7)
    assert report.ece == pytest.approx(expected.ece, abs=1e-7)


@pytest.mark.parametrize("way", PASSES)
def test_huge_logits_have_a_finite_nll_or_are_refused(monkeypatch, way):
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    meter = CalibrationMeter(2)
    meter.update(torch.tensor([[2e38, -2e38], [2e38, -2e38]]), torch.tensor([1, 0]))
    assert meter.compute().nll == pytest.approx(2e38)
    wide = torch.tensor([[1e308, -1e308]], dtype=torch.float64)
    with pytest.raises(
        ValueError, match="finite NLL for the class of the label, but got -1e\\+308"
    ):
        meter.update(wide, torch.tensor([1]))
    assert meter.compute().protocol.pixels == 2


def test_a_report_does_not_change_with_its_meter():
    logits = random_logits(torch.float32, shape=(2, 4, 64))
    meter = CalibrationMeter(4)
    meter.update(logits, labels_for(logits))
    report = meter.compute()
    before = report.confusion.tolist(), report.classes.confidence_sum.tolist()
    meter.update(logits, labels_for(logits))
    assert (report.confusion.tolist(), report.classes.confidence_sum.tolist()) == before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8, torch.int16, torch.int32])
def test_labels_of_every_integer_dtype(dtype):
    logits = random_logits(torch.float32, shape=(1, 4, 64))
    labels = labels_for(logits, ignored=0)
    meters = CalibrationMeter(np.int64(4), ignore_index=9), CalibrationMeter(4, ignore_index=9)
    meters[0].update(logits, labels.to(dtype))
    meters[1].update(logits, labels)
    assert torch.equal(meters[0].state_dict()["confusion"], meters[1].state_dict()["confusion"])
    assert torch.equal(meters[0].state_dict()["about"], meters[1].state_dict()["about"])


def test_crops_are_counted_where_they_are(monkeypatch):
    """Pixels of a crop do not lie side by side in memory, and windows even share it."""
    large = random_logits(torch.float32, shape=(2, 5, 30, 41))
    windows = large[0].flatten(1).unfold(1, 4, 3).movedim(1, 0)  # (N, 5, 4)
    monkeypatch.setattr(counting, "_BLOCK", 500)
    crops = (large[..., 3:20, 5:35], large.mT, large[::2], large[:, :, ::3, ::2], windows)
    for part in crops:
        labels = labels_for(part)
        meters = CalibrationMeter(5, per_image=True), CalibrationMeter(5, per_image=True)
        meters[0].update(part, labels)
        meters[1].update(part.contiguous(), labels)
        for name, tensor in meters[0].state_dict().items():
            torch.testing.assert_close(tensor, meters[1].state_dict()[name], rtol=1e-12, atol=1e-9)


def test_an_image_may_be_as_large_as_a_block():
    logits, labels = torch.randn(2, 2, counting._BLOCK // 2), torch.ones(2, counting._BLOCK // 2)
    meter = CalibrationMeter(2)
    meter.update(logits, labels.long())
    assert meter.compute().accuracy == (logits[:, 1] > logits[:, 0]).double().mean()


def test_without_numba_torch_counts_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    counting.compiled.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "segcal"):
            meter = CalibrationMeter(4)
            for _ in range(2):
                meter.update(torch.zeros(1, 4, 3), torch.zeros(1, 3, dtype=torch.int64))
        assert meter.compute().protocol.pixels == 6
        (line,) = caplog.messages
        assert "numba cannot be imported" in line
    finally:
        counting.compiled.cache_clear()


def test_compiled_code_does_without_a_folder_that_can_be_written(monkeypatch):
    plain = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available for file")
        return plain(**options)

    monkeypatch.setattr(numba, "njit", njit)
    counting.compiled.cache_clear()
    try:
        meter = CalibrationMeter(3)
        meter.update(torch.zeros(1, 3), torch.tensor([0]))
        assert counting.compiled() is not None and meter.compute().accuracy == 1
    finally:
        counting.compiled.cache_clear()
