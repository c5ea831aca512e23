"""`CalibrationCallback`: scores in the log of a Lightning trainer, and results at the end.

trainer = Trainer(callbacks=[CalibrationCallback(num_classes=21, folder="calibration")])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from segcal.evaluation.evaluate import NONE, Evaluation
from segcal.integrations import at_labels, chosen_scores, missing, scalars, trackers
from segcal.metrics import CalibrationMeter, Report
from segcal.sources.source import logits_of

try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        from pytorch_lightning import Callback, LightningModule, Trainer
    else:
        from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing("lightning", "lightning") from error

# Takes what a step returned, and its batch, to (N, C, *S) logits and (N, *S) labels.
Unpack = Callable[[Any, Any], tuple[Tensor, Tensor]]


def logits_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(N, C, *S) logits and (N, *S) labels of a step.

    The step returns the logits, alone, first in a tuple, or under "logits" or "out"; the labels
    are second in the batch, or under "labels" in what the step returned or in the batch.
    """
    if outputs is None:
        raise ValueError("validation_step and test_step must return the logits, but returned None")
    for place in (outputs, batch):
        if isinstance(place, dict) and "labels" in place:
            return logits_of(outputs), place["labels"]
    if isinstance(batch, Sequence) and len(batch) > 1:
        return logits_of(outputs), batch[1]
    raise ValueError(
        f"there are no labels in the {type(batch).__name__} that is the batch: they must be second "
        "in it or under 'labels'; for other batches give unpack="
    )


class CalibrationCallback(Callback):
    """Evaluates what validation and test steps return, over all ranks.

    It logs val/ece and the other scores after each validation, and test/… after a test; those of a
    second loader are val/1/ece and so on. Loggers of TensorBoard, W&B and MLflow get the
    reliability diagram too. When the trainer ends, `Evaluation.save` writes the last evaluation of
    each loader. Images that Lightning's sampler repeats, to give all ranks equally many, count
    twice.

    Args:
        num_classes: C.
        folder: where to write; validation goes to the folder val inside, test to test. None writes
            nothing; `reports` has the reports.
        scores: names of the scores to log; see docs/conventions.md.
        unpack: gives logits and labels from what a step returned and its batch; see
            `logits_and_labels`. Smaller logits are resized to their labels.
        **options: options of `CalibrationMeter`.

    Attributes:
        reports: the last report by stage and loader: "val", "val/1", "test".
    """

    def __init__(
        self,
        num_classes: int,
        *,
        folder: str | Path | None = None,
        scores: Sequence[str] | None = None,
        unpack: Unpack = logits_and_labels,
        **options: Any,
    ) -> None:
        self.reports: dict[str, Report] = {}
        self.folder = None if folder is None else Path(folder)
        self.scores, self.unpack = chosen_scores(scores), unpack
        self.options = {"num_classes": num_classes, **options}
        self._meters: dict[int, CalibrationMeter] = {}  # by loader
        self._unwritten: dict[str, Evaluation] = {}
        CalibrationMeter(**self.options)  # complains of what does not fit

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meters = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits, labels = self.unpack(outputs, batch)
        if dataloader_idx not in self._meters:
            self._meters[dataloader_idx] = CalibrationMeter(**self.options)
        self._meters[dataloader_idx].update(at_labels(logits, labels), labels)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test")

    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = map(trackers.of_logger, trainer.loggers if trainer.is_global_zero else ())
        shown = [tracker for tracker in found if tracker is not None]
        for loader, meter in self._meters.items():
            name = f"{stage}/{loader}" if loader else stage
            self.reports[name] = report = meter.sync().compute()
            self._unwritten[name] = Evaluation(name, {NONE: report}, meters={NONE: meter})
            pl_module.log_dict(scalars(report, self.scores, f"{name}/"))
            for tracker in shown:
                tracker.reliability(f"{name}/reliability", report, trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is not None and trainer.is_global_zero:
            for name, evaluation in self._unwritten.items():
                evaluation.save(self.folder / name)
        self._unwritten.clear()
