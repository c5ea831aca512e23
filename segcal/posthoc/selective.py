"""Selective scaling: a higher temperature where a small network expects a wrong prediction."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.fusion import fuse_conv_bn_eval

from segcal.posthoc.pixelwise import MAX_PIXELS, SampledCalibrator, dense_of
from segcal.posthoc.sample import pixels_of
from segcal.posthoc.temperature import least_nll, sums_of

_BATCH_PIXELS = 1024
_LEAST_BATCHES = 16  # per epoch, for small hold-outs
_DECAY = 1e-6


class SelectiveScaling(SampledCalibrator):
    """Selective scaling (Wang et al. 2023): logits / T where the prediction seems wrong.

    A small network (C → C → 2C → C → 2, batch norm, ReLU) sees the log-probabilities of a pixel and
    says whether the predicted class is wrong. Where it says right, the logits do not change;
    where it says wrong, they are divided by one T ≥ 1. The predicted class never changes.

    The network is trained with AdamW on the pixels of the sample, among which those predicted wrong
    are repeated. After each epoch T is the temperature of least NLL on the pixels that the network
    calls wrong. Every fifth image is for validation (of a single image, every fifth pixel): the
    epoch of least NLL there is kept. If that is not below the NLL of the unchanged logits, the
    calibrator is the identity.

    Args:
        epochs: of training, over the sample.
        repeats: how often a pixel predicted wrong is seen in an epoch; the paper's are 1 to 4.
        lr: step of AdamW.
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample, first weights and order of training.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.

    Attributes:
        epoch_: the epoch that was kept.
        temperature_: () T of the pixels called wrong.
        network_: gives two logits for each pixel, right and wrong.
    """

    name = "selective"

    epoch_: int
    temperature_: Tensor

    def __init__(
        self,
        *,
        epochs: int = 20,
        repeats: int = 4,
        lr: float = 1e-3,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
    ) -> None:
        super().__init__(max_pixels=max_pixels, seed=seed, ignore_index=ignore_index, sync=sync)
        self.epochs = epochs
        self.repeats = repeats
        self.lr = lr
        self._require_positive("epochs", "repeats", "lr")

    def wrong(self, logits: Tensor) -> Tensor:
        """(N, *S) bool: where the network calls the prediction wrong, for logits (N, C, *S)."""
        return self._wrong(dense_of(logits)).reshape(logits.shape[0], *logits.shape[2:])

    def _wrong(self, dense: Tensor) -> Tensor:
        """(N, L) bool of logits (N, C, L)."""
        right, wrong = self.network_(dense.log_softmax(1).to(self.temperature_.dtype)).unbind(1)
        return wrong > right

    def _map(self, dense: Tensor) -> Tensor:
        temperature = torch.where(self._wrong(dense), self.temperature_, 1.0)  # (N, L)
        return dense / temperature.to(dense.dtype).unsqueeze(1)

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.epoch_ = 0
        self.register_buffer("temperature_", torch.ones(()))
        self.network_ = nn.Sequential(*_layers(num_classes))
        for weight in self.network_.parameters():
            nn.init.zeros_(weight)  # nothing is taken for wrong

    def _choose(
        self, logits: Tensor, labels: Tensor, other_logits: Tensor, other_labels: Tensor
    ) -> None:
        log_p = logits.log_softmax(0).float()  # (C, P)
        wrong = (logits.argmax(0) != labels).long()  # (P,)
        again = wrong.nonzero()[:, 0].repeat(self.repeats - 1)
        seen = torch.cat([torch.arange(len(wrong), device=wrong.device), again])
        size = max(2, min(_BATCH_PIXELS, len(seen) // _LEAST_BATCHES))
        order = torch.Generator().manual_seed(self.seed)
        detector = _detector(self.num_classes_, self.seed).to(log_p.device)
        optimizer = torch.optim.AdamW(detector.parameters(), lr=self.lr, weight_decay=_DECAY)
        best = self._nll(other_logits, other_labels), 0, self.temperature_, self.network_
        for epoch in range(1, self.epochs + 1):
            for batch in seen[torch.randperm(len(seen), generator=order)].split(size):
                if len(batch) > 1:  # of one there is no variance
                    _step(detector, optimizer, log_p[:, batch], wrong[batch])
            self.network_ = _folded(detector)
            found = self._wrong(logits[None])[0]
            beta, _ = least_nll(sums_of(pixels_of(logits[:, found], labels[found])))
            self.temperature_ = torch.full_like(self.temperature_, max(1.0, 1 / beta))
            nll = self._nll(other_logits, other_labels)
            if nll < best[0]:
                best = nll, epoch, self.temperature_, self.network_
        _, self.epoch_, self.temperature_, self.network_ = best

    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        """Nothing: the epoch was chosen for the images that it was trained on."""


def _layers(classes: int) -> list[nn.Module]:
    """C → C → 2C → C → 2 as convolutions over (N, C, L), with ReLU in between."""
    widths = [classes, classes, 2 * classes, classes, 2]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv1d(before, after, 1), nn.ReLU()]
    return layers[:-1]


def _detector(classes: int, seed: int) -> nn.Sequential:
    """The network in training, with batch norm before each ReLU."""
    layers: list[nn.Module] = []
    for layer in _layers(classes):
        layers.append(layer)
        if isinstance(layer, nn.Conv1d):
            layers.append(nn.BatchNorm1d(layer.out_channels))
    detector = nn.Sequential(*layers[:-1])
    generator = torch.Generator().manual_seed(seed)
    for layer in detector:
        if isinstance(layer, nn.Conv1d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
    return detector


def _step(
    detector: nn.Module, optimizer: torch.optim.Optimizer, log_p: Tensor, wrong: Tensor
) -> None:
    """One step down the cross-entropy of log p (C, B) and whether the prediction is wrong (B,)."""
    optimizer.zero_grad()
    with torch.enable_grad():
        cross_entropy(detector(log_p[None]), wrong[None]).backward()
    optimizer.step()


def _folded(detector: nn.Sequential) -> nn.Sequential:
    """A copy of the network whose batch norms are part of its weights."""
    folded: list[nn.Module] = []
    for layer in copy.deepcopy(detector).eval():
        if isinstance(layer, nn.BatchNorm1d):
            assert isinstance(folded[-1], nn.Conv1d)
            folded[-1] = fuse_conv_bn_eval(folded[-1], layer)
        else:
            folded.append(layer)
    return nn.Sequential(*folded)
