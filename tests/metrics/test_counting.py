"""The compiled pass counts what the torch pass counts, and its parts are what they say."""

import importlib.util
import logging
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn.functional import interpolate

from segcal import CalibrationMeter
from segcal.metrics import counting, sums, update_together
from segcal.metrics.counting import compiled, cpu
from segcal.metrics.counting.cpu import count_compiled
from segcal.metrics.counting.device import count_in_torch, fine_bin
from segcal.metrics.sums import bin_edges, fine_edges

IGNORE = 255
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
    return labels.masked_fill(masked | (torch.rand(shape, generator=generator) < ignored), IGNORE)


def count(way, values, labels, inside=(None,), **options):
    logits = options.pop("logits", True)
    options = {"per_image": True, "ignore_index": IGNORE, **options}
    settings = CalibrationMeter(values.shape[1], **options).settings
    return PASSES[way](values, labels, inside, settings, logits=logits)


def near_edges(probs, edges, ulps=2):
    """How many probabilities lie within some ulp of an edge."""
    down, up = probs, probs
    for _ in range(ulps):
        down, up = down.nextafter(torch.zeros(()).to(down)), up.nextafter(torch.full_like(up, 2))
    edges = edges.to(probs)
    return int((torch.bucketize(down, edges) != torch.bucketize(up, edges)).sum())


def next_to_edges(values, labels, num_bins=15, edge_rule="right"):
    """How many probabilities of logits lie within 2 ulp of an edge, by what is counted of them."""
    wide = torch.promote_types(values.dtype, torch.float32)
    probs = values.to(wide).softmax(1).movedim(1, 0)[:, labels != IGNORE]  # (K, P)
    edges, top = bin_edges(num_bins, edge_rule, wide)[1:-1], probs.amax(0)
    fine = near_edges(top, fine_edges())
    return {
        "class": near_edges(probs, edges),
        "top": near_edges(top, edges),
        "fine": fine,
        "class_fine": fine,
    }


def confusion_of(batch, k):
    if batch.cells is None:
        return batch.sums.confusion
    return batch.cells[batch.counted].bincount(minlength=k * k).view(k, k)


def assert_agree(values, labels, **options):
    """Counts but for probabilities within 2 ulp of an edge; sums over all bins to 2e-9.

    Where few pixels are summed, the last bit of float32 probabilities is more than that.
    """
    k, few = values.shape[1], int((labels != IGNORE).sum()) < 10_000
    tolerance = 1e-12 if values.dtype == torch.float64 else 1e-8 if few else 2e-9
    (one,), (other,) = (count(way, values, labels, **options) for way in PASSES)
    free = next_to_edges(values, labels, **options)
    assert torch.equal(confusion_of(one, k), confusion_of(other, k))
    for name in ("pixels", "intersection", "predicted", "truth"):
        assert torch.equal(getattr(one.images, name), getattr(other.images, name)), name
    for name, mine in one.sums.tensors().items():
        theirs = getattr(other.sums, name)
        if mine.is_floating_point():
            torch.testing.assert_close(mine.sum(), theirs.sum(), rtol=tolerance, atol=0, msg=name)
        elif name != "confusion":
            moved = int((mine - theirs).abs().sum())
            assert moved <= 2 * free.get(name.rsplit("_", 1)[0], 0), (name, moved, free)
    for name, about in (("top_gap", "top"), ("class_gap", "class")):
        mine, theirs = getattr(one.images, name), getattr(other.images, name)
        torch.testing.assert_close(mine.sum(-1), theirs.sum(-1), rtol=1e-6, atol=1e-4)
        moved = int((mine - theirs).abs().gt(1e-4 + 1e-6 * theirs.abs()).sum())
        assert moved <= 2 * free[about], (name, moved, free)


@pytest.mark.parametrize(("num_bins", "edge_rule"), [(15, "right"), (100, "left"), (1, "right")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOGITS)
def test_compiled_is_torch(name, dtype, num_bins, edge_rule):
    logits = LOGITS[name](dtype)
    assert_agree(logits, labels_for(logits), num_bins=num_bins, edge_rule=edge_rule)


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("name", ["random", "confident", "flat"])
def test_float32_sums_are_those_of_float64(name, way):
    """Rounding of single probabilities evens out: to 1e-9, whichever library computes exp."""
    logits = LOGITS[name](torch.float32)
    labels = labels_for(logits)
    (single,), (double,) = (count(way, x, labels) for x in (logits, logits.double()))
    for name in ("top_confidence", "class_confidence", "nll", "brier"):
        mine, theirs = getattr(single.sums, name), getattr(double.sums, name)
        torch.testing.assert_close(mine.sum(), theirs.sum(), rtol=1e-9, atol=0, msg=name)


@pytest.mark.parametrize("way", PASSES)
def test_the_predicted_class_has_the_largest_logit(way):
    """The first of equal ones, also where float32 has one probability for different logits."""
    logits = torch.tensor([[1.0, 0.0, -1.0], [-(2**-30), 0.0, -1.0], [0.0, 0.0, -1.0]])
    assert logits[1].exp()[0] == logits[1].exp()[1]
    (batch,) = count(way, logits, torch.zeros(3).long())
    assert confusion_of(batch, 3).tolist() == [[2, 1, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_is_torch_on_a_real_network(shared_data, dtype):
    data = np.load(shared_data / "deeplabv3_voc_logits" / "val.npz", allow_pickle=False)
    logits = torch.from_numpy(data["logits33"][:6]).float().movedim(-1, 1)
    logits = interpolate(logits, size=(257, 257), mode="bilinear", align_corners=True)
    assert_agree(logits.to(dtype), torch.from_numpy(data["labels"][:6]))


def differing(cases):
    """How many counts of probabilities differ between the passes, and of how many."""
    moved = total = 0
    for values, labels in cases:
        (one,), (other,) = (count(way, values, labels) for way in PASSES)
        for name in ("class_count", "top_count", "fine_correct", "fine_wrong"):
            mine, theirs = getattr(one.sums, name), getattr(other.sums, name)
            moved += int((mine - theirs).abs().sum())
            total += int(theirs.sum())
    return -(-moved // 2), total  # a pixel that moves leaves one bin and comes to another


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "names", [("random", "confident", "flat"), ("on edges", "extreme")], ids=str
)
def test_how_many_counts_differ(names, dtype):
    """docs/conventions.md has the numbers: `pytest -s -k how_many_counts` prints them."""
    logits = [LOGITS[name](dtype) for name in names]
    cases = [(values, labels_for(values)) for values in logits]
    moved, total = differing(cases)
    print(f"\n{', '.join(names)}, {dtype}: {moved} of {total}")
    near = [next_to_edges(*case) for case in cases]
    assert moved <= sum(found[name] for found in near for name in ("class", "top", "fine"))
    assert moved <= max(total // 100_000, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_many_counts_differ_on_a_real_network(shared_data, dtype):
    data = np.load(shared_data / "deeplabv3_voc_logits" / "val.npz", allow_pickle=False)
    logits = torch.from_numpy(data["logits33"][:24]).float().movedim(-1, 1)
    large = (interpolate(x[None], (257, 257), mode="bilinear", align_corners=True) for x in logits)
    labels = torch.from_numpy(data["labels"][:24]).split(1)
    moved, total = differing((x.to(dtype), y) for x, y in zip(large, labels, strict=True))
    print(f"\nreal, {dtype}: {moved} of {total}")
    assert moved <= total // 100_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_are_counted_alike_bit_for_bit(dtype):
    logits = random_logits(dtype, shape=(2, 21, 500))
    probs = logits.double().softmax(1).to(dtype)
    (one,), (other,) = (count(way, probs, labels_for(logits), logits=False) for way in PASSES)
    for name, mine in one.sums.tensors().items():
        if mine.is_floating_point():
            torch.testing.assert_close(mine, getattr(other.sums, name), rtol=1e-13, atol=0)
        elif name != "confusion":
            assert torch.equal(mine, getattr(other.sums, name)), name
    assert torch.equal(confusion_of(one, 21), confusion_of(other, 21))


def test_compiled_code_has_the_numbers_of_sums():
    """They stand twice, because numba's cache does not see that an imported number changed."""
    for name in ("FINE_CELLS", "FINE_STEPS", "OCTAVES", "FINE_BINS", "CLASS_STEP", "MOST_NLL"):
        assert getattr(compiled, name) == getattr(sums, name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fine_bins_are_where_their_edges_say(dtype):
    """For every edge (lo, hi], and the numbers next to it."""
    edges = fine_edges()
    assert len(edges) == sums.FINE_BINS + 1 == 2242
    assert edges[[0, 1, 2, 960, -2, -1]].tolist() == [0, 2**-10, 2**-9, 15 / 16, 1 - 2**-24, 1]
    at = edges.to(dtype)
    down, up = at.nextafter(torch.zeros_like(at)), at.nextafter(torch.ones_like(at))
    # Below 1/2, 1 - p has fewer bits than p.
    p = torch.cat([at, down[at > 0.5], up[at >= 0.5]])
    expected = (torch.bucketize(p.double(), edges) - 1).clamp(min=0)
    assert torch.equal(fine_bin(p), expected)
    p, expected = p[p > 0.5], expected[p > 0.5]
    for way in PASSES:
        (batch,) = count(way, torch.stack([p, 1 - p], 1), torch.zeros(len(p)).long(), logits=False)
        assert torch.equal(batch.sums.fine_correct, expected.bincount(minlength=sums.FINE_BINS))


@pytest.mark.parametrize("probs", [False, True], ids=["logits", "probabilities"])
@pytest.mark.parametrize("way", PASSES)
def test_fine_histogram_by_class_counts_what_is_accepted(monkeypatch, way, probs):
    """Of each predicted class, the pixels above each edge, and those of them that are right."""
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    logits = random_logits(torch.float64, shape=(2, 5, 40, 50))
    values, labels = logits.softmax(1) if probs else logits, labels_for(logits)
    meter = CalibrationMeter(5, ignore_index=IGNORE)
    (meter.update_probs if probs else meter.update)(values, labels)
    report, counted = meter.compute(), labels != IGNORE
    confidence, predicted = (x[counted] for x in logits.softmax(1).max(1))
    right = predicted == labels[counted]
    table = report.class_fine
    assert table.edges.tolist() == report.fine.edges[[*range(0, 2241, 16), -1]].tolist()
    for g in range(0, len(table.edges) - 1, 7):
        above = confidence > table.edges[g]
        assert table.accepted[:, g].tolist() == predicted[above].bincount(minlength=5).tolist()
        assert table.right[:, g].tolist() == predicted[above & right].bincount(minlength=5).tolist()
    assert table.accepted[:, 0].tolist() == report.overlap[1].tolist()


@pytest.mark.parametrize("way", PASSES)
def test_fine_histogram_by_class_is_for_a_stated_number_of_classes(monkeypatch, way):
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    for k in (sums.MOST_CLASSES, sums.MOST_CLASSES + 1):
        meter = CalibrationMeter(k)
        meter.update(torch.randn(20, k), torch.arange(20))
        found = (meter + meter).compute().class_fine
        assert (found is None) == (k > sums.MOST_CLASSES)
        assert found is None or found.accepted[:, 0].sum() == 40


@njit(**compiled._EXACT)
def _exp_of_all(x):
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = compiled._exp(x[i])
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_is_right_to_two_ulp(dtype):
    """Against longer precision: from the smallest number to where exp is 0, all magnitudes."""
    least = -104 if dtype == np.float32 else -746
    generator = np.random.default_rng(0)
    tiny = -np.geomspace(1e-30, 1, 100_000)
    x = np.concatenate([generator.uniform(least, 0, 400_000), tiny, [0.0, least]]).astype(dtype)
    truth = np.exp(x.astype(np.float64 if dtype == np.float32 else np.longdouble))
    found = _exp_of_all(x)
    ulp = np.spacing(np.maximum(truth, np.finfo(dtype).smallest_subnormal).astype(dtype))
    assert (np.abs(found - truth) <= 2 * ulp).all()
    assert (found <= 1).all()
    special = _exp_of_all(np.array([0, -0.0, -np.inf, np.finfo(dtype).min, np.nan], dtype=dtype))
    np.testing.assert_array_equal(special, [1, 1, 0, 0, np.nan])


@njit(**compiled._EXACT)
def _widen_all(bits, bfloat16):
    out = np.empty(len(bits), np.float32)
    for i in range(len(bits)):
        out[i] = compiled._widened(bits[i], bfloat16)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_is_widened_exactly(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    truth = torch.from_numpy(bits).view(dtype).float().numpy()
    np.testing.assert_array_equal(_widen_all(bits, dtype == torch.bfloat16), truth)


def some_masks(labels, many):
    """Overlapping masks, one that holds nothing, and None for everything."""
    generator = torch.Generator().manual_seed(1)
    scattered = torch.rand(labels.shape, generator=generator) < 0.5
    first = torch.arange(labels.numel()).view_as(labels) % 50 < 20
    masks = [None, first, ~first, scattered, torch.zeros_like(first), labels == 1]
    return masks + [labels == i for i in range(2, 8)] if many else masks


@pytest.mark.parametrize("many", [False, True], ids=["few", "more than a byte has bits"])
@pytest.mark.parametrize("probs", [False, True], ids=["logits", "probabilities"])
@pytest.mark.parametrize("shape", [(3, 5, 20, 30), (40, 5), (2, 600, 7)], ids=str)
@pytest.mark.parametrize("way", PASSES)
def test_together_is_one_by_one(monkeypatch, way, shape, probs, many):
    """Meters updated together hold what each holds alone, of labels ignored outside its mask."""
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    values = random_logits(torch.float64, shape=shape)
    labels = labels_for(values)
    values = values.softmax(1) if probs else values
    masks = some_masks(labels, many)
    names = [str(i) for i in range(len(labels))]
    together = [CalibrationMeter(shape[1], per_image=True, region=str(m)) for m in masks]
    update_together(together, values, labels, inside=masks, names=names, probs=probs)
    for mask, meter in zip(masks, together, strict=True):
        alone = CalibrationMeter(shape[1], per_image=True)
        part = labels if mask is None else labels.masked_fill(~mask, IGNORE)
        (alone.update_probs if probs else alone.update)(values, part, names=names)
        mine, theirs = meter.state_dict(), alone.state_dict()
        for name in mine:
            if name != "settings":
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
    renamed = torch.tensor([0, 9, 1, 2])[labels.clamp_max(3)].masked_fill(labels > 3, IGNORE)
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


@pytest.mark.parametrize("way", PASSES)
def test_threads_may_share_a_meter(monkeypatch, way):
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: PASSES[way])
    logits = random_logits(torch.float32, shape=(2, 4, 64))
    labels = labels_for(logits)
    meter, alone = CalibrationMeter(4, per_image=True), CalibrationMeter(4)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(meter.update, logits, labels) for _ in range(100)]:
            done.result()
    alone.update(logits, labels)
    assert meter.compute().confusion.tolist() == (100 * alone.compute().confusion).tolist()
    assert len(meter.names) == len(meter.image_sums().pixels) == 200


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
    assert torch.equal(meters[0].state_dict()["settings"], meters[1].state_dict()["settings"])


def test_crops_are_counted_in_place(monkeypatch):
    """Pixels of a crop do not lie side by side in memory, and windows even share it."""
    large = random_logits(torch.float32, shape=(2, 5, 30, 41))
    windows = large[0].flatten(1).unfold(1, 4, 3).movedim(1, 0)  # (N, 5, 4)
    monkeypatch.setattr(cpu, "PIECE_PIXELS", 100)
    crops = (large[..., 3:20, 5:35], large.mT, large[::2], large[:, :, ::3, ::2], windows)
    for part in crops:
        labels = labels_for(part)
        meters = CalibrationMeter(5, per_image=True), CalibrationMeter(5, per_image=True)
        meters[0].update(part, labels)
        meters[1].update(part.contiguous(), labels)
        for name, tensor in meters[0].state_dict().items():
            torch.testing.assert_close(tensor, meters[1].state_dict()[name], rtol=1e-12, atol=1e-9)


def test_without_numba_torch_counts_and_says_so_once(monkeypatch, caplog):
    for name in ("cpu", "compiled"):
        monkeypatch.delitem(sys.modules, f"segcal.metrics.counting.{name}")
        monkeypatch.delattr(counting, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    counting.compiled_passes.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "segcal"):
            meter = CalibrationMeter(4)
            for _ in range(2):
                meter.update(torch.zeros(1, 4, 3), torch.zeros(1, 3, dtype=torch.int64))
        assert meter.compute().protocol.pixels == 6
        (line,) = caplog.messages
        assert "numba cannot be imported" in line
    finally:
        counting.compiled_passes.cache_clear()


def test_long_compiling_is_announced(monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(cpu, "_ANNOUNCED_AFTER", 0)
    monkeypatch.setattr(cpu.log, "info", lambda *message: said.set())
    monkeypatch.setattr(cpu, "count_pixels", lambda *arguments: said.wait(60))
    cpu._load_counting.__wrapped__(torch.float32)
    assert said.is_set()


@pytest.mark.parametrize("home", ["writable", "not writable"])
def test_compiled_code_is_kept_where_that_is_possible(tmp_path, monkeypatch, home):
    """In the user's cache if the package cannot be written; nowhere if neither can."""
    package = tmp_path / "package"
    package.mkdir()
    source = shutil.copy(compiled.__file__, package / "compiled.py")
    (package / "__pycache__").write_text("a file, so that no folder of this name can be made")
    cache = tmp_path / "cache"
    if home == "not writable":
        cache.write_text("a file as well")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("compiled_elsewhere", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = module.count_pixels.stats.cache_path
    assert (kept is not None and kept.startswith(str(cache))) == (home == "writable")


def test_work_grows_with_the_classes_not_with_their_square():
    """CPU time of each logit; a histogram of K² bins a chunk made it 7 times longer at 5,000."""

    def seconds(k, pixels):
        logits = torch.randn(2, k, pixels, generator=torch.Generator().manual_seed(0))
        meter, labels = CalibrationMeter(k), torch.arange(2 * pixels).view(2, pixels) % k
        meter.update(logits, labels)  # compiles
        taken = []
        for _ in range(3):
            start = time.process_time()
            meter.update(logits, labels)
            taken.append(time.process_time() - start)
        return min(taken) / logits.numel()

    assert seconds(5000, 1000) < 3 * seconds(50, 100_000)
