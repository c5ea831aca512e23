"""Temperature scaling with a temperature for each class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.pixelwise import MAX_PIXELS, SampledCalibrator, mean_nll
from segcal.posthoc.sample import pixels_of
from segcal.posthoc.temperature import T_MAX, T_MIN, least_nll, sums_of

SHARES = (0.001, 0.01, 0.1, 1.0)
_TRIED = 17  # temperatures, evenly spaced in log T, around the best of which the search goes on


class ClasswiseTemperatureScaling(SampledCalibrator):
    """A temperature for each predicted class: logits / T_c, with c the class of largest logit.

    The predicted class never changes. T is the common temperature of least NLL over all P pixels.
    With β = 1/T and β_c = 1/T_c, each T_c minimises

        Σ_{pixels predicted as c} NLL(β_c) + s · P · v · (β_c − β)² / 2,

    with v the second derivative of the mean NLL at β: as if s · P pixels of all classes had been
    predicted as c too. Without them, a class of few pixels that are all right would become certain.
    The share s is the one of least NLL on images that were not fitted on.

    Dividing the logit of each class by a temperature of its own (Frenkel & Goldberger 2021) is
    vector scaling without its shift, `VectorScaling`.

    With K sigmoid outputs (`multilabel`), T_c is the temperature of output c, and the sum is over
    its own labels.

    Fitted as `SampledCalibrator` says.

    Args:
        shares: values of s to choose from.
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs.

    Attributes:
        temperature_: () T.
        temperatures_: (C,) T_c; T for a class that is never predicted.
        share_: the s chosen.
    """

    name = "cts"

    temperature_: Tensor
    temperatures_: Tensor
    share_: float

    def __init__(
        self,
        *,
        shares: Sequence[float] = SHARES,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
        multilabel: bool = False,
    ) -> None:
        super().__init__(
            max_pixels=max_pixels,
            seed=seed,
            ignore_index=ignore_index,
            sync=sync,
            multilabel=multilabel,
        )
        if not shares or not all(0 <= share < math.inf for share in shares):
            raise ValueError(f"Expected shares to be numbers >= 0, but got {shares}")
        self.shares = tuple(shares)

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.share_ = self.shares[0]
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("temperatures_", torch.ones(num_classes))

    def _map(self, dense: Tensor) -> Tensor:
        if self.multilabel:
            return dense / self.temperatures_.to(dense).unsqueeze(1)
        temperature = self.temperatures_.to(dense)[dense.argmax(1)]  # (N, L)
        return dense / temperature.unsqueeze(1)

    def _choose(
        self, logits: Tensor, labels: Tensor, other_logits: Tensor, other_labels: Tensor
    ) -> None:
        best = math.inf, self.share_, self.temperatures_
        for share in self.shares:
            self.share_ = share
            self._learn(logits, labels)
            nll = self._nll(other_logits, other_labels)
            best = min(best, (nll, share, self.temperatures_.clone()), key=lambda entry: entry[0])
        _, self.share_, self.temperatures_ = best

    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        everything = sums_of(pixels_of(logits, labels))
        beta, _ = least_nll(everything)
        weight = self.share_ * float(everything(beta)[2])  # s · P · v
        self.temperature_.fill_(1 / beta)
        predicted = logits.argmax(0)
        for c in range(self.num_classes_):
            if self.multilabel:
                mine = labels[c] >= 0
                part = logits[c : c + 1, mine], labels[c : c + 1, mine]
            else:
                mine = predicted == c
                part = logits[:, mine], labels[mine]
            sums = pulled(sums_of(pixels_of(*part)), beta, weight)
            self.temperatures_[c] = 1 / (least_nll(sums, beta)[0] if mine.any() else beta)


def pulled(
    sums: Callable[[float], Tensor], centre: float, weight: float
) -> Callable[[float], Tensor]:
    """`sums` for `least_nll`, with weight · (β − centre)² / 2 added to the NLL."""

    def with_pull(beta: float) -> Tensor:
        away = beta - centre
        pull = [weight * away**2 / 2, weight * away, weight]
        return sums(beta) + torch.tensor(pull, dtype=torch.float64)

    return with_pull


class DistributionAwareTemperatureScaling(SampledCalibrator):
    """Class-distribution-aware temperature scaling, CDA-TS (Islam et al. 2021).

    Divides the logit of class c by T_c = T + strength · n_c / max n, with n_c the pixels of class c
    in the hold-out, so that frequent classes are made less sure. T has the least NLL. The predicted
    class may change, and adding a constant to all logits of a pixel changes the result.

    Fitted as `SampledCalibrator` says.

    Args:
        strength: how much larger than T the temperature of the most frequent class is.
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.

    Attributes:
        temperature_: () T.
        temperatures_: (C,) T_c.
    """

    name = "cdats"

    temperature_: Tensor
    temperatures_: Tensor

    def __init__(
        self,
        *,
        strength: float = 0.1,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
    ) -> None:
        super().__init__(max_pixels=max_pixels, seed=seed, ignore_index=ignore_index, sync=sync)
        if not 0 <= strength < math.inf:
            raise ValueError(f"Expected strength >= 0, but got {strength}")
        self.strength = strength

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("temperatures_", torch.ones(num_classes))

    def _map(self, dense: Tensor) -> Tensor:
        return dense / self.temperatures_.to(dense).unsqueeze(1)

    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        counts = labels.bincount(minlength=len(logits)).to(logits)
        above = self.strength * counts / counts.max().clamp_min(1)  # (C,) T_c − T

        def nll(log_t: float) -> float:
            return mean_nll(logits / (math.exp(log_t) + above).unsqueeze(1), labels)

        # Not convex in T, so the search begins around the best of many.
        tried = np.linspace(math.log(T_MIN), math.log(T_MAX), _TRIED)
        best = int(np.argmin([nll(log_t) for log_t in tried]))
        between = tried[max(best - 1, 0)], tried[min(best + 1, _TRIED - 1)]
        from scipy.optimize import minimize_scalar  # takes long to import

        found = minimize_scalar(nll, bounds=between, method="bounded", options={"xatol": 1e-6})
        self.temperature_.fill_(math.exp(found.x))
        self.temperatures_.copy_(self.temperature_ + above)
