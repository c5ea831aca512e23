"""The meter equals its slow definition, however its input is cut, typed, merged or stored."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from segcal import CalibrationMeter
from segcal.metrics import counting, meter
from tests.support import metric_oracles as oracle
from tests.support.ranks import run_on_ranks
from tests.support.states import restated


@pytest.fixture(params=["compiled", "torch"])
def counted_by(request):
    """For laws of counting, which hold for both passes; test_counting.py has that they agree."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(counting, "counting_pass", lambda device_type: counting.count_in_torch)
        else:
            assert counting.counting_pass("cpu") is counting.count_compiled
        yield request.param


def batch(seed, n=2, k=5, space=(6, 7), dtype=torch.float64, scale=3.0, ignored=0.2):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, *space, generator=generator, dtype=dtype)
    labels = torch.randint(0, k, (n, *space), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels


def measured(logits, labels, **settings):
    meter = CalibrationMeter(logits.shape[1], **settings)
    meter.update(logits, labels)
    return meter


def assert_same(a, b, tolerance=1e-12):
    """Counts exactly, sums to `tolerance` relative."""
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        if mine[name].is_floating_point():
            torch.testing.assert_close(
                mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name
            )
        else:
            assert torch.equal(mine[name], theirs[name]), name


def assert_is_oracle(report, probs, labels, **settings):
    num_bins = report.protocol.num_bins
    top, classes, confusion = oracle.tables(probs, labels, num_bins, **settings)
    assert report.top.count.tolist() == [len(b) for b in top]
    assert report.top.hits.tolist() == [sum(hit for _, hit in b) for b in top]
    assert report.classes.count.tolist() == [[len(b) for b in c] for c in classes]
    assert report.classes.hits.tolist() == [[sum(h for _, h in b) for b in c] for c in classes]
    sums = [[sum(p for p, _ in b) for b in c] for c in classes]
    np.testing.assert_allclose(report.classes.confidence_sum, sums, rtol=1e-12, atol=1e-300)
    assert report.confusion.tolist() == confusion
    assert report.ece == pytest.approx(oracle.ece(top), abs=1e-12)
    assert report.mce == pytest.approx(oracle.mce(top), abs=1e-12)
    assert report.class_ece == pytest.approx([oracle.ece(c) for c in classes], abs=1e-12)
    assert report.sce == pytest.approx(np.mean([oracle.ece(c) for c in classes]), abs=1e-12)
    assert report.miou == pytest.approx(oracle.miou(confusion), abs=1e-12)
    assert report.brier == pytest.approx(oracle.brier(probs, labels), abs=1e-12)


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize(
    ("k", "space", "num_bins", "edge_rule"),
    [
        (2, (), 15, "right"),
        (2, (), 40, "left"),
        (5, (6, 7), 15, "right"),
        (5, (6, 7), 1, "left"),
        (21, (5, 4), 15, "left"),
        (21, (5, 4), 2, "right"),
        (250, (3,), 15, "right"),
    ],
)
def test_equals_the_definition(k, space, num_bins, edge_rule):
    logits, labels = batch(k, n=3, k=k, space=space)
    report = measured(logits, labels, num_bins=num_bins, edge_rule=edge_rule).compute()
    probs = logits.softmax(1)
    assert_is_oracle(report, probs, labels, edge_rule=edge_rule)
    assert report.nll == pytest.approx(oracle.nll(probs, labels), abs=1e-12)


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("edge_rule", ["right", "left"])
def test_probabilities_on_every_edge(edge_rule, dtype):
    """Two classes with p = k/B, and the neighbours of k/B in the dtype, are each in their bin."""
    for num_bins in (3, 10, 15):
        check_every_edge(num_bins, edge_rule, dtype)


def check_every_edge(num_bins, edge_rule, dtype):
    edges = (torch.arange(num_bins + 1, dtype=torch.float64) / num_bins).to(dtype)
    up, down = torch.tensor(2, dtype=dtype), torch.tensor(-1, dtype=dtype)
    p = torch.cat([edges, edges.nextafter(up), edges.nextafter(down)]).clamp(0, 1)
    probs = torch.stack([p, 1 - p], 1)
    labels = torch.arange(len(p)) % 2
    meter = CalibrationMeter(2, num_bins=num_bins, edge_rule=edge_rule)
    meter.update_probs(probs, labels)
    assert_is_oracle(meter.compute(), probs, labels, edge_rule=edge_rule)


@pytest.mark.usefixtures("counted_by")
def test_edges_by_hand():
    """Four bins: 0 and 1/4 in the first, 1/2 in the second, 1 in the last; `left` moves them up."""
    probs = torch.tensor([[0.0, 1.0], [0.25, 0.75], [0.5, 0.5]])
    for rule, first in {"right": [2, 1, 0, 0], "left": [1, 1, 1, 0]}.items():
        meter = CalibrationMeter(2, num_bins=4, edge_rule=rule)
        meter.update_probs(probs, torch.zeros(3, dtype=torch.int64))
        assert meter.compute().classes.count[0].tolist() == first
    assert meter.compute().classes.count[1].tolist() == [0, 0, 1, 2]


@pytest.mark.usefixtures("counted_by")
def test_ties_go_to_the_first_class():
    meter = measured(torch.zeros(1, 4, 2), torch.tensor([[0, 3]]))
    assert meter.compute().confusion[[0, 3]].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_memory_does_not_grow_with_pixels(counted_by):
    """All that a meter holds; with sums of each image it grows by image, but not by pixel."""
    few, many = (CalibrationMeter(5) for _ in range(2))
    few.update(*batch(0))
    for seed in range(20):
        many.update(*batch(seed, n=3, space=(40, 30)))
    assert len(pickle.dumps(many)) == len(pickle.dumps(few))
    images = [measured(*batch(0, space=space), per_image=True) for space in ((6, 7), (80, 70))]
    assert len({len(pickle.dumps(one)) for one in images}) == 1


def test_order_of_pixels_and_images_does_not_matter():
    logits, labels = batch(0, n=4)
    shuffle = torch.randperm(6 * 7)
    moved = logits.flatten(2)[:, :, shuffle].flip(0)
    assert_same(measured(logits, labels), measured(moved, labels.flatten(1)[:, shuffle].flip(0)))


@pytest.mark.usefixtures("counted_by")
def test_classification_is_one_pixel():
    logits, labels = batch(0, n=50, space=())
    flat = measured(logits, labels, per_image=True)
    assert_same(flat, measured(logits[..., None, None], labels[:, None, None], per_image=True), 0)


@pytest.mark.parametrize("per_image", [False, True])
@hypothesis_settings(max_examples=40)
@given(data=st.data())
def test_streamed_is_merged_is_one_shot(per_image, data):
    n, k = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 6))
    space = data.draw(st.sampled_from([(), (1,), (5,), (3, 4), (2, 3, 2)]))
    ignored = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    logits, labels = batch(data.draw(st.integers(0, 99)), n, k, space, ignored=ignored)
    whole = measured(logits, labels, per_image=per_image)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    streamed = CalibrationMeter(k, per_image=per_image)
    merged = CalibrationMeter(k, per_image=per_image)
    for a, b in zip([0, *cuts], [*cuts, n], strict=True):
        streamed.update(logits[a:b], labels[a:b])
        merged += measured(logits[a:b], labels[a:b], per_image=per_image)
    assert_same(streamed, whole)
    assert_same(merged, whole)
    assert whole.compute() == whole.compute()


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("space", [(), (40, 50)])
def test_chunks_leave_no_trace(monkeypatch, space):
    logits, labels = batch(1, n=4, space=space)
    whole = measured(logits, labels, per_image=True)
    for block in ("_BLOCK", "_PIECE"):
        monkeypatch.setattr(counting, block, 700)
    monkeypatch.setattr(meter, "_IMAGE_BINS", 1)
    assert_same(measured(logits, labels, per_image=True), whole)


@pytest.mark.usefixtures("counted_by")
def test_update_is_update_probs_of_the_softmax():
    logits, labels = batch(2)
    meter = CalibrationMeter(5)
    meter.update_probs(logits.softmax(1), labels)
    assert_same(meter, measured(logits, labels))


@pytest.mark.usefixtures("counted_by")
def test_nll_does_not_underflow():
    logits = torch.tensor([[0.0, 1000.0]])
    assert measured(logits, torch.tensor([0])).compute().nll == 1000


@pytest.mark.usefixtures("counted_by")
def test_ignored_pixels_may_hold_anything():
    logits, labels = batch(3)
    clean = measured(logits, labels)
    logits.movedim(1, -1)[labels == 255] = torch.tensor(
        [torch.nan, torch.inf, 0, 0, -torch.inf]
    ).double()
    assert_same(measured(logits, labels), clean, 0)


def test_more_pixels_than_float32_can_count():
    """2**24 + 1000 equal confidences in one bin, a quarter of them right: ECE = 0.75 - 0.25."""
    n = 2**24 + 1000
    probs = torch.tensor([0.75, 0.25]).view(1, 2, 1).expand(1, 2, n)
    labels = torch.ones(1, n, dtype=torch.uint8)
    labels[:, ::4] = 0
    meter = CalibrationMeter(2)
    meter.update_probs(probs, labels)
    report = meter.compute()
    assert report.protocol.pixels == n
    assert report.accuracy == 0.25
    assert report.ece == report.sce == 0.5


BAD_BATCHES = {
    "nan": (
        lambda z, y: z[1, 3, 2, 4].fill_(torch.nan),
        "got nan at image 1 of the batch, pixel \\(2, 4\\), class 3",
    ),
    "inf": (
        lambda z, y: z[0, 2, 5, 6].fill_(torch.inf),
        "got inf at image 0 of the batch, pixel \\(5, 6\\), class 2",
    ),
    "label's -inf": (
        lambda z, y: z[1, y[1, 2, 3], 2, 3].fill_(-torch.inf),
        "class of the label, but got -inf at image 1 of the batch, pixel \\(2, 3\\), class",
    ),
    "label": (lambda z, y: y[0, 0, :2].fill_(5), "labels in 0..4 .* but got 5 in 2 pixels"),
}


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_failed_update_changes_nothing(name):
    spoil, message = BAD_BATCHES[name]
    meter = measured(*batch(0), per_image=True)
    before = meter.compute()
    logits, labels = batch(1, ignored=0)
    spoil(logits, labels)
    with pytest.raises(ValueError, match=message):
        meter.update(logits, labels)
    assert meter.compute() == before


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(2, 4, 3), torch.zeros(2, 3, dtype=torch.int64), "Expected 5 classes"),
        (torch.zeros(2, 5, 3), torch.zeros(2, 4, dtype=torch.int64), "Expected labels of shape"),
        (torch.zeros(2, 5, 3), torch.zeros(2, 3), "integer dtype"),
    ],
)
def test_wrong_shapes_are_named(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        CalibrationMeter(5).update(logits, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_logits_are_never_taken_for_probabilities(dtype):
    logits, labels = batch(0, dtype=dtype)
    meter = CalibrationMeter(5)
    with pytest.raises(ValueError, match="logits go to update"):
        meter.update_probs(logits, labels)
    with pytest.raises(ValueError, match=r"of sum 1.1"):
        meter.update_probs(logits.double().softmax(1).to(dtype) * 1.1, labels)
    meter.update_probs(logits.double().softmax(1).to(dtype), labels)
    assert meter.compute().protocol.pixels == int((labels != 255).sum())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 1}, "num_classes must be an integer >= 2"),
        ({"num_bins": 0}, "num_bins must be"),
        ({"num_bins": 10**6}, "num_bins must be at most"),
        ({"edge_rule": "middle"}, "edge_rule must be"),
        ({"class_names": ["a"]}, "Expected 5 class_names, but got 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        CalibrationMeter(**{"num_classes": 5, **settings})


def test_meters_of_other_settings_do_not_add():
    with pytest.raises(ValueError, match="equal settings, but got num_bins 15 and 10"):
        CalibrationMeter(5) + CalibrationMeter(5, num_bins=10)


def test_updates_in_and_out_of_inference_mode_mix():
    with torch.inference_mode():
        meter = measured(*batch(0))
    meter.update(*batch(1))
    assert_same(
        meter + measured(*batch(2)), measured(*batch(0)) + measured(*batch(1)) + measured(*batch(2))
    )


def test_sum_leaves_its_parts_alone():
    a, b = measured(*batch(0)), measured(*batch(1))
    before = a.compute(), b.compute()
    (a + b).update(*batch(2))
    assert (a.compute(), b.compute()) == before


@pytest.mark.parametrize("per_image", [False, True])
def test_saved_is_loaded(tmp_path, per_image):
    meter = CalibrationMeter(
        5, 10, edge_rule="left", per_image=per_image, class_names="abcde", region="boundary"
    )
    meter.update(*batch(0), names=["ä/1.png", "b\n2.png"])
    meter.save(tmp_path / "meter.npz")
    loaded = CalibrationMeter.load(tmp_path / "meter.npz")
    assert_same(loaded, meter, 0)
    assert loaded.compute() == meter.compute()
    loaded.update(*batch(1))
    meter.update(*batch(1))
    assert_same(loaded, meter, 0)


def test_load_names_the_file_that_is_no_meter(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, x=np.zeros(3))
    with pytest.raises(ValueError, match=r"other.npz: expected a saved CalibrationMeter"):
        CalibrationMeter.load(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"other.npz"):
        CalibrationMeter.load(path)


def test_state_of_another_meter_is_refused_and_changes_nothing():
    meter = measured(*batch(0))
    before = meter.compute()
    with pytest.raises(ValueError, match="num_bins"):
        meter.load_state_dict(CalibrationMeter(5, 10).state_dict())
    with pytest.raises(ValueError, match="nll"):
        meter.load_state_dict({k: v for k, v in meter.state_dict().items() if k != "nll"})
    assert meter.compute() == before


def test_reset_forgets():
    meter = measured(*batch(0), per_image=True)
    meter.reset()
    assert_same(meter, CalibrationMeter(5, per_image=True), 0)
    assert np.isnan(meter.compute().ece)


SHARES = {"uneven": [(0, 5), (5, 7)], "second empty": [(0, 7), (7, 7)], "first": [(0, 0), (0, 7)]}


def _share(rank):
    logits, labels = batch(0, n=7)
    states = {}
    for name, shares in SHARES.items():
        meter = CalibrationMeter(5, per_image=True)
        mine = slice(*shares[rank])
        if mine.stop > mine.start:
            images = [f"image{i}" for i in range(mine.start, mine.stop)]
            meter.update(logits[mine], labels[mine], names=images)
        meter.sync()
        meter.sync()  # a second time does nothing
        states[name] = meter.state_dict()
    return states


@pytest.mark.slow
def test_over_ranks_is_one_shot():
    logits, labels = batch(0, n=7)
    whole = CalibrationMeter(5, per_image=True)
    whole.update(logits, labels, names=[f"image{i}" for i in range(7)])
    for states in run_on_ranks(_share):
        for state in states.values():
            synced = CalibrationMeter(5, per_image=True)
            synced.load_state_dict(state)
            with pytest.raises(ValueError, match="reset"):
                synced.update(logits, labels)
            synced.load_state_dict(restated(state, synced=False))
            assert_same(synced, whole)


def test_synced_meter_takes_no_updates_until_reset():
    meter = measured(*batch(0))
    meter.load_state_dict(restated(meter.state_dict(), synced=True))
    with pytest.raises(ValueError, match="reset"):
        meter.update(*batch(1))
    meter.reset()
    meter.update(*batch(1))


@pytest.fixture
def as_accelerator(monkeypatch):
    """Take the path of an accelerator, where no value may be looked at, on CPU tensors."""
    monkeypatch.setattr(counting, "counting_pass", lambda device_type: counting.count_in_torch)
    monkeypatch.setattr(meter, "_can_look", lambda tensor: False)


def test_bad_batch_on_an_accelerator_adds_nothing_and_is_reported(as_accelerator):
    meter = measured(*batch(0), per_image=True)
    before = meter.state_dict()
    logits, labels = batch(1, ignored=0)
    logits[1, 3, 2, 4] = torch.nan
    meter.update(logits, labels)
    with pytest.raises(ValueError, match="1 pixels with logits not finite"):
        meter.compute()
    after = meter.state_dict()
    for name in before:
        if name not in ("faults", "about") and not name.startswith("image."):
            assert torch.equal(before[name], after[name]), name
    assert not after["image.class_gap"][2:].any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_leave_no_trace(monkeypatch, threads):
    logits, labels = batch(1, n=5, space=(40, 50))
    expected = measured(logits, labels, per_image=True)
    monkeypatch.setattr(counting, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_same(measured(logits, labels, per_image=True), expected)


def test_autocast_changes_nothing():
    logits, labels = batch(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = measured(logits, labels)
    assert_same(inside, measured(logits, labels), 0)


def test_memory_layout_does_not_matter():
    logits, labels = batch(3, space=(8, 9))
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    assert_same(measured(channels_last, labels), measured(logits, labels))
    rows = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    assert_same(measured(rows, labels.to(torch.uint8)), measured(logits, labels))


def test_samples_are_counted_by_their_mean():
    logits, labels = batch(4, dtype=torch.float32)
    members = torch.stack([logits, logits.flip(1), 0 * logits]).softmax(2)  # (M, N, C, H, W)
    pooled, expected = CalibrationMeter(5), CalibrationMeter(5)
    pooled.update_samples(members, labels)
    expected.update_probs(members.double().mean(0).float(), labels)
    assert_same(pooled, expected)
    one = CalibrationMeter(5)
    one.update_samples(members[:1], labels)
    alone = CalibrationMeter(5)
    alone.update_probs(members[0], labels)
    assert_same(one, alone)
    with pytest.raises(ValueError, match="logits go to"):
        pooled.update_samples(logits[None], labels)
    with pytest.raises(ValueError, match=r"\(M, N, C"):
        pooled.update_samples(members[:0], labels)
    assert_same(pooled, expected)


def test_samples_of_half_precision_stay_probabilities():
    logits, labels = batch(5)
    members = torch.stack([logits, logits.flip(1)]).softmax(2).half()
    meter = CalibrationMeter(5)
    meter.update_samples(members, labels)
    expected = CalibrationMeter(5)
    expected.update_probs(members.double().mean(0).half(), labels)
    assert_same(meter, expected)


def test_images_belong_to_groups(tmp_path):
    a, b = CalibrationMeter(5, per_image=True), CalibrationMeter(5, per_image=True)
    a.update(*batch(0), names=["p1s1", "p1s2"], groups=["p1", "p1"])
    b.update(*batch(1), names=["x", "y"])
    both = a + b
    assert both.names == ["p1s1", "p1s2", "x", "y"] and both.groups == ["p1", "p1", "", ""]
    both.save(tmp_path / "meter.npz")
    assert CalibrationMeter.load(tmp_path / "meter.npz").groups == both.groups
    with pytest.raises(ValueError, match="2 groups"):
        a.update(*batch(1), groups=["p1"])
    state = both.state_dict()
    with pytest.raises(ValueError, match="groups"):
        a.load_state_dict(restated(state, groups=both.groups[:-1]))
    assert a.groups == ["p1", "p1"]


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize(
    ("dtype", "nll"), [(torch.float16, 9.704061), (torch.float32, 87.336545)], ids=str
)
def test_a_probability_of_0_counts_as_the_smallest_normal_number(dtype, nll):
    meter = CalibrationMeter(2)
    meter.update_probs(torch.tensor([[0.0, 1.0]], dtype=dtype), torch.tensor([0]))
    assert meter.compute().nll == pytest.approx(nll, abs=1e-6)


def test_a_merged_meter_shares_nothing_that_changes():
    a, b = measured(*batch(0), per_image=True), measured(*batch(1), per_image=True)
    both = a + b
    before = both.compute()
    a.update(*batch(2))
    b.reset()
    assert both.compute() == before
    CalibrationMeter(5, per_image=True).load_state_dict(both.state_dict())
