"""A loss and metrics for the Trainer of Transformers, for models that label pixels or images.

Trainer(
    …,
    args=TrainingArguments(…, batch_eval_metrics=True, remove_unused_columns=False),
    compute_loss_func=TrainerLoss("fl+mdca", ignore_index=255),
    compute_metrics=TrainerMetrics(num_classes=150, ignore_index=255),
)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segcal import distributed
from segcal.integrations import at_labels, chosen_scores, missing, scalars
from segcal.losses import build_loss
from segcal.metrics import CalibrationMeter, Report
from segcal.pixels import resolve_ignore_index
from segcal.sources.source import logits_of

try:
    from transformers import EvalPrediction
except ImportError as error:
    raise missing("transformers", "transformers") from error

_PADDING = -100  # what the Trainer fills labels with, and leaves out of its count of items


class TrainerLoss:
    """A loss of segcal for `Trainer(compute_loss_func=…)`.

    Smaller logits, as those of SegFormer, are resized to the labels first. With gradient
    accumulation each part counts by its number of labels.

    Args:
        spec: as for `segcal.build_loss`.
        ignore_index: label of pixels that are not counted; None is 255, or -100 beyond 255
            classes. Those with label -100 are never counted.
        **options: options of `segcal.build_loss`.
    """

    def __init__(self, spec: str, *, ignore_index: int | None = None, **options: Any) -> None:
        self.criterion = build_loss(spec, ignore_index=ignore_index, **options)

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The scalar loss of one part of a batch, which has `num_items_in_batch` labels in all."""
        logits = at_labels(logits_of(outputs), labels)
        items = labels.ne(_PADDING).sum()
        classes = 2 if self.criterion.multilabel else logits.shape[1]
        ignored = resolve_ignore_index(self.criterion.ignore_index, classes)
        labels = labels.masked_fill(labels == _PADDING, ignored)
        loss = self.criterion.to(logits.device)(logits, labels)
        if num_items_in_batch is None:
            return loss
        # The loss is that of all ranks, and the Trainer multiplies it by their number.
        distributed.sum_(items)
        return loss * (items / distributed.world_size() / num_items_in_batch)


class TrainerMetrics:
    """Calibration and accuracy for `Trainer(compute_metrics=…)`.

    With `batch_eval_metrics=True` in the TrainingArguments a batch is counted and forgotten;
    without, the Trainer keeps all logits in memory and hands them over at the end.

    Args:
        num_classes: C.
        scores: names of the scores to give; see docs/conventions.md.
        **options: options of `segcal.CalibrationMeter`.

    Attributes:
        report: the report of the last evaluation, or None.
    """

    def __init__(
        self, num_classes: int, *, scores: Sequence[str] | None = None, **options: Any
    ) -> None:
        self.report: Report | None = None
        self.scores = chosen_scores(scores)
        self._meter = CalibrationMeter(num_classes, **options)

    def __call__(
        self, predictions: EvalPrediction, compute_result: bool = True
    ) -> dict[str, float]:
        """Count logits, alone or first in a tuple, and labels.

        After the last batch, when `compute_result` is true: the scores by name, and start again.
        """
        found = predictions.predictions
        logits = torch.as_tensor(found[0] if isinstance(found, tuple) else found)
        labels = torch.as_tensor(predictions.label_ids)
        labels = labels.masked_fill(labels == _PADDING, self._meter.settings.ignore_index)
        for one, label in zip(logits, labels, strict=True):  # all at once would be resized at once
            self._meter.update(at_labels(one[None], label[None]), label[None])
        if not compute_result:
            return {}
        self.report = self._meter.compute()
        self._meter.reset()
        return scalars(self.report, self.scores)
