"""The embedded data: deterministic, from disjoint digits, labelled as drawn."""

import numpy as np
import pytest
import torch

from segcal.data import DataConfig, scenes
from segcal.data import build as build_data


@pytest.fixture(scope="module")
def data():
    return build_data(DataConfig(), seed=0)


def test_items_have_the_promised_shapes(data):
    for part in (data.train, data.holdout, data.test):
        image, label = part[0]
        assert image.dtype == torch.float32 and image.shape == (3, 48, 48)
        assert label.dtype == torch.int64 and label.shape == (48, 48)
        assert part.image(0).dtype == np.uint8 and part.image(0).shape == (48, 48, 3)
        assert len(part.names) == len(part) == len(set(part.names))
    assert data.num_classes == 11 == len(data.class_names) == len(data.palette)
    assert data.uniform


def test_every_class_and_the_rim_occur(data):
    for part in (data.train, data.holdout, data.test):
        labels = torch.stack([part[i][1] for i in range(100)])
        assert labels.unique().tolist() == [*range(11), 255]
        assert 0.7 < (labels == 0).float().mean() < 0.9
        assert (labels == 255).float().mean() < 0.08


def test_normalised_item_is_the_image(data):
    image, _ = data.test[3]
    shown = (image * 0.5 + 0.5).mul(255).round().permute(1, 2, 0).numpy()
    assert (shown == data.test.image(3)).all()


def test_same_configuration_gives_the_same_scenes_in_any_order(data):
    again = build_data(DataConfig(), seed=7)
    for part in ("train", "holdout", "test"):
        one, two = getattr(data, part), getattr(again, part)
        for i in (5, 0):
            assert torch.equal(one[i][0], two[i][0]) and torch.equal(one[i][1], two[i][1])


def test_split_seed_moves_the_hold_out_but_not_the_test_scenes(data):
    other = build_data(DataConfig(split_seed=1, limit=20), seed=0)
    assert not torch.equal(other.holdout[0][0], data.holdout[0][0])
    assert torch.equal(other.test[0][0], data.test[0][0])


def test_parts_are_made_from_disjoint_digit_images():
    source = scenes.scenes(DataConfig(holdout=0.2))
    pools = [
        {image.tobytes() for image in part.pool.images}
        for part in (source.train, source.holdout, source.test)
    ]
    assert not pools[0] & pools[1] and not pools[0] & pools[2] and not pools[1] & pools[2]
    assert sum(map(len, pools)) == 1797  # every digit image is used, and no two are equal


def test_holdout_share_is_kept(data):
    assert (len(data.train), len(data.holdout)) == (1800, 200)


def test_label_follows_the_ink():
    """One digit drawn: its class where the ink is, 255 only between ink and background."""
    square = np.zeros((1, 8, 8), dtype=np.float32)
    square[0, 2:6, 2:6] = 1
    for seed in range(20):
        pool = scenes.Digits(square, np.array([4]))
        _, label = scenes.make_scene(pool, np.random.default_rng(seed))
        assert set(np.unique(label)) == {0, 5, 255}
        inked = np.pad(label == 5, 2)
        near = np.zeros_like(inked)
        for dy in (-2, -1, 0, 1, 2):
            for dx in (-2, -1, 0, 1, 2):
                near |= np.roll(inked, (dy, dx), (0, 1))
        rim = label == 255
        assert (near[2:-2, 2:-2] & rim).sum() == rim.sum()  # nowhere far from the ink


def test_another_ignore_index_is_refused():
    with pytest.raises(ValueError, match=r"data.ignore_index"):
        build_data(DataConfig(ignore_index=0), seed=0)


def test_digits_as_classification():
    data = build_data(DataConfig("digits"), seed=0)
    assert [len(data.train), len(data.holdout), len(data.test)] == [1132, 126, 539]
    image, label = data.test[0]
    assert image.shape == (3, 8, 8) and image.dtype == torch.float32
    assert label.shape == () and label.dtype == torch.int64
    assert torch.equal(image[0], image[1]) and data.num_classes == 10
    classes = {int(data.test[i][1]) for i in range(len(data.test))}
    assert classes == set(range(10))
