"""`CalibrationMetric` for the evaluator of mmengine, as mmsegmentation uses it.

custom_imports = dict(imports=["segcal.integrations.mmengine"])
val_evaluator = [dict(type="IoUMetric"), dict(type="CalibrationMetric", num_classes=19)]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segcal import distributed
from segcal.integrations import chosen_scores, missing, scalars
from segcal.metrics import CalibrationMeter, Report
from segcal.pixels import look_like_scores, scores_to_probs

try:
    from mmengine.evaluator import BaseMetric
    from mmengine.registry import METRICS
except ImportError as error:
    raise missing("mmengine", "mmengine") from error

log = logging.getLogger(__name__)
_OUTPUTS = (None, "logits", "scores")


@METRICS.register_module()
class CalibrationMetric(BaseMetric):
    """Calibration and accuracy of the `seg_logits` of each data sample, over all ranks.

    An image that the sampler repeats to give all ranks equally many counts once.

    Args:
        num_classes: C.
        outputs: what `seg_logits` are. "logits"; or "scores" for the heads of MaskFormer and
            Mask2Former, whose scores of at least 0 do not sum to 1: they are divided by their sum
            and counted as probabilities. None looks at the first image: values that all lie in
            0..1.5 are scores, and a warning says so. One channel is always a sigmoid.
        scores: names of the scores to give; see docs/conventions.md.
        **options: options of `segcal.CalibrationMeter`; `collect_device` and `prefix` are those of
            any metric of mmengine.

    Attributes:
        report: the report of the last evaluation, on the first rank; or None.
    """

    default_prefix = "calibration"

    def __init__(
        self,
        num_classes: int,
        *,
        outputs: str | None = None,
        scores: Sequence[str] | None = None,
        collect_device: str = "cpu",
        prefix: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        if outputs not in _OUTPUTS:
            raise ValueError(f"outputs must be 'logits' or 'scores', but is {outputs!r}")
        self.outputs = outputs
        self.report: Report | None = None
        self.scores = chosen_scores(scores)
        self.options = {"num_classes": num_classes, **options}
        self._start()

    def _start(self) -> None:
        self._meter, self._last = (CalibrationMeter(**self.options) for _ in range(2))
        self._images = 0

    def process(self, data_batch: Any, data_samples: Sequence[Mapping[str, Any]]) -> None:
        """Count samples, each with seg_logits, (C, H, W), and gt_sem_seg, (1, H, W)."""
        for sample in data_samples:
            values, labels = sample["seg_logits"]["data"], sample["gt_sem_seg"]["data"].long()
            names = [str(sample["img_path"])] if "img_path" in sample else None
            self._meter += self._last
            self._last = CalibrationMeter(**self.options)
            if len(values) == 1:  # a binary model of mmsegmentation gives its sigmoid
                probs = torch.cat([1 - values, values])[None]
                self._last.update_probs(probs, labels, names=names)
            elif self._are_scores(values[None]):
                self._last.update_probs(scores_to_probs(values[None]), labels, names=names)
            else:
                self._last.update(values[None], labels, names=names)
            self._images += 1

    def _are_scores(self, values: Tensor) -> bool:
        if self.outputs is None:
            scores = not self._meter.settings.multilabel and look_like_scores(values)
            self.outputs = "scores" if scores else "logits"
            if scores:
                log.warning(
                    "seg_logits lie in 0..1.5, so they are taken for scores as MaskFormer's, and "
                    "their sum (%.2f on average in the first image) divides them; outputs='scores' "
                    "says that this is right, outputs='logits' that it is not",
                    values.sum(1).mean(),
                )
        return self.outputs == "scores"

    def evaluate(self, size: int) -> dict[str, float]:
        """The scores over all ranks; `size` is the number of images."""
        # The sampler gives image i of a rank the number i * world + rank, and repeats past `size`.
        number = (self._images - 1) * distributed.world_size() + distributed.rank()
        if number < size:
            self._meter += self._last
        self.results = [self._meter.state_dict()]
        found: dict[str, float] = super().evaluate(max(size, distributed.world_size()))
        self._start()
        return found

    def compute_metrics(self, results: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The scores of the meters of all ranks."""
        total = CalibrationMeter(**self.options)
        for state in results:
            meter = CalibrationMeter(**self.options)
            meter.load_state_dict(state)
            total += meter
        self.report = total.compute()
        return scalars(self.report, self.scores)
