"""Dirichlet calibration: a linear map of the log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from segcal.posthoc.affine import MAX_PIXELS, AffineScaler

# The grid of the paper, 13 × 5 pairs.
LAMBDAS = (0.0, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MUS = (0.0, 0.01, 0.1, 1.0, 10.0)


class DirichletCalibration(AffineScaler):
    """Dirichlet calibration with ODIR (Kull et al. 2019): softmax(W · log p + b), p = softmax(z).

    Fitted as `AffineScaler` says. W = I/T with b = 0 is temperature scaling. The objective is
    convex, so L-BFGS converges to the minimum that the Adam of the original approaches. The
    predicted class may change.

    Args:
        lambdas: values of λ to choose from; by default the paper's 13.
        mus: values of μ to choose from; by default the paper's 5.
        max_pixels: size of the sample of pixels; 8·C bytes a pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
        lambda_: the λ chosen.
        mu_: the μ chosen.
    """

    name = "dc"

    def __init__(
        self,
        *,
        lambdas: Sequence[float] = LAMBDAS,
        mus: Sequence[float] = MUS,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
    ) -> None:
        super().__init__(
            lambdas=lambdas,
            mus=mus,
            max_pixels=max_pixels,
            seed=seed,
            ignore_index=ignore_index,
            sync=sync,
        )

    def _features(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-2)
