"""PACS from a small copy in its official layout, and from real images where they are."""

import numpy as np
import pytest

from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.data.classification import DOMAINS, PACS_CLASSES
from segcal.data.shift import Shift
from segcal.data.splits import shifted as build_shifted
from tests.support.datasets import pacs_colour, write_pacs


@pytest.fixture
def root(tmp_path):
    write_pacs(tmp_path)
    return tmp_path


def build(root, **options):
    return build_data(DataConfig("pacs", root=str(root), **options), seed=0)


def domains_of(*parts):
    """The domains in parts, read from the red channel."""
    return {DOMAINS[part.image(i)[0, 0, 0] // 50] for part in parts for i in range(len(part.names))}


def test_trained_on_photo_and_tested_on_the_others(root):
    data = build(root)
    assert data.class_names == PACS_CLASSES == tuple(sorted(PACS_CLASSES))
    assert len(data.train) + len(data.holdout) == 21 and len(data.test) == 63
    assert domains_of(data.train, data.holdout) == {"photo"}
    assert domains_of(data.test) == {"art_painting", "cartoon", "sketch"}
    for part in (data.train, data.holdout, data.test):
        for i in range(len(part)):
            image, label = part[i]
            assert image.shape == (3, 224, 224) and part.image(i)[0, 0, 1] == 30 * label


def test_values_have_the_statistics_of_imagenet(root):
    image, _ = build(root, domain="sketch", resize=8).test[4]  # the elephant's second image
    assert image.shape == (3, 8, 8)
    expected = (np.array(pacs_colour("sketch", 1, 1)) / 255 - [0.485, 0.456, 0.406]) / [
        0.229, 0.224, 0.225,
    ]  # fmt: skip
    np.testing.assert_allclose(image[:, 3, 3].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("domain", ["art", "sketch"])
def test_one_domain_is_tested(root, domain):
    data, both = build(root, domain=domain, resize=8), build(root, resize=8)
    assert domains_of(data.test) == {"art_painting" if domain == "art" else domain}
    assert len(data.test) == 21 and data.test.names[3] == "elephant/pic_0"
    assert data.train.names == both.train.names  # the same training whatever is tested


def test_one_domain_is_left_out(root):
    data = build(root, domain="photo", train_domain="others", resize=8)
    assert domains_of(data.test) == {"photo"}
    assert domains_of(data.train, data.holdout) == set(DOMAINS) - {"photo"}
    assert domains_of(build(root, train_domain="sketch").test) == set(DOMAINS) - {"sketch"}


def test_the_domain_that_was_left_out_may_be_a_shift_under_both_its_names(root):
    config = DataConfig("pacs", root=str(root), domain="art", train_domain="others", resize=8)
    data = build_data(config, seed=0)
    for name in ("art", "art_painting"):
        found = build_shifted(data, config, Shift("domain", name)).test
        assert domains_of(found) == {"art_painting"}
    with pytest.raises(ValueError, match=r"Expected domain art_painting, .* but got sketch"):
        build_shifted(data, config, Shift("domain", "sketch"))


def test_domains_that_cannot_be(root):
    for options, word in (
        ({"domain": "clipart"}, "clipart"),
        ({"train_domain": "all"}, "others"),
        ({"train_domain": "others"}, "what to test on"),
        ({"domain": "photo"}, "another domain"),
    ):
        with pytest.raises(ValueError, match=word):
            build(root, **options)


def test_a_class_without_images_is_named(root):
    for path in (root / "PACS" / "cartoon" / "guitar").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"Expected images .*cartoon/guitar, but got none"):
        build(root)


def test_missing_data_says_where_it_goes(tmp_path):
    with pytest.raises(ValueError, match=rf"Expected PACS .*in {tmp_path}/PACS.*data/README.md"):
        build(tmp_path)


def test_real_images(shared_data):
    data = build(shared_data / "pacs_small", domain="sketch", resize=32)
    assert len(data.train) + len(data.holdout) == len(data.test) == 105
    counts = np.bincount([int(data.test[i][1]) for i in range(105)])
    assert counts.tolist() == [15] * 7
    assert data.test[0][0].mean() > 1.5  # sketches are mostly white paper, photos are not
    assert data.train[0][0].mean() < 1.5
