"""What is done to an image and its mask between file and network: augment, resize, normalise."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images, in this order; None leaves the step out.

    Attributes:
        base_size: resize so that the short side is `base_size` times a factor from `scale`.
        scale: range of that factor, sampled uniformly.
        pad: pixels of padding on every side.
        crop_size: side of the square random crop; smaller images are padded right and below.
        flip: probability of a left-right flip.
    """

    base_size: int | None = None
    scale: tuple[float, float] = (1.0, 1.0)
    pad: int | None = None
    crop_size: int | None = None
    flip: float = 0.0

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


class Augmenter:
    """Applies an `Augmentation` to image and mask together, without a state of its own.

    Everything random comes from the seed given with each call, so the result does not depend
    on the order of calls, on worker processes, or on where a run was resumed.

    Args:
        recipe: what to do.
        ignore_index: value of the padding of masks; images are padded with black, as the recipes
            of the field do.
    """

    def __init__(self, recipe: Augmentation, *, ignore_index: int) -> None:
        self._recipe, self._ignore_index = recipe, ignore_index

    @cached_property  # built when it is first used: evaluations augment nothing
    def _compose(self) -> Any:
        recipe = self._recipe
        # albumentations asks PyPI for its newest version when imported. The switch stays set so
        # that worker processes started later do not ask either; a user's own setting wins.
        os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
        import albumentations as A
        import cv2

        padding = {"border_mode": cv2.BORDER_CONSTANT, "fill": 0, "fill_mask": self._ignore_index}
        steps: list[Any] = []
        if recipe.base_size is not None:
            low, high = (round(recipe.base_size * factor) for factor in recipe.scale)
            steps += [
                A.SmallestMaxSize(
                    list(range(low, high + 1)),
                    area_for_downscale="image",
                    # OpenCV's plain nearest shifts a mask half a pixel against its image.
                    mask_interpolation=cv2.INTER_NEAREST_EXACT,
                )
            ]
        if recipe.pad:
            steps += [A.Pad(recipe.pad, **padding)]
        if recipe.crop_size is not None:
            side = recipe.crop_size
            steps += [A.PadIfNeeded(side, side, position="top_left", **padding)]
            steps += [A.RandomCrop(side, side)]
        if recipe.flip:
            steps += [A.HorizontalFlip(p=recipe.flip)]
        return A.Compose(steps)

    def __call__(
        self, image: np.ndarray, mask: np.ndarray | None, *, seed: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Augment one sample.

        Args:
            image: (H, W, 3) uint8.
            mask: (H, W) or (K, H, W) uint8, or None for classification.
            seed: non-negative integers that decide everything random.
        """
        generator = np.random.default_rng(seed)
        # One shared pair of generators: Compose.set_random_seed would give every step the same
        # stream, and so flip whenever the scale came out small.
        self._compose.set_random_state(generator, random.Random(int(generator.integers(2**63))))
        if mask is None:
            return self._compose(image=image)["image"], None
        if mask.ndim == 3:
            out = self._compose(image=image, masks=list(mask))
            return out["image"], np.stack(out["masks"])
        out = self._compose(image=image, mask=mask)
        return out["image"], out["mask"]


def resize_square(image: np.ndarray, side: int) -> np.ndarray:
    """(H, W, 3) uint8 to (side, side, 3), averaging where it shrinks."""
    import cv2

    shrinks = side * side < image.shape[0] * image.shape[1]
    return cv2.resize(
        image, (side, side), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    )


def normalise(image: np.ndarray, mean: Tensor, std: Tensor) -> Tensor:
    """(H, W, 3) uint8 to float32 (3, H, W): (image / 255 - mean) / std; mean, std are (3, 1, 1)."""
    chw = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return chw.float().div_(255.0).sub_(mean).div_(std)
