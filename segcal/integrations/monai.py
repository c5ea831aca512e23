"""`CalibrationMetric` for MONAI's loops, and `CalibrationHandler` for its Ignite engines.

metric = CalibrationMetric(num_classes=14, per_image=True)
metric(y_pred=logits, y=labels)   # (B, C, *S) and (B, 1, *S), or lists of channel-first items
metric.aggregate()                # {"accuracy": …, "ece": …}

SupervisedEvaluator(…, additional_metrics={"calibration": CalibrationHandler(num_classes=14)})

`monai.metrics.CalibrationErrorMetric` averages the errors of each image and class, absent classes
included. Here ece, sce, … put the voxels of all images into the same bins, and image_ace (with
`per_image=True`) averages over the classes that an image shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from segcal.integrations import chosen_scores, missing, scalars
from segcal.metrics import CalibrationMeter, Report

try:
    from monai.handlers import from_engine
    from monai.metrics.metric import Metric
except ImportError as error:
    raise missing("monai", "monai") from error
try:
    from ignite.metrics import Metric as IgniteMetric
    from ignite.metrics.metric import reinit__is_reduced
except ImportError as error:
    raise missing("pytorch-ignite", "monai") from error


class CalibrationMetric(Metric):
    """Calibration and accuracy of all voxels seen.

    Args:
        num_classes: C.
        probs: predictions are probabilities, not logits. They must not be one-hot, as for MONAI's
            Dice: a one-hot prediction has no confidence.
        scores: names of the scores that `aggregate` gives; see docs/conventions.md.
        include_background: False gives foreground_dice in place of dice, and foreground_ace in
            place of image_ace: the means over classes without class 0.
        **options: options of `segcal.CalibrationMeter`; with `multilabel` the network has C
            sigmoids.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        probs: bool = False,
        scores: Sequence[str] | None = None,
        include_background: bool = True,
        **options: Any,
    ) -> None:
        self.probs, self.scores = probs, chosen_scores(scores)
        if not include_background:
            without = {"dice": "foreground_dice", "image_ace": "foreground_ace"}
            usual = tuple(without) if options.get("per_image") else ("dice",)
            names = self.scores if scores is not None else (*self.scores, *usual)
            self.scores = tuple(without.get(name, name) for name in names)
        self.meter = CalibrationMeter(num_classes, **options)

    def __call__(self, y_pred: Tensor | Iterable[Tensor], y: Tensor | Iterable[Tensor]) -> None:
        """Count (B, C, *S) predictions and their (B, 1, *S) or one-hot (B, C, *S) labels.

        Both may be lists of B items that differ in size.
        """
        count = self.meter.update_probs if self.probs else self.meter.update
        for given in (y_pred, y):
            if isinstance(given, Tensor) and given.ndim < 2:
                shape = tuple(given.shape)
                raise ValueError(f"predictions must be (B, C, *S), labels (B, 1, *S), not {shape}")
        for pred, label in zip(y_pred, y, strict=True):
            pred, label = _plain(pred)[None], _plain(label)[None]
            count(pred, self._labels(label, pred))

    def _labels(self, label: Tensor, pred: Tensor) -> Tensor:
        """(1, *S) labels from (1, 1, *S), or from (1, C, *S) one-hot; as they are if multilabel."""
        if label.is_floating_point() and not bool((label == label.round()).all()):
            raise ValueError("labels must be whole numbers, but some are fractions")
        label = label.long()  # MONAI's transforms leave labels as float32
        if self.meter.settings.multilabel:
            return label
        if label.shape == pred.shape:
            if bool(((label == 0) | (label == 1)).all()) and bool((label.sum(1) == 1).all()):
                return label.argmax(1)
            raise ValueError("labels must be one-hot or have one channel, but these are neither")
        if label.ndim != pred.ndim or label.shape[1] != 1:
            raise ValueError(
                f"labels of shape {tuple(label.shape[1:])} do not fit predictions "
                f"{tuple(pred.shape[1:])}: give (1, *S), or (C, *S) one-hot"
            )
        return label[:, 0]

    def aggregate(self) -> dict[str, float]:
        """The scores by name, as fractions, over all ranks; every rank must call it."""
        return scalars(self.report(), self.scores)

    def report(self) -> Report:
        """The whole report, over all ranks: every rank must call it."""
        return self.meter.sync().compute()

    def reset(self) -> None:
        self.meter.reset()


class CalibrationHandler(IgniteMetric):
    """`CalibrationMetric` as a metric of Ignite: engine.state.metrics has every score by name.

    Args:
        num_classes: C.
        output_transform: takes the output of the engine to (y_pred, y), as for any metric of
            Ignite; by default MONAI's pred and label.
        **options: options of `CalibrationMetric`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        output_transform: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.metric = CalibrationMetric(num_classes, **options)
        super().__init__(output_transform or from_engine(["pred", "label"]))

    @reinit__is_reduced
    def reset(self) -> None:
        self.metric.reset()

    @reinit__is_reduced
    def update(self, output: Sequence[Any]) -> None:
        self.metric(*output)

    def compute(self) -> dict[str, float]:
        return self.metric.aggregate()


def _plain(tensor: Any) -> Tensor:
    """Without MONAI's metadata, whose operations are slow."""
    return tensor.as_tensor() if hasattr(tensor, "as_tensor") else torch.as_tensor(tensor)
