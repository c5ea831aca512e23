"""The page is one file that fetches nothing, escapes every name, and says what was found."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from segcal.metrics import CalibrationMeter, compare_models
from segcal.viz import PageRow, make_overlay, write_page
from segcal.viz.page import headline, numbers, render_page, verdict
from segcal.viz.page.numbers import inspected, page_numbers, to_json
from segcal.viz.tables import score_tables
from tests.support.synthetic_reports import (
    constant_report,
    images,
    measured,
    predictor,
    synthetic_report,
)

NAMES = ["road", "sky", "tree", "<i>car</i>"]
EVIL = '"></script><script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
LOG = [{"epoch": e, "holdout/ece": 0.1 / e, "holdout/sce": 0.01 / e} for e in (1, 2, 3)]


def row(name="nll", sharpness=3.0, **more):
    return PageRow(name, synthetic_report(sharpness=sharpness, names=NAMES, per_image=True), **more)


def evil_rows():
    """Two rows whose every name wants to break out."""
    probs, labels = predictor(0.7)
    overlay = make_overlay(None, probs, labels, name=EVIL, class_names=[EVIL, *"abc"], ece=0.0734)
    first = row(
        EVIL,
        history=LOG,
        config=f"loss: nll\nname: {EVIL}\n",
        overlays=[overlay],
        skipped={f"{EVIL}.npz": "truncated"},
        shifts={"fog:1": synthetic_report(names=NAMES), "fog:3": synthetic_report(names=NAMES)},
        notes=[f"fitted on {EVIL}"],
    )
    return [first, row("calm", 1.0, history=LOG)]


class Elements(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._stack = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._stack.append(tag)

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._stack):
            self.words.append(data)

    def all(self, tag):
        return [attrs for each, attrs in self.tags if each == tag]


@pytest.fixture(scope="module")
def page():
    return render_page(evil_rows(), title=f"Title {EVIL}")


def test_names_are_words_not_tags(page):
    found = Elements(page)
    assert len(found.all("script")) == 5
    assert not any("onerror" in attrs for _, attrs in found.tags)
    assert EVIL in "".join(found.words) and "<i>car</i>" in found.words
    assert not found.all("i")


def test_nothing_points_outside(page):
    for tag, attrs in Elements(page).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attrs.get(name, "#").startswith(("data:", "#")), (tag, attrs)
        assert "url(" not in (attrs.get("style") or "")


def test_policy_allows_our_scripts_alone(page):
    policy = next(
        attrs["content"]
        for attrs in Elements(page).all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "img-src data:" in policy


def test_page_holds_what_it_must(page):
    words = " ".join(Elements(page).words)
    rows = evil_rows()
    report = rows[0].report
    for table in score_tables({each.name: each.report for each in rows}):
        for _, cells in table.rows:
            assert all(cell.text.replace("-", "−") in words for cell in cells)
    for needed in (
        *("1 file left out", "truncated", "loss: nll", "15 equal bins (lo, hi]"),
        *("segcal 0.", f"{report.protocol.pixels:,} pixels of 8 images", "fitted on"),
        *("Under shift", "Over training", "mean over shifts"),
    ):
        assert needed in words
    assert all(image["alt"] for image in Elements(page).all("img"))


def test_page_is_always_the_same_and_small(tmp_path):
    rows = evil_rows()
    for name in ("a", "b"):
        write_page(rows, tmp_path / f"{name}.html")
    first = (tmp_path / "a.html").read_bytes()
    assert first == (tmp_path / "b.html").read_bytes() and len(first) < 2_500_000
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file is left


def test_regions_and_empty_reports_have_a_page():
    report = synthetic_report(names=NAMES)
    whole = replace(report, regions={"boundary": report, "interior": report})
    words = Elements(render_page([PageRow("a", whole)])).words
    assert "boundary" in words and "interior" in words
    empty = CalibrationMeter(4, per_image=True).compute()
    assert "Nothing was counted." in render_page([PageRow("empty", empty)])
    phrases = headline([PageRow("empty", empty), PageRow("full", report)])
    assert phrases[0].text == "full"
    with pytest.raises(ValueError, match="at least one row"):
        render_page([])


# Sentences --------------------------------------------------------------------------------------


def words_of(*args):
    return "".join(phrase.text for phrase in headline(*args)).replace("\u00a0", " ")


def test_headline_says_what_was_found():
    sure = constant_report(0.9, 7, class_names=["cat", "dog"])
    assert words_of([PageRow("a", sure)]) == (
        "Over-confident by 20.0 points: mean confidence 90.0 %, accuracy 70.0 %. ECE is 20.00 %; "
        "the worst calibrated class is cat, with an ECE of 20.00 %."
    )
    assert verdict(sure) == ("over-confident by 20.0 points", "over")
    assert verdict(constant_report(0.6, 7)) == ("under-confident by 10.0 points", "under")
    assert verdict(constant_report(0.7, 7)).kind == "even"


@pytest.mark.parametrize("groups", [None, ["a", "b"]])
def test_a_gap_within_its_interval_is_neither_red_nor_over_confident(groups):
    """Two images, or groups of two, 75 and 70 % right: the gap is 1 point, its error 2.5 points."""
    meter = CalibrationMeter(2, per_image=True)
    labels = torch.stack([(torch.arange(20) >= right).long() for right in (15, 14)])[:, None]
    probs = torch.tensor([0.735, 0.265], dtype=torch.float64).view(1, 2, 1, 1).expand(2, 2, 1, 20)
    for _ in range(2 if groups else 1):
        meter.update_probs(probs, labels, groups=groups)
    found = verdict(meter.compute())
    assert found.kind == "even" and found.text.startswith("neither over- nor under-confident")
    # ± t(0.975, 1) · 2.5 points · n / (n - 1)
    assert re.findall(r"[+−][\d.]+", found.text) == ["−62.53", "+64.53"]
    assert verdict(synthetic_report(sharpness=3.0, per_image=True)).kind == "over"


def test_headline_of_several_names_the_best_its_cost_and_the_overlap():
    rows = [row("sharp"), row("calm", 1.0), row("twin", 1.0)]
    text = words_of(rows)  # all have the same predictions
    assert text.startswith("calm has the lowest ECE")
    assert "All have the same mIoU and accuracy. The ECE of sharp is the highest" in text
    assert "The 95 % interval of calm overlaps that of twin." in text
    weak = PageRow("weak", constant_report(0.4, 4, class_names=["a", "b"]))
    strong = PageRow("strong", constant_report(0.9, 7, class_names=["a", "b"]))
    text = words_of([strong, weak])
    assert text.startswith("weak has the lowest ECE, 0.00 %")
    assert "It loses 5.0 points of mIoU and 10.0 points of accuracy to strong." in text


def test_headline_does_not_call_chance_a_result():
    generator = torch.Generator().manual_seed(0)
    logits, labels = images(12, generator, 0.0)
    meters = {"a": [measured(logits, labels)], "b": [measured(1.001 * logits, labels)]}
    rows = [PageRow(name, meter.compute()) for name, (meter,) in meters.items()]
    text = words_of(rows, compare_models(meters))
    assert text.endswith("may be chance, of images or of trainings: see the differences.")
    one_network = words_of(rows, compare_models(meters, trainings={"a": ["a"], "b": ["a"]}))
    assert one_network.endswith("may be chance, of images: see the differences.")
    page = render_page(rows, comparison=compare_models(meters))
    assert "Differences from a" in page and 'class="best"' not in page.split("<h2>Reliability")[0]


def test_headline_names_the_mean_under_shift():
    reports = [synthetic_report(sharpness=s, images=1, side=16) for s in (2.0, 3.0, 4.0)]
    one = PageRow("a", reports[0], shifts={"fog:1": reports[0], "fog:5": reports[1]})
    mean = 50 * (reports[0].ece + reports[1].ece)
    assert f" Under 2 shifts the mean ECE is {mean:.2f} %: confidence" in words_of([one])
    other = PageRow("b", reports[0], shifts={"fog:1": reports[1], "fog:5": reports[2]})
    assert " Under 2 shifts a has the lowest mean ECE" in words_of([one, other])
    single = PageRow("a", reports[0], shifts={"snow:3": reports[1]})
    assert " Under snow:3 the ECE is" in words_of([single])


# Numbers of the scripts -------------------------------------------------------------------------


def test_json_is_safe_inside_a_script():
    text = to_json({"name": f"{EVIL}&\u2028\u2029", "none": float("nan")})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": f"{EVIL}&\u2028\u2029", "none": None}
    assert json.loads(to_json(page_numbers(evil_rows())))["entries"][0]["name"] == EVIL


def test_sums_by_class_are_those_of_the_confusion():
    meter = CalibrationMeter(3, multilabel=True)
    labels = torch.arange(2 * 3 * 64).view(2, 3, 8, 8) % 2
    meter.update(torch.linspace(-3, 3, 384).view(2, 3, 8, 8), labels)
    report = meter.compute()
    for c, found in enumerate(page_numbers([PageRow("a", report)])["entries"][0]["accepted"]):
        assert sum(found["correct"]) == report.confusion[c, 1, 1]
        assert sum(found["wrong"]) == report.confusion[c, 0, 1]


def overlay_of(name, shape=(60, 80)):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(4, 0.3), size=shape).transpose(2, 0, 1)
    image = rng.integers(256, size=(*shape, 3)).astype(np.uint8)
    return make_overlay(image, probs, rng.integers(4, size=shape), name=name, class_names=NAMES)


def test_images_of_several_models_are_grouped_and_keep_to_their_budget(monkeypatch):
    report = synthetic_report(4, names=NAMES)
    overlays = [overlay_of(f"{i}") for i in range(4)]
    rows = [PageRow(name, report, overlays=overlays) for name in "ab"]

    def size(found):
        return sum(len(i["image"]) + sum(len(m["planes"]) for m in i["models"]) for i in found)

    whole = inspected(rows)
    assert [(each["step"], len(each["models"])) for each in whole] == [(1, 2)] * 4
    monkeypatch.setattr(numbers, "BUDGET", size(whole) // 2)
    reduced = inspected(rows)
    assert size(reduced) <= size(whole) // 2 and reduced[0]["step"] > 1
    large = PageRow("b", report, overlays=[overlay_of("large", (10, 1100))])
    assert inspected([large])[0]["step"] >= 3
