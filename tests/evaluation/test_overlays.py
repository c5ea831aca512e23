"""Which images are drawn, and that the arrays behind the panels say what they should."""

import io

import numpy as np
import pytest
from PIL import Image

from segcal.evaluation.overlays import choose, draw, require_images
from segcal.sources.saved import PredictionFolder
from tests.support.evaluated import reports
from tests.support.networks import Halve
from tests.support.saved import SIDE, logits_and_labels, save_folder


@pytest.fixture
def evaluated(tmp_path):
    source = PredictionFolder(save_folder(tmp_path), skip_bad=True)
    (tmp_path / "im001.npz").write_bytes(b"")
    return source, reports(source)["none"]


def test_worst_are_those_with_the_largest_ece_of_their_own(evaluated):
    source, report = evaluated
    own = {}
    for index in (0, 2, 3, 4, 5):
        logits, labels = logits_and_labels(index)
        p = np.exp(logits) / np.exp(logits).sum(0)
        valid = labels != 255
        confidence, right = p.max(0)[valid], (p.argmax(0) == labels)[valid]
        bins = np.ceil(confidence * 15).astype(int)
        gaps = [abs((confidence - right)[bins == b].sum()) for b in range(1, 16)]
        own[index] = sum(gaps) / valid.sum()
    worst = sorted(own, key=own.get, reverse=True)
    assert choose("worst", 3, source, report) == worst[:3]
    (drawn,) = draw(source, worst[:1], {"none": None})["none"]
    assert drawn.ece == pytest.approx(own[worst[0]], rel=1e-5)


def test_random_ones_are_the_same_every_time_and_never_bad(evaluated):
    source, report = evaluated
    chosen = choose("random", 5, source, report)
    assert chosen == [0, 2, 3, 4, 5]
    assert choose("random", 3, source, report) == choose("random", 3, source, report)
    assert len(set(choose("random", 3, source, report))) == 3


def test_names_and_none(evaluated):
    source, report = evaluated
    assert choose("im004, im000", 1, source, report) == [4, 0]
    assert choose("none", 4, source, report) == []
    assert choose("worst", 0, source, report) == []
    for which in ("worst", "random", "none", "im004, im000"):
        require_images(which, source)
    with pytest.raises(ValueError, match="im9"):
        require_images("im004,im9", source)


def test_what_is_drawn_is_what_the_calibrator_says(evaluated):
    source, _ = evaluated
    drawn = draw(source, [0], {"none": None, "half": Halve()})
    logits, labels = logits_and_labels(0)
    for name, scale in (("none", 1.0), ("half", 0.5)):
        (image,) = drawn[name]
        p = np.exp(scale * logits) / np.exp(scale * logits).sum(0)
        np.testing.assert_allclose(image.confidence, p.max(0), rtol=1e-5)
        np.testing.assert_array_equal(image.prediction, p.argmax(0))
        np.testing.assert_array_equal(image.labels, labels)
        np.testing.assert_array_equal(np.isnan(image.gap), labels == 255)
        assert Image.open(io.BytesIO(image.png())).format == "PNG"
    assert drawn["none"][0].name == "im000"
    assert drawn["none"][0].image is None


def test_images_of_another_size_are_fitted_to_the_labels(tmp_path):
    logits, labels = logits_and_labels(0)
    image = np.zeros((2 * SIDE, 3 * SIDE, 3), np.uint8)
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels, image=image)
    source = PredictionFolder(tmp_path)
    (drawn,) = draw(source, [0], {"none": None})["none"]
    assert drawn.image.shape == (SIDE, SIDE, 3)


def test_an_unreadable_image_costs_only_itself(tmp_path, caplog):
    save_folder(tmp_path, 1)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "im000.png").write_bytes(b"no image")
    source = PredictionFolder(tmp_path, images=tmp_path / "images")
    (drawn,) = draw(source, [0], {"none": None})["none"]
    assert drawn.image is None
    assert "im000.png" in caplog.text


def test_nothing_is_drawn_of_classification(tmp_path):
    np.savez(tmp_path / "a.npz", logits=np.zeros((4, 3), np.float32), labels=np.arange(4) % 3)
    source = PredictionFolder(tmp_path)
    assert draw(source, [0], {"none": None}) == {"none": []}
