"""Selective scaling: a higher temperature where a small network expects a wrong prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.fusion import fuse_conv_bn_eval

from segcal.posthoc.calibrator import PixelCalibrator
from segcal.posthoc.holdout import PixelSample, flat
from segcal.posthoc.minimise import least_nll

_BATCH_PIXELS = 1024
_LEAST_BATCHES = 16  # per epoch, for small hold-outs
_DECAY = 1e-6
_LEAST = -100.0  # log-probability that the network sees


class SelectiveScaling(PixelCalibrator):
    """Selective scaling (Wang et al. 2023): logits / T where the prediction seems wrong.

    A small network (C → C → 2C → C → 2, batch norm) sees the log-probabilities of a pixel and gives
    the probability q that the predicted class is wrong. The logits are multiplied by

        1 − q + q / T,    T ≥ 1,

    so those of a pixel that seems right stay, and those of one that seems wrong are divided by T.
    The predicted class never changes. In the paper q is rounded to 0 or 1: there, the last bit of
    a logit decides between 1 and T for pixels at the edge.

    The network is trained with AdamW on the pixels of the sample, among which those predicted wrong
    are repeated. After each epoch T has the least NLL on them. How many epochs is chosen as
    `PixelCalibrator` says.

    The training does not hang on the last bits of the logits either: it is in float64 on
    standardised log-probabilities, SiLU replaces the kinks of ReLU, and there is no bias before
    batch norm, whose gradient is nothing but rounding, which Adam would scale to full steps.

    Args:
        epochs: of training, over the sample.
        repeats: how often a pixel predicted wrong is seen in an epoch; the paper's are 1 to 4.
        lr: step of AdamW.
        **options: of `PixelCalibrator`; its seed is also of first weights and order of training.

    Attributes:
        epoch_: how many epochs it was trained for.
        temperature_: () T.
        network_: gives two logits for each pixel, right and wrong.
    """

    name = "selective"
    keeps_mask = True

    epoch_: int
    temperature_: Tensor

    def __init__(
        self, *, epochs: int = 20, repeats: int = 4, lr: float = 1e-3, **options: Any
    ) -> None:
        super().__init__(**options)
        self.epochs = epochs
        self.repeats = repeats
        self.lr = lr
        self._require_positive("epochs", "repeats", "lr")

    def wrong(self, logits: Tensor) -> Tensor:
        """(N, *S) q, how probably the prediction is wrong, for logits (N, C, *S)."""
        x = flat(logits).to(torch.promote_types(logits.dtype, torch.float32))
        return self._wrong(x.log_softmax(1)).reshape(logits.shape[0], *logits.shape[2:])

    def _wrong(self, x: Tensor) -> Tensor:
        """(N, L) of log-probabilities (N, C, L)."""
        return self.network_(x.clamp_min(_LEAST).to(self.temperature_.dtype)).softmax(1)[:, 1]

    def _map(self, x: Tensor) -> Tensor:
        q = self._wrong(x).unsqueeze(1).to(x.dtype)
        return x * (1 - q + q / self.temperature_)

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        convs = [nn.Conv1d(before, after, 1) for before, after in _widths(num_classes)]
        network = nn.Sequential(*chain(*((conv, nn.SiLU()) for conv in convs[:-1])), convs[-1])
        for weight in network.parameters():
            nn.init.zeros_(weight)
        return {"epoch_": 0, "temperature_": torch.ones(()), "network_": network}

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        return [self._nll(validation) for _ in self._train(fitting)]

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.epoch_ = choice + 1
        for _ in islice(self._train(sample), self.epoch_):
            pass

    def _train(self, sample: PixelSample) -> Iterator[None]:
        """Train on a sample; stops after each epoch, for which network and T are then set."""
        x = sample.x.clamp_min(_LEAST)
        scale, mean = torch.std_mean(x, 1)
        scale = torch.where(scale > 0, scale, 1)
        standard = ((x - mean[:, None]) / scale[:, None])[None]  # (1, C, P)
        wrong = (sample.x.argmax(0) != sample.labels).long()  # (P,)
        again = wrong.nonzero()[:, 0].repeat(self.repeats - 1)
        seen = torch.cat([torch.arange(len(wrong), device=wrong.device), again])
        size = max(2, min(_BATCH_PIXELS, len(seen) // _LEAST_BATCHES))
        order = torch.Generator().manual_seed(self.seed)
        detector = _detector(self.num_classes_, self.seed).to(x)
        optimizer = torch.optim.AdamW(detector.parameters(), lr=self.lr, weight_decay=_DECAY)
        for _ in range(self.epochs):
            for batch in seen[torch.randperm(len(seen), generator=order)].split(size):
                if len(batch) > 1:  # of one there is no variance
                    optimizer.zero_grad()
                    with torch.enable_grad():
                        cross_entropy(detector(standard[..., batch]), wrong[None, batch]).backward()
                    optimizer.step()
            self.network_ = _folded(detector, mean, scale)
            beta = _least_beta(sample, self._wrong(sample.x[None])[0].double())
            self.temperature_ = torch.full_like(self.temperature_, max(1.0, 1 / beta))
            yield


def _least_beta(sample: PixelSample, q: Tensor) -> float:
    """1/T of least NLL, with q (P,) the probability that a pixel is wrong."""

    def sums(beta: float) -> Tensor:
        log_p = (sample.x * (1 - q + q * beta)).log_softmax(0)
        p = log_p.exp()
        mean, square = (p * sample.x).sum(0), (p * sample.x.square()).sum(0)
        true = sample.x.gather(0, sample.labels[None])[0]
        nll = -log_p.gather(0, sample.labels[None])[0]
        return torch.stack([nll, q * (mean - true), q.square() * (square - mean.square())]).sum(1)

    return least_nll(sums)[0]


def _detector(classes: int, seed: int) -> nn.Sequential:
    """The network in training: batch norm before each SiLU, and no bias before batch norm."""
    convs = [nn.Conv1d(before, after, 1, bias=False) for before, after in _widths(classes)]
    generator = torch.Generator().manual_seed(seed)
    for conv in convs:
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu", generator=generator)
    *hidden, last = convs
    last.bias = nn.Parameter(torch.zeros(2))
    layers = [(conv, nn.BatchNorm1d(conv.out_channels), nn.SiLU()) for conv in hidden]
    return nn.Sequential(*chain(*layers), last)


def _widths(classes: int) -> list[tuple[int, int]]:
    return list(pairwise([classes, classes, 2 * classes, classes, 2]))


def _folded(detector: nn.Sequential, mean: Tensor, scale: Tensor) -> nn.Sequential:
    """A float32 copy of the network with batch norm and standardisation in its weights."""
    layers: list[Any] = []
    for layer in copy.deepcopy(detector).eval():
        if isinstance(layer, nn.BatchNorm1d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    first = layers[0]
    first.weight.div_(scale[:, None])
    first.bias.sub_(first.weight[..., 0] @ mean)
    return nn.Sequential(*layers).float()
