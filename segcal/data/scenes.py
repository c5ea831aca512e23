"""The place for the embedded data: real handwritten digits, alone or pasted into cluttered scenes.

Scikit-learn ships 1797 of them, so everything here works on a bare machine. Test scenes, held-out
scenes and training scenes are made from disjoint sets of digit images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segcal.data.source import ArrayPart, DataConfig, Source, split
from segcal.data.transforms import Augmentation

SIDE = 64
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


@dataclass(frozen=True)
class _Digits:
    """Digit images and their classes: (n, 8, 8) float32 in 0..1, (n,) int64."""

    images: np.ndarray
    classes: np.ndarray

    def take(self, indices: np.ndarray) -> _Digits:
        return _Digits(self.images[indices], self.classes[indices])


def digits(config: DataConfig) -> Source:
    """The digits as classification: (8, 8) images of 10 classes, 1258 to train on, 539 to test."""
    parts = [
        ArrayPart(
            images=(pool.images * 255).round().astype(np.uint8),
            labels=pool.classes,
            names=[f"{name}-{i:04d}" for i in range(len(pool.classes))],
        )
        for name, pool in zip(("train", "test"), _load(), strict=True)
    ]
    return Source(
        train=parts[0],
        test=parts[1],
        class_names=tuple(map(str, range(10))),
        augmentation=Augmentation(pad=1, crop_size=8),
        palette=_PALETTE[1:],
    )


def scenes(config: DataConfig) -> Source:
    """Scenes of digits: (64, 64), class 0 background, class d + 1 the digit d, 255 the rim."""
    if config.ignore_index != IGNORE:
        raise ValueError(
            f"Expected ignore_index={IGNORE} for the scenes, but got {config.ignore_index}"
        )
    train, test = _load()
    kept, held = split(len(train.classes), holdout=config.holdout, seed=config.split_seed)
    # At least one held-out scene and one to train on, as with the digits themselves.
    count = len(split(TRAIN_SCENES, holdout=config.holdout, seed=0)[1])
    return Source(
        train=_render_part("train", train.take(kept), TRAIN_SCENES - count, seed=1),
        holdout=_render_part("holdout", train.take(held), count, seed=2),
        test=_render_part("test", test, TEST_SCENES, seed=3),
        class_names=("background", *map(str, range(10))),
        palette=_PALETTE,
    )


def _load() -> tuple[_Digits, _Digits]:
    """(train, test): the same parting whatever the configuration."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    everything = _Digits((bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64))
    train, test = split(len(everything.classes), holdout=_TEST_SHARE, seed=0)
    return everything.take(train), everything.take(test)


def _render_part(name: str, pool: _Digits, count: int, *, seed: int) -> ArrayPart:
    images = np.empty((count, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.empty((count, SIDE, SIDE), dtype=np.uint8)
    for i in range(count):
        images[i], labels[i] = render(pool.images, pool.classes, np.random.default_rng((seed, i)))
    return ArrayPart(images, labels, [f"{name}-{i:04d}" for i in range(count)])


def render(
    digit_images: np.ndarray, digit_classes: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one scene.

    Args:
        digit_images: (n, 8, 8) float in 0..1, to choose from.
        digit_classes: (n,) their digits.
        rng: decides everything.

    Returns:
        (64, 64, 3) uint8 RGB and (64, 64) uint8 labels.
    """
    ground = _colour(rng)  # (3,)
    image = _texture(ground, rng)  # (64, 64, 3)
    label = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for _ in range(rng.integers(1, 6)):
        _paste(image, _stroke(rng), _ink(ground, rng))
    for _ in range(rng.integers(2, 6)):
        choice = rng.integers(len(digit_classes))
        opacity = _place(digit_images[choice], rng)  # (64, 64) in 0..1
        _paste(image, opacity * rng.uniform(0.6, 1.0), _ink(ground, rng))
        label[opacity > 1 - _INK] = IGNORE
        label[opacity > _INK] = digit_classes[choice] + 1
    image *= 1 + 0.12 * _smooth(rng, cells=2, channels=1)  # uneven light
    image += rng.uniform(0.02, 0.07) * rng.standard_normal(image.shape, dtype=np.float32)
    return (image.clip(0, 1) * 255).round().astype(np.uint8), label


def _colour(rng: np.random.Generator) -> np.ndarray:
    """(3,) a muted colour: some grey of any lightness with a tint."""
    return (rng.uniform(0.2, 0.8) + rng.uniform(-0.12, 0.12, 3)).astype(np.float32)


def _ink(ground: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(3,) a colour lighter or darker than the ground: sometimes plain to see, sometimes hardly."""
    darker = rng.random() < ground.mean()
    contrast = rng.uniform(0.15, 0.6) * (-1 if darker else 1)
    return (ground + contrast + rng.uniform(-0.2, 0.2, 3)).astype(np.float32)


def _texture(ground: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(64, 64, 3) float32: waves of a second colour on the ground, and grain of three sizes."""
    angle, waves = rng.uniform(0, np.pi), rng.uniform(1, 9)
    ramp = np.linspace(0, waves, SIDE, dtype=np.float32)
    phase = ramp * np.cos(angle) + ramp[:, None] * np.sin(angle)  # (64, 64)
    phase = phase[..., None] + 0.5 * _smooth(rng, cells=3, channels=1)
    blend = 0.5 + 0.5 * np.sin(2 * np.pi * phase)  # (64, 64, 1)
    second = rng.uniform(-0.2, 0.2, 3).astype(np.float32)
    image = ground + blend * second
    image += 0.06 * _smooth(rng, cells=4, channels=3)
    image += 0.05 * _smooth(rng, cells=12, channels=1)
    image += 0.04 * _smooth(rng, cells=32, channels=1)
    return image


def _smooth(rng: np.random.Generator, *, cells: int, channels: int) -> np.ndarray:
    """(64, 64, channels) noise of unit deviation at the knots, that varies over 64 / cells px."""
    import cv2

    knots = rng.normal(size=(cells, cells, channels)).astype(np.float32)
    grown = cv2.resize(knots, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    return grown.reshape(SIDE, SIDE, channels)


def _place(digit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(64, 64) opacity of an (8, 8) digit, enlarged, turned, sheared and put somewhere."""
    import cv2

    side = rng.uniform(18, 34)  # of the whole (8, 8) square in the scene
    angle, shear = rng.uniform(-0.35, 0.35), rng.uniform(-0.25, 0.25)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = (side / 8) * turn @ np.array([[1, shear], [0, 1]])
    centre = rng.uniform(0.3 * side, SIDE - 0.3 * side, 2)  # may leave the scene a little
    matrix = np.column_stack([linear, centre - linear @ (3.5, 3.5)])
    ink = cv2.warpAffine(digit, matrix, (SIDE, SIDE), flags=cv2.INTER_CUBIC)
    return _steepen(ink)


def _stroke(rng: np.random.Generator) -> np.ndarray:
    """(64, 64) opacity of an arc as thick as a digit's ink, which is background all the same."""
    import cv2

    canvas = np.zeros((SIDE, SIDE), dtype=np.uint8)
    centre = tuple(int(v) for v in rng.integers(0, SIDE, 2))
    axes = tuple(int(v) for v in rng.integers(3, 14, 2))
    start = rng.uniform(0, 360)
    end = start + rng.uniform(60, 300)
    turn, thickness = rng.uniform(0, 360), int(rng.integers(2, 6))
    cv2.ellipse(canvas, centre, axes, turn, start, end, 255, thickness, cv2.LINE_AA)
    return _steepen(canvas.astype(np.float32) / 255) * rng.uniform(0.5, 1.0)


def _steepen(ink: np.ndarray) -> np.ndarray:
    """Ink of 0..1 to opacity of 0..1: soft only within a thin rim around the half-way level."""
    return ((ink - 0.3) / 0.3).clip(0, 1)


def _paste(image: np.ndarray, opacity: np.ndarray, colour: np.ndarray) -> None:
    """Lay `colour` over `image` (in place) with an opacity of shape (64, 64)."""
    image += opacity[..., None] * (colour - image)
