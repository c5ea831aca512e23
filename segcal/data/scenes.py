"""Embedded data: real handwritten digits, alone or pasted into cluttered scenes.

Scikit-learn has 1797 of them, so no file is needed. The scenes to train on, to hold out and to test
on are made from disjoint sets of digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segcal.data.options import DataConfig
from segcal.data.samples import ArrayPart, Part, RawDataset, digest, split
from segcal.data.transforms import Augmentation

_SIDE = 48
TRAIN_SCENES = 2000  # hold-out included
TEST_SCENES = 500
IGNORE = 255

_TEST_SHARE = 0.3  # of the digit images
_INK = 0.75  # opacity from which a pixel belongs to the digit; below 1 - _INK to what is behind
_PALETTE = np.array(
    [
        (0, 0, 0), (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189),
        (140, 86, 75), (227, 119, 194), (127, 127, 127), (188, 189, 34), (23, 190, 207),
    ],
    dtype=np.uint8,
)  # fmt: skip


class Digits(NamedTuple):
    """Digit images, (n, 8, 8) float32 in 0..1, and their classes, (n,) int64."""

    images: np.ndarray
    classes: np.ndarray


def digits(config: DataConfig) -> RawDataset:
    """The digits as classification: 8x8 images of 10 classes, 1258 to train on and 539 to test."""
    parts = [
        ArrayPart(
            images=(pool.images * 255).round().astype(np.uint8),
            labels=pool.classes,
            names=[f"{name}-{i:04d}" for i in range(len(pool.classes))],
        )
        for name, pool in zip(("train", "test"), _load(), strict=True)
    ]
    return RawDataset(
        train=parts[0],
        test=parts[1],
        class_names=tuple(map(str, range(10))),
        augmentation=Augmentation(pad=1, crop_size=8),
        palette=_PALETTE[1:],
    )


def scenes(config: DataConfig) -> RawDataset:
    """Scenes of 48x48: class 0 is the background, class d + 1 the digit d, 255 its outline."""
    if config.ignore_index not in (None, IGNORE):
        raise ValueError(
            f"data.ignore_index: expected {IGNORE} for the scenes, but got {config.ignore_index}"
        )
    train, test = _load()
    chosen = split(len(train.classes), holdout=config.holdout, seed=config.split_seed)
    kept, held = (Digits(train.images[some], train.classes[some]) for some in chosen)
    train_count, held_count = map(len, split(TRAIN_SCENES, holdout=config.holdout, seed=0))
    return RawDataset(
        train=ScenePart("train", kept, train_count, seed=1),
        holdout=ScenePart("holdout", held, held_count, seed=2),
        test=ScenePart("test", test, TEST_SCENES, seed=3),
        class_names=("background", *map(str, range(10))),
        palette=_PALETTE,
    )


class ScenePart(Part):
    """Scenes made from one pool of digits, each when it is first asked for, and kept from then on.

    They are called name-0000 and so on; scene i depends on the pool, the seed and i alone.
    """

    def __init__(self, name: str, pool: Digits, count: int, *, seed: int) -> None:
        self.names = [f"{name}-{i:04d}" for i in range(count)]
        self.pool = pool
        self._seed = seed
        self._made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index not in self._made:
            self._made[index] = make_scene(self.pool, np.random.default_rng((self._seed, index)))
        return self._made[index]

    def image(self, index: int) -> np.ndarray:
        return self.read(index)[0]

    def label(self, index: int) -> np.ndarray:
        return self.read(index)[1]

    def fingerprint(self, indices: Sequence[int]) -> str:
        return digest(
            self.pool.images.tobytes(), self.pool.classes.tobytes(), f"{self._seed} {indices}"
        )


def _load() -> tuple[Digits, Digits]:
    """(train, test): the same split whatever the options."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, classes = (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)
    train, test = split(len(classes), holdout=_TEST_SHARE, seed=0)
    return Digits(images[train], classes[train]), Digits(images[test], classes[test])


def make_scene(pool: Digits, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One scene, (48, 48, 3) uint8 RGB, and its labels, (48, 48) uint8; `rng` decides all of it."""
    ground = (rng.uniform(0.1, 0.45) + rng.uniform(-0.12, 0.12, 3)).astype(np.float32)
    image = ground + _texture(rng)  # (48, 48, 3)
    label = np.zeros((_SIDE, _SIDE), dtype=np.uint8)
    for _ in range(rng.integers(0, 2)):
        _paste(image, label, _arc(rng), _ink(ground, rng), rng)
    for _ in range(rng.integers(3, 6)):
        choice = rng.integers(len(pool.classes))
        opacity = _warp(pool.images[choice], rng)
        _paste(image, label, opacity, _ink(ground, rng), rng, int(pool.classes[choice]) + 1)
    image *= 1 + 0.12 * _smooth(rng, cells=2)  # uneven light
    image += rng.uniform(0.01, 0.06) * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(255 * image, 0, 255).astype(np.uint8), label


def _texture(rng: np.random.Generator) -> np.ndarray:
    """(48, 48, 3) float32 around 0: waves in some colour, and grain of two sizes."""
    angle, waves = rng.uniform(0, np.pi), rng.uniform(1, 9)
    ramp = np.linspace(0, 2 * np.pi * waves, _SIDE, dtype=np.float32)
    phase = ramp * np.float32(np.cos(angle)) + ramp[:, None] * np.float32(np.sin(angle))
    wave = np.sin(phase[..., None] + 3 * _smooth(rng, cells=3))  # (48, 48, 1)
    colour = rng.uniform(-0.1, 0.1, 3).astype(np.float32)
    return wave * colour + 0.05 * _smooth(rng, cells=5, channels=3) + 0.05 * _smooth(rng, cells=20)


def _smooth(rng: np.random.Generator, *, cells: int, channels: int = 1) -> np.ndarray:
    """(48, 48, channels) smooth noise: standard normal at cells x cells knots, cubic between."""
    import cv2

    knots = rng.standard_normal((cells, cells, channels), dtype=np.float32)
    noise = cv2.resize(knots, (_SIDE, _SIDE), interpolation=cv2.INTER_CUBIC)
    return noise.reshape(_SIDE, _SIDE, channels)


def _ink(ground: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(3,) a colour lighter than the background, of high or low contrast."""
    contrast = rng.uniform(0.25, 0.6)
    return (ground + contrast + rng.uniform(-0.15, 0.15, 3)).astype(np.float32)


def _warp(digit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(s, s) opacity of an (8, 8) digit, resized, rotated and sheared."""
    import cv2

    side = rng.uniform(18, 28)  # what the 8 pixels become
    angle, shear = rng.uniform(-0.15, 0.15), rng.uniform(-0.1, 0.1)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = (side / 8) * rotation @ np.array([[1, shear], [0, 1]])
    canvas = int(1.4 * side)  # room for the rotated corners
    matrix = np.column_stack([linear, (canvas - 1) / 2 - linear @ (3.5, 3.5)])
    return _steepen(cv2.warpAffine(digit, matrix, (canvas, canvas), flags=cv2.INTER_CUBIC))


def _arc(rng: np.random.Generator) -> np.ndarray:
    """(s, s) opacity of an arc as thick as a digit's ink, which is labelled as background."""
    import cv2

    half = int(rng.integers(7, 13))
    canvas = np.zeros((2 * half, 2 * half), dtype=np.uint8)
    axes = tuple(int(v) for v in rng.integers(3, half - 2, 2))
    angle, start = rng.uniform(0, 360, 2)
    end = start + rng.uniform(60, 300)
    thickness = int(rng.integers(1, 4))
    cv2.ellipse(canvas, (half, half), axes, angle, start, end, 255, thickness, cv2.LINE_AA)
    return _steepen(canvas.astype(np.float32) / 255)


def _steepen(ink: np.ndarray) -> np.ndarray:
    """Ink of 0..1 to opacity of 0..1, with a thin soft edge."""
    return ((ink - 0.3) / 0.3).clip(0, 1)


def _paste(
    image: np.ndarray,
    label: np.ndarray,
    opacity: np.ndarray,
    colour: np.ndarray,
    rng: np.random.Generator,
    value: int | None = None,
) -> None:
    """Paste ink of an (s, s) opacity into image and label, in place, and label what it covers.

    `rng` decides where, and how much of the scene shows through. Up to a fifth of the ink may lie
    outside. Without a `value` it becomes background.
    """
    side = len(opacity)
    top, left = rng.integers(-side // 5, _SIDE - side + side // 5 + 1, 2)
    rows, columns = (slice(max(at, 0), min(at + side, _SIDE)) for at in (top, left))
    opacity = opacity[
        rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
    ]
    inside = image[rows, columns]
    inside += (rng.uniform(0.65, 1.0) * opacity)[..., None] * (colour - inside)
    if value is not None:
        label[rows, columns][opacity > 1 - _INK] = IGNORE
        label[rows, columns][opacity > _INK] = value
