"""What is done to an image and its mask between file and network: augment, resize, normalise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images, in this order; None leaves the step out."""

    base_size: int | None = None  # the short side becomes this many pixels, times a factor
    scale: tuple[float, float] = (1.0, 1.0)  # range of that factor, sampled uniformly
    pad: int | None = None  # pixels of padding on every side
    crop_size: int | None = None  # of a square; smaller images are padded right and below
    flip: float = 0.0  # probability of a left-right flip

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high:
            raise ValueError(
                f"Expected scale as (low, high) with 0 < low <= high, but got {self.scale}"
            )
        for name in ("base_size", "crop_size", "pad"):
            value = getattr(self, name)
            if value is not None and value < (name != "pad"):
                raise ValueError(f"Expected {name} to be positive, but got {value}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"Expected flip to be a probability, but got {self.flip}")


@dataclass(frozen=True)
class Augmenter:
    """Applies an `Augmentation` to image and mask together, without a state of its own.

    Everything random comes from the seed given with each call, so the result does not depend
    on the order of calls, on worker processes, or on where a run was resumed. Images are padded
    with black, as the recipes of the field do, and masks with `ignore_index`.
    """

    recipe: Augmentation
    ignore_index: int

    def __call__(
        self, image: np.ndarray, mask: np.ndarray | None, *, seed: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Augment an (H, W, 3) uint8 image and its (H, W) or (K, H, W) mask, if it has one."""
        recipe = self.recipe
        rng = random.Random(int(np.random.default_rng(seed).integers(2**63)))
        rng.random()  # not used: with it, trainings stay what they were
        if recipe.base_size is not None:
            low, high = (round(recipe.base_size * factor) for factor in recipe.scale)
            scale = rng.choice(range(low, high + 1)) / min(image.shape[:2])
            height, width = (max(1, round(side * scale)) for side in image.shape[:2])
            image = resize(image, (height, width), "area" if scale < 1 else "linear")
            mask = None if mask is None else resize_mask(mask, (height, width))
        if recipe.pad:
            image, mask = self._padded(image, mask, *[recipe.pad] * 4)
        if (side := recipe.crop_size) is not None:
            height, width = image.shape[:2]
            image, mask = self._padded(
                image, mask, 0, max(side - height, 0), 0, max(side - width, 0)
            )
            height, width = image.shape[:2]
            top, left = (int((n - side + 1) * rng.random()) for n in (height, width))
            image = image[top : top + side, left : left + side]
            if mask is not None:
                mask = mask[..., top : top + side, left : left + side]
        if recipe.flip and (recipe.flip == 1 or rng.random() < recipe.flip):
            image = image[:, ::-1]
            mask = mask if mask is None else mask[..., ::-1].copy()
        return image, mask

    def _padded(
        self, image: np.ndarray, mask: np.ndarray | None, *sides: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Padded by so many pixels above, below, left and right."""
        rows, columns = sides[:2], sides[2:]
        image = np.pad(image, (rows, columns, (0, 0)))
        if mask is not None:
            around = ((0, 0),) * (mask.ndim - 2) + (rows, columns)
            mask = mask if self.ignore_index >= 0 else mask.astype(np.int32)
            mask = np.pad(mask, around, constant_values=self.ignore_index)
        return image, mask


def resize(
    image: np.ndarray, size: tuple[int, int], how: Literal["area", "linear", "nearest"]
) -> np.ndarray:
    """(H, W, …) to (*size, …) by OpenCV, whose pixels trainings depend on."""
    try:
        import cv2
    except ImportError:
        raise ValueError("resizing images needs OpenCV: pip install 'segcal[train]'") from None
    if size == image.shape[:2]:
        return image
    # OpenCV's plain nearest shifts a mask half a pixel against its image.
    methods = {"area": cv2.INTER_AREA, "linear": cv2.INTER_LINEAR}
    method = methods.get(how, cv2.INTER_NEAREST_EXACT)
    return cv2.resize(image, size[::-1], interpolation=method)


def resize_mask(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(H, W) or (K, H, W) to size or (K, *size), by the nearest pixel."""
    if mask.ndim == 2:
        return resize(mask, size, "nearest")
    return np.stack([resize(one, size, "nearest") for one in mask])


def resize_square(image: np.ndarray, side: int) -> np.ndarray:
    """(H, W, 3) uint8 to (side, side, 3), averaging where it shrinks."""
    shrinks = side * side < image.shape[0] * image.shape[1]
    return resize(image, (side, side), "area" if shrinks else "linear")


def normalise(image: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(H, W, 3) uint8 to float32 (3, H, W): (image / 255 - mean) / std."""
    chw = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    centre, scale = (torch.tensor(x, dtype=torch.float32).view(3, 1, 1) for x in (mean, std))
    return chw.float().div_(255.0).sub_(centre).div_(scale)
