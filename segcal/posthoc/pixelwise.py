"""Calibrators that map the logits of each pixel by itself, fitted on a sample of pixels."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.sample import PixelSampler
from segcal.posthoc.stream import LARGEST, Stream, Survey

MAX_PIXELS = 100_000
_BLOCK_PIXELS = 1 << 14  # evaluated at once


def unmasked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, C, …) without masked classes, which are given the least other logit of the pixel.

    Calibrators that mix the logits of a pixel would mix -inf into all of them.

    Returns:
        The logits, and a bool of their shape: where a class is masked, by -inf or float32's least.
    """
    masked = logits <= -LARGEST
    least = logits.masked_fill(masked, torch.inf).amin(1, keepdim=True)
    return torch.where(masked, least.clamp(max=LARGEST), logits), masked


class PixelCalibrator(Calibrator):
    """A map from the logits of a pixel to calibrated logits, fitted on a sample of pixels.

    Args:
        max_pixels: size of the sample; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs.
    """

    def __init__(
        self,
        *,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
        multilabel: bool = False,
    ) -> None:
        super().__init__(ignore_index=ignore_index, sync=sync, multilabel=multilabel)
        self.max_pixels = max_pixels
        self.seed = seed
        self._require_positive("max_pixels")

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        return self._map(dense_of(logits)).reshape(logits.shape).to(logits.dtype)

    @abstractmethod
    def _map(self, dense: Tensor) -> Tensor:
        """Calibrated logits (N, C, L) of logits (N, C, L) in float32 or float64."""


class SampledCalibrator(PixelCalibrator):
    """A `PixelCalibrator` that learns from the whole sample on every rank.

    One pass over the batches takes the sample: each valid pixel has the same chance, and the sample
    depends on the seed and the order of the images alone, not on batches or ranks. A hold-out of up
    to `max_pixels` is used whole.

    Every fifth image is for validation (of a single image, every fifth pixel). The calibrator learns
    from the other images. If its NLL on the validation images is below that of the logits as they
    are, it learns once more from all images; if not, it is the identity.
    """

    def _fit(self, stream: Stream) -> tuple[Survey, float, float]:
        sampler = PixelSampler(self.max_pixels, self.seed)
        survey = stream.survey(sampler)
        sample = sampler.finish(stream, survey.num_classes, gather=True)
        logits, labels, held = sample.logits, sample.labels, sample.validation
        validation = logits[:, held], labels[..., held]
        self._start(survey.num_classes, survey.image_channels)
        self.to(logits.device)
        before = after = mean_nll(*validation)
        if not held.all():  # as it is for a single pixel
            self._choose(logits[:, ~held], labels[..., ~held], *validation)
            after = self._nll(*validation)
        if after < before:
            self._learn(logits, labels)
        before, after = self._shared(stream, before, after)
        return survey, before, after

    def _nll(self, logits: Tensor, labels: Tensor) -> float:
        """The mean NLL of logits and labels as those of a `Sample`, calibrated."""
        parts = [self._map(part[None])[0] for part in logits.split(_BLOCK_PIXELS, 1)]
        return mean_nll(torch.cat(parts, 1), labels)

    def _shared(self, stream: Stream, *values: float) -> list[float]:
        """The first rank's `values`, once all that was learned is the first rank's too.

        Ranks with other hardware or more threads may round differently.
        """
        for tensor in self.state_dict().values():
            tensor.copy_(stream.of_first_rank(tensor))
        numbers = self.numbers()
        flat = torch.tensor([*values, *numbers.values()], dtype=torch.float64)
        shared = stream.of_first_rank(flat).tolist()
        for (name, value), other in zip(numbers.items(), shared[len(values) :], strict=True):
            setattr(self, name, type(value)(other))
        return shared[: len(values)]

    def _choose(
        self, logits: Tensor, labels: Tensor, other_logits: Tensor, other_labels: Tensor
    ) -> None:
        """Learn as `_learn` does; the others are of the validation images."""
        self._learn(logits, labels)

    @abstractmethod
    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        """Learn from logits and labels as those of a `Sample`, with what `_choose` chose."""


def dense_of(logits: Tensor) -> Tensor:
    """(N, C, L) of logits (N, C, *S), in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.flatten(2) if wide.ndim > 2 else wide.unsqueeze(2)


def mean_nll(logits: Tensor, labels: Tensor) -> float:
    """The mean NLL of logits and labels as those of a `Sample`; 0 if there are no pixels."""
    if labels.ndim == 2:  # sigmoid outputs
        known = labels >= 0
        y = labels[known].to(logits)
        nll = binary_cross_entropy_with_logits(logits[known], y, reduction="sum")
        return float(nll) / max(1, len(y))
    nll = cross_entropy(logits[None], labels[None], reduction="sum")
    return float(nll) / max(1, len(labels))
