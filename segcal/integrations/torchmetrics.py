"""`CalibrationMetric`: the meter as a metric of torchmetrics.

metric = CalibrationMetric(num_classes=21, ignore_index=255)
metric.update(logits, labels)
metric.compute()  # {"accuracy": …, "miou": …, "nll": …, "ece": …, "sce": …}, tensors
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segcal.integrations import chosen_scores, missing, scalars
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.sums import encode_about

try:
    from torchmetrics import Metric
except ImportError as error:
    raise missing("torchmetrics", "torchmetrics") from error

_METER_OPTIONS = set(inspect.signature(CalibrationMeter).parameters)


class CalibrationMetric(Metric):
    """Calibration and accuracy of all pixels seen; torchmetrics keeps and synchronises the sums.

    Args:
        num_classes: C.
        probs: `update` gets probabilities, not logits.
        scores: names of the scores that `compute` gives; see docs/conventions.md.
        n_bins: what torchmetrics calls `num_bins`.
        **options: options of `CalibrationMeter` or of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False  # `forward` counts a batch once

    def __init__(
        self,
        num_classes: int,
        *,
        probs: bool = False,
        scores: Sequence[str] | None = None,
        n_bins: int | None = None,
        **options: Any,
    ) -> None:
        if n_bins is not None:
            if "num_bins" in options:
                raise ValueError("n_bins and num_bins are one option: give one of them")
            options["num_bins"] = n_bins
        known = {name: options.pop(name) for name in _METER_OPTIONS & set(options)}
        super().__init__(**options)
        self.probs, self.scores = probs, chosen_scores(scores)
        self.options = {"num_classes": num_classes, **known}
        meter = CalibrationMeter(**self.options)
        for name, tensor in meter.sums().items():
            self.add_state(f"sum_{name}", tensor, dist_reduce_fx="sum")
        if meter.settings.per_image:
            for name in meter.image_sums():
                self.add_state(f"image_{name}", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count (N, C, *S) logits, or probabilities if `probs`, and their (N, *S) labels."""
        meter = CalibrationMeter(**self.options)
        (meter.update_probs if self.probs else meter.update)(preds, target)
        for name, tensor in meter.sums().items():
            state = getattr(self, f"sum_{name}")
            setattr(self, f"sum_{name}", state + tensor.to(state.device))
        if meter.settings.per_image:
            for name, tensor in meter.image_sums().items():
                getattr(self, f"image_{name}").append(tensor.to(self.device))

    def compute(self) -> dict[str, Tensor]:
        """The scores by name, as fractions: float32 scalars on the device of the metric."""
        found = scalars(self._meter().compute(), self.scores)
        return {name: torch.tensor(value, device=self.device) for name, value in found.items()}

    def report(self) -> Report:
        """The whole report, over all ranks: every rank must call it."""
        with self.sync_context(should_sync=self._to_sync):
            return self._meter().compute()

    def _meter(self) -> CalibrationMeter:
        """A meter with the pixels counted so far."""
        meter = CalibrationMeter(**self.options)
        state = meter.state_dict()
        for name in meter.sums():
            state[name] = getattr(self, f"sum_{name}").cpu()
        for name in meter.image_sums() if meter.settings.per_image else ():
            rows = getattr(self, f"image_{name}")  # a list, or one tensor after synchronising
            rows = [rows] if isinstance(rows, Tensor) else rows
            empty = state[f"image.{name}"]
            state[f"image.{name}"] = torch.cat([empty, *(row.to(empty) for row in rows)])
        nameless = [""] * len(state["image.pixels"])
        state["about"] = encode_about(meter.settings, nameless, nameless)
        meter.load_state_dict(state)
        return meter
