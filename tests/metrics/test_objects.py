"""Objects: cases by hand, laws, and a reference that loops over pixels and pairs."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.files import BadFile
from segcal.metrics.objects import CONFIDENCES, MATCHES, ObjectCounter, ObjectRule

IGNORED = 255


def mask(*rows):
    """Labels drawn as text: a digit is a class, `.` is class 0 and `x` is ignored."""
    numbers = {".": 0, "x": IGNORED}
    return np.array([[numbers.get(c, c) for c in row] for row in rows]).astype(np.int64)


def probabilities(predicted, sure=0.9):
    """(1, 3, *S) probabilities whose largest, `sure` at each pixel, is that of `predicted`."""
    sure = np.maximum(np.broadcast_to(sure, predicted.shape), 0.5)
    rest = (1 - sure) / 2
    return np.stack([np.where(predicted == c, sure, rest) for c in range(3)])[None]


def count(predicted, truth, sure=0.9, **options):
    counter = ObjectCounter(ObjectRule((1,), **options), 3)
    counter.update(*map(torch.tensor, (probabilities(predicted, sure), truth[None])))
    return counter.compute(resamples=0)


def numbers(report):
    """Predicted, real, true objects."""
    return report.whole.predicted, int(report.whole.top.hits.sum()), report.whole.truth


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        pytest.param(["11..", "11..", "...1"], ["11..", "11..", "...1"], (2, 2, 2), id="corner"),
        pytest.param(["11111"], ["11.11"], (1, 0, 2), id="merged: IoU 2/5 with each"),
        pytest.param(["1111.11"], ["1111111"], (2, 1, 1), id="split: IoU 4/7 with one part"),
        pytest.param(["11.11"], ["11111"], (2, 0, 1), id="split: IoU 2/5 with both parts"),
        pytest.param(["1...", "...."], ["....", "..11"], (1, 0, 1), id="missed"),
        pytest.param(["11.."], [".11."], (1, 0, 1), id="IoU 1/3"),
        pytest.param(["111."], [".111"], (1, 1, 1), id="IoU 1/2 is enough"),
        pytest.param(["...."], ["...."], (0, 0, 0), id="empty"),
        pytest.param(["...."], ["xxxx"], (0, 0, 0), id="ignored"),
        pytest.param(["1122"], ["1122"], (1, 1, 1), id="another class"),
        pytest.param(["11111"], ["11x11"], (2, 2, 2), id="a strip of ignored pixels cuts both"),
        pytest.param(["11111"], ["1xxx."], (0, 0, 1), id="more than half ignored: left out"),
        pytest.param(["1111"], ["..xx"], (1, 0, 0), id="half ignored: false"),
    ],
)
def test_cases_by_hand(predicted, truth, expected):
    assert numbers(count(mask(*predicted), mask(*truth))) == expected


def test_what_is_real_follows_the_match():
    predicted, truth = (
        mask("111111."),
        mask("11....."),
    )
    assert numbers(count(predicted, truth)) == (1, 0, 1)
    assert numbers(count(predicted, truth, iou=0.3)) == (1, 1, 1)
    assert numbers(count(predicted, truth, match="overlap")) == (1, 1, 1)
    assert numbers(count(predicted, truth, match="centre")) == (1, 0, 1)
    assert numbers(count(predicted, mask("..1...."), match="centre")) == (1, 1, 1)
    # One to one: of two true objects that overlap, the one of the larger IoU is found.
    report = count(predicted, mask("1.11..."), match="overlap")
    assert numbers(report) == (1, 1, 2) and report.whole.found == 1


def test_confidences_by_hand():
    predicted = mask("11111", "11111", "11111")
    sure = np.full((3, 5), 0.6)
    sure[1, 1:4] = 0.9  # all but the border
    for confidence, expected in {
        "mean": (12 * 0.6 + 3 * 0.9) / 15,
        "min": 0.6,
        "border": 0.6,
    }.items():
        report = count(predicted, predicted, sure, confidence=confidence)
        assert report.whole.confidence == pytest.approx(expected)


def test_small_objects_are_left_out():
    predicted, truth = mask("11.1.111"), mask("11...1..")
    assert numbers(count(predicted, truth)) == (3, 1, 2)
    assert numbers(count(predicted, truth, min_size=2)) == (2, 1, 1)


def test_objects_of_volumes_and_of_sigmoid_outputs():
    volume = np.stack([mask("11.", "..."), mask("..1", "..1")])  # no side in common
    assert numbers(count(volume, volume)) == (2, 2, 2)
    labels = torch.tensor(np.stack([mask("11..1"), mask("1x..1")]))[None]
    counter = ObjectCounter(ObjectRule((0, 1)), 2, multilabel=True)
    counter.update(torch.where(labels == 1, 0.8, 0.1), labels)
    assert [part.truth for part in counter.compute().parts[:2]] == [2, 2]


def test_a_class_with_false_objects_alone_is_listed():
    counter = ObjectCounter(ObjectRule((1, 2)), 3)
    counter.update(*map(torch.tensor, (probabilities(mask("11.22")), mask("11...")[None])))
    found = {part.name: (part.precision, part.truth) for part in counter.compute().parts}
    assert found["class 1"] == (1.0, 1) and found["class 2"] == (0.0, 0)


def reference(predicted, truth, sure, rule):
    """Confidence and realness of each predicted object, and the number of true ones, by loops."""

    def neighbours(place):
        for axis in range(len(place)):
            for step in (-1, 1):
                yield (*place[:axis], place[axis] + step, *place[axis + 1 :])

    def objects(inside):
        found, left = [], {tuple(map(int, p)) for p in np.argwhere(inside)}
        while left:
            group, front = set(), {left.pop()}
            while front:
                group |= front
                front = {n for place in front for n in neighbours(place)} & left
                left -= front
            found.append(group)
        return found

    valid = truth != IGNORED
    kept = np.zeros_like(valid)
    for group in objects(predicted == 1):
        if 2 * sum(valid[p] for p in group) >= len(group):
            kept[tuple(np.array(sorted(group)).T)] = True
    mine, theirs = objects(kept & valid), objects(truth == 1)
    mine, theirs = ([o for o in each if len(o) >= rule.min_size] for each in (mine, theirs))

    def confidence(group):
        if rule.confidence == "border":
            group = {p for p in group if any(n not in group for n in neighbours(p))}
        values = [sure[p] for p in group]
        return min(values) if rule.confidence == "min" else np.mean(values)

    def holds_centre(t, p):
        centre = np.mean(sorted(p), 0)
        return any(all(abs(np.subtract(place, centre)) <= 0.5) for place in t)

    def meets(p, t):
        if rule.match == "iou":
            return len(p & t) >= rule.iou * len(p | t)
        return len(p & t) > 0 if rule.match == "overlap" else len(p & t) and holds_centre(t, p)

    pairs = sorted(
        (-len(p & t) / len(p | t), -confidence(p), len(p), len(t), i, j)
        for i, p in enumerate(mine)
        for j, t in enumerate(theirs)
        if meets(p, t)
    )
    real, taken = set(), set()
    for *_, i, j in pairs:
        if i not in real and j not in taken:
            real.add(i)
            taken.add(j)
    return sorted((confidence(p), i in real) for i, p in enumerate(mine)), len(theirs)


def drawn(seed, shape):
    """A random prediction, a similar truth with ignored pixels, and confidences of 1/256."""
    rng = np.random.default_rng(seed)
    predicted = (rng.random(shape) < 0.5).astype(int)
    truth = np.where(rng.random(shape) < 0.15, rng.integers(0, 2, shape), predicted)
    truth[rng.random(shape) < 0.1] = IGNORED
    return predicted, truth, rng.integers(129, 256, shape) / 256


RULES = {
    "match": st.sampled_from(sorted(MATCHES)),
    "confidence": st.sampled_from(["mean", "min", "border"]),
    "min_size": st.integers(1, 3),
    "shape": st.sampled_from([(9, 11), (3, 4, 5)]),
}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.fixed_dictionaries(RULES))
def test_a_slow_reference_agrees(seed, options):
    predicted, truth, sure = drawn(seed, options.pop("shape"))
    rule = ObjectRule((1,), **options)
    expected, true = reference(predicted, truth, sure, rule)
    counter = ObjectCounter(rule, 3)
    counter.update(*map(torch.tensor, (probabilities(predicted, sure), truth[None])))
    report = counter.compute(resamples=0)
    found = [pair for image in counter.by_unit() for pair in zip(*image, strict=True)]
    confidence, real = (
        np.array(x) for x in (zip(*expected, strict=True) if expected else ((), ()))
    )
    assert [r for _, r in sorted(found)] == real.tolist() and report.whole.truth == true
    np.testing.assert_allclose([c for c, _ in sorted(found)], confidence, atol=1e-6)
    if len(expected):
        assert report.whole.brier == pytest.approx(((confidence - real) ** 2).mean(), abs=1e-6)
        bins = np.ceil(confidence * 15)
        gaps = [abs((confidence - real)[bins == b].sum()) for b in np.unique(bins)]
        assert report.whole.ece == pytest.approx(sum(gaps) / len(bins), abs=1e-6)
    if 0 < real.sum() < len(real):
        pairs = [(a > b) + (a == b) / 2 for a in confidence[real] for b in confidence[~real]]
        assert report.whole.auroc == pytest.approx(np.mean(pairs))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.fixed_dictionaries(RULES))
def test_flips_and_padding_change_nothing(seed, options):
    images = drawn(seed, options.pop("shape"))
    expected = count(*images, **options)
    for change in (
        lambda x: x[::-1].copy(),
        lambda x: x[..., ::-1].copy(),
        lambda x: x.T.copy(),
        lambda x: np.pad(x, 3),
    ):
        found = count(*map(change, images), **options)
        assert found.whole.top.hits.tolist() == expected.whole.top.hits.tolist()
        assert found.whole.ece == pytest.approx(expected.whole.ece, nan_ok=True)
        assert found.whole.truth == expected.whole.truth


def write_maps(folder, ids, scores=None):
    folder.mkdir(exist_ok=True)
    np.savez(folder / "a.npz", instances=ids, **({} if scores is None else {"scores": scores}))
    return folder


def test_instance_maps_and_their_scores(tmp_path):
    predicted, truth = mask("111111.."), mask("111111..")
    maps = write_maps(tmp_path / "maps", mask("22233311"), np.array([0.1, 0.2, 0.7]))
    labels = write_maps(tmp_path / "labels", mask("77745511"))
    rule = ObjectRule((1,), labels=(labels,), maps=(maps,), confidence="score")
    counter = ObjectCounter(rule, 3)
    counter.update(*map(torch.tensor, (probabilities(predicted), truth[None])), ["a"])
    ((confidence, real),) = counter.by_unit()  # 1 is predicted as background
    assert confidence.tolist() == [0.2, 0.7] and real.tolist() == [True, True]
    assert numbers(counter.compute()) == (2, 2, 3)
    write_maps(labels, mask("33322199"))  # other numbers change nothing
    counter.update(*map(torch.tensor, (probabilities(predicted), truth[None])), ["a"])
    assert numbers(counter.compute()) == (4, 4, 6)
    with pytest.raises(BadFile, match="no instance map of b"):
        counter.update(*map(torch.tensor, (probabilities(predicted), truth[None])), ["b"])
    write_maps(tmp_path / "maps", mask("22233311"), np.array([0.1, 0.2]))
    with pytest.raises(BadFile, match="scores"):
        counter.update(*map(torch.tensor, (probabilities(predicted), truth[None])), ["a"])


def test_froc_precision_and_recall_above_a_threshold():
    counter = ObjectCounter(ObjectRule((1,)), 3)
    for sure, truth in ((0.9, "1...1"), (0.8, "....1"), (0.7, "1....")):
        counter.update(*map(torch.tensor, (probabilities(mask("1...."), sure), mask(truth)[None])))
    report = counter.compute(resamples=0)
    assert numbers(report) == (3, 2, 4)
    assert (report.whole.precision, report.whole.recall) == pytest.approx((2 / 3, 0.5))
    assert report.false_per_image == pytest.approx(1 / 3)
    assert report.recall_at(0.0) == 0.25 and report.recall_at(1.0) == 0.5
    edge = report.fine.edges[np.searchsorted(report.fine.edges, 0.75)]
    assert report.above(edge) == (0.5, 0.25)
    assert [part.name for part in report.parts] == ["up to 1 pixels"]


def test_streams_add_up_and_intervals_are_over_images():
    rng = np.random.default_rng(0)
    truth = (rng.random((12, 20, 20)) < 0.4).astype(np.int64)
    predicted = np.where(rng.random(truth.shape) < 0.1, 1 - truth, truth)
    sure = rng.uniform(0.5, 1, truth.shape)
    probs = np.concatenate([probabilities(p, s) for p, s in zip(predicted, sure, strict=True)])
    counters = [ObjectCounter(ObjectRule((1,)), 3) for _ in range(2)]
    counters[0].update(torch.tensor(probs), torch.tensor(truth))
    for n in range(12):
        counters[1].update(torch.tensor(probs[n : n + 1]), torch.tensor(truth[n : n + 1]))
    one, other = (counter.compute(resamples=100) for counter in counters)
    assert json.dumps(vars(one.whole), default=str) == json.dumps(vars(other.whole), default=str)
    for score in ("precision", "recall", "brier", "auroc"):
        held = one.whole.intervals[score]
        assert held.low < getattr(one.whole, score) < held.high
    assert "ece" in one.whole.intervals


def test_a_group_is_one_large_image():
    """Pairs of images of one group, against the two side by side with a gap between them."""
    apart, together = (ObjectCounter(ObjectRule((1,)), 3) for _ in range(2))

    def update(counter, images, name):
        predicted, truth, sure = images
        probs, labels = torch.tensor(probabilities(predicted, sure)), torch.tensor(truth[None])
        counter.update(probs, labels, groups=[name])

    for i in range(12):
        pair = [
            [np.pad(x, ((0, 0), (0, 1))) for x in drawn(seed, (10, 10))] for seed in (i, 100 + i)
        ]
        for images in pair:
            update(apart, images, f"patient {i:02d}")
        update(together, map(np.hstack, zip(*pair, strict=True)), f"patient {i:02d}")
    one, other = (counter.compute(resamples=50).whole for counter in (apart, together))
    assert set(one.intervals) == {"precision", "recall", "brier", "ece", "auroc"}
    for name, interval in one.intervals.items():
        same = other.intervals[name]
        assert (interval.low, interval.high) == pytest.approx((same.low, same.high), abs=1e-9)
    for mine, theirs in zip(apart.by_unit(), together.by_unit(), strict=True):
        assert sorted(zip(*mine, strict=True)) == sorted(zip(*theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"classes": ()},
        {"match": "nearest"},
        {"confidence": "max"},
        {"iou": 0.0},
        {"min_size": 0},
        {"confidence": "score"},
        {"labels": ("nowhere",)},
        {"calibrate": "dc"},
    ],
)
def test_wrong_rules_are_refused(options):
    with pytest.raises(ValueError, match=r"objects|instance"):
        ObjectRule(**{"classes": (1,), **options})


def test_a_rule_is_read_from_text():
    assert ObjectRule.parse("classes:1,2", iou=0.3) == ObjectRule((1, 2), iou=0.3)
    for text in ("classes", "boundary:3", "classes:a"):
        with pytest.raises(ValueError, match="classes:1,2"):
            ObjectRule.parse(text)
    with pytest.raises(ValueError, match="below 3"):
        ObjectCounter(ObjectRule((3,)), 3)
    assert all(ObjectRule((1,), match=match) for match in MATCHES) and len(CONFIDENCES) == 4
