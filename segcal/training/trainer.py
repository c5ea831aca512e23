"""The training loop: epochs, hold-out, log and checkpoints, for every task.

What a run learns depends on its options and data alone: if it is interrupted anywhere and resumed,
it ends with the same weights.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segcal import distributed, settings
from segcal.data.samples import Batch, Batches, digest, eval_loader
from segcal.data.splits import Splits
from segcal.evaluation.evaluate import evaluate
from segcal.integrations.trackers import NAMES, Tracker, open_tracker
from segcal.losses import Criterion
from segcal.metrics import Report
from segcal.metrics.scores import LOGGED, SCORES
from segcal.training import checkpoint
from segcal.training.config import TrainConfig
from segcal.training.log import (
    Diverged,
    Progress,
    Record,
    RunningLosses,
    describe_epoch,
    write_jsonl,
)
from segcal.training.order import EpochOrder
from segcal.training.signals import Interrupted, StopSignals
from segcal.training.step import Learner, lr_factor

log = logging.getLogger(__name__)
LOG = "log.jsonl"
_AGREE_EVERY = 10  # steps between asking all processes whether one received a signal
_CHECK_EVERY = 50  # steps between checks for NaN on a GPU, because they wait for it


def best_record(history: list[Record], select: str) -> Record | None:
    """The first epoch with the best hold-out score `select`, among those evaluated."""
    sign = 1 if SCORES[select].higher else -1
    evaluated = [record for record in history if record.get(f"holdout/{select}") is not None]
    return max(evaluated, key=lambda record: sign * record[f"holdout/{select}"], default=None)


class Trainer:
    """Trains a model in place, evaluates it on a hold-out, and saves checkpoints.

    The folder gets the log and the checkpoints; None writes nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        splits: Splits,
        options: TrainConfig,
        *,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        self.splits, self.options = splits, options
        self.folder = folder if distributed.rank() == 0 else None  # the first process writes
        self.device = torch.device(device)
        self.skipped = len(splits.train.skipped) + len(splits.holdout.skipped)
        self._data = digest(splits.train.fingerprint(), splits.holdout.fingerprint())
        dense = splits.holdout[0][1].ndim > 0  # a label is a map, not one number
        self.scores = [score.name for score in LOGGED if dense or not score.dense]
        if options.select not in self.scores:
            raise ValueError(
                f"select: expected one of {', '.join(self.scores)}, but got {options.select}"
            )
        self.steps_per_epoch = self._order(0).steps_per_epoch
        self.total_steps = options.epochs * self.steps_per_epoch
        self._lr_factor = functools.partial(
            lr_factor, options.schedule, total=self.total_steps, per_epoch=self.steps_per_epoch
        )
        if options.mixup and options.batch_size == distributed.world_size() * options.accumulate:
            raise ValueError("mixup: expected micro-batches of 2 samples or more, but got 1")
        self.learner = Learner(model, criterion, options, self.device)
        self.history: list[Record] = []  # one record per epoch, when it is evaluated and logged
        self._losses = RunningLosses()
        self._seconds = 0.0  # of the current epoch
        self._stop = StopSignals()

    def _order(self, first_step: int) -> EpochOrder:
        return EpochOrder(
            len(self.splits.train),
            batch_size=self.options.batch_size,
            accumulate=self.options.accumulate,
            epochs=self.options.epochs,
            seed=self.options.seed,
            first_step=first_step,
        )

    def fit(self) -> list[Record]:
        """Train the remaining epochs; the records of all epochs.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the run was saved after the current step.
            Diverged: a loss term or a weight is no longer finite; no such state was saved.
        """
        progress = Progress(
            self.total_steps,
            self.learner.steps,
            batch_size=self.options.batch_size,
            shown=self.folder is not None,
        )
        trackers: list[Tracker] = []
        if self.folder is not None:
            options, step = settings.to_dict(self.options), self.learner.steps
            names = [name for name in NAMES if options[name]]
            trackers = [open_tracker(name, self.folder, options, step=step) for name in names]
        loader = Batches(  # over all epochs: workers start once, and read ahead across epochs
            self.splits.train,
            workers=self.options.workers,
            pin=self.device.type == "cuda",
            batch_sampler=self._order(self.learner.steps),
        )
        stream = iter(loader)
        try:
            with self._stop:
                while len(self.history) < self.options.epochs:
                    self.advance(stream, (len(self.history) + 1) * self.steps_per_epoch, progress)
                    record, report = self._close_epoch(progress)
                    progress.say(describe_epoch(record, self.options.epochs))
                    trackers = [t for t in trackers if t.epoch(record, report)]
        except (RuntimeError, OSError):
            # The signal also ended the workers, and the loader raises because of that. The step may
            # be incomplete: the last checkpoint counts.
            if self._stop.received:
                raise Interrupted(self._stop.received) from None
            raise
        finally:
            progress.close()
            for tracker in trackers:
                tracker.close()
        return self.history

    def advance(self, stream: Iterator[Batch], end: int, progress: Progress) -> None:
        """Take steps on the batches of `stream` until the run has taken `end` steps."""
        options, started = self.options, time.monotonic() - self._seconds
        while (step := self.learner.steps) < end:
            batches = list(itertools.islice(stream, options.accumulate))
            self._losses.add(self.learner.step(batches, self._lr_factor(step)), step + 1)
            step, last = step + 1, step + 1 == end
            self._seconds = time.monotonic() - started
            if self.device.type == "cpu" or step % _CHECK_EVERY == 0:
                self._losses.check()
            if progress.due:
                self._losses.check()
                epoch = f"{len(self.history) + 1}/{options.epochs}"
                progress.show(step, epoch, self._losses.means())
            # Processes must stop at the same step, and asking the others costs time.
            ask = not distributed.is_distributed() or step % _AGREE_EVERY == 0 or last
            signal = self._stop.agreed() if ask else 0
            due = options.save_every is not None and step % options.save_every == 0 and not last
            if signal or due:
                self.save()
            if signal:
                raise Interrupted(signal)

    def _close_epoch(self, progress: Progress) -> tuple[Record, Report | None]:
        """Evaluate, log and save the epoch whose last step was taken."""
        self._expect_finite()
        options, epoch = self.options, len(self.history) + 1
        record: Record = {
            "epoch": epoch,
            "step": self.learner.steps,
            "lr": options.optim.lr * self._lr_factor(self.learner.steps - 1),
            "seconds": round(self._seconds, 3),
            **{f"train/{name}": value for name, value in self._losses.means().items()},
        }
        report = None
        if epoch % options.eval_every == 0 or epoch == options.epochs:
            try:
                report = self._evaluate(progress)
            except Interrupted:
                self.save()  # the epoch's steps are done; its evaluation will be repeated
                raise
            record |= {f"holdout/{name}": getattr(report, name) for name in self.scores}
        if self.skipped:
            record["skipped"] = self.skipped
        self.history.append(record)
        record["best"] = best_record(self.history, options.select) is record
        self._losses.clear()
        self._seconds = 0.0
        self.save()
        self._write_summary()
        return record, report

    def _evaluate(self, progress: Progress) -> Report:
        self.learner.share_buffers()
        share = self.options.batch_size // distributed.world_size()
        loader = eval_loader(
            self.splits.holdout,
            batch_size=share if self.splits.uniform else 1,
            workers=self.options.workers,
            pin=self.device.type == "cuda",
            before_each=self._expect_no_signal,
        )
        return evaluate(
            self.learner.evaluated,
            loader,
            num_classes=self.splits.num_classes,
            ignore_index=self.splits.ignore_index,
            multilabel=self.splits.multilabel,
            device=self.device,
            padded=False,
            progress=progress.terminal or None,
        )

    def _expect_no_signal(self) -> None:
        # Other processes would wait for one that stops inside an evaluation.
        if self._stop.received and not distributed.is_distributed():
            raise Interrupted(self._stop.received)

    def save(self) -> None:
        """Write `last.pt`. Every process must call this; the first one writes."""
        self._expect_finite()
        generators = distributed.gathered(checkpoint.rng_state())
        if self.folder is None:
            return
        state = {
            "model": self.learner.evaluated.state_dict(),
            "learner": self.learner.state_dict(),
            "history": self.history,
            "sums": self._losses.state_dict(),
            "seconds": self._seconds,
            "generators": generators,
            "samples": len(self.splits.train),
            "record": self.history[-1] if self._epoch_is_whole else None,
            "config": settings.to_dict(self.options),
            "data": self._data,
        }
        checkpoint.save_last(self.folder, state)

    def _expect_finite(self) -> None:
        self._losses.check()
        if not self.learner.is_finite():
            raise Diverged(f"the weights are no longer finite after step {self.learner.steps}")

    @property
    def _epoch_is_whole(self) -> bool:
        """Whether the last record of the history describes the current weights."""
        return 0 < self.learner.steps == len(self.history) * self.steps_per_epoch

    def _write_summary(self) -> None:
        """Write log.jsonl, and best.pt if the last epoch is the best, from the current state."""
        if self.folder is None:
            return
        if self.history[-1]["best"]:
            state = {
                "model": self.learner.evaluated.state_dict(),
                "record": self.history[-1],
                "config": settings.to_dict(self.options),
            }
            checkpoint.save_state(self.folder / checkpoint.BEST, state)
        write_jsonl(self.folder / LOG, self.history)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `checkpoint.load_last` returned."""
        samples = len(self.splits.train)
        if state["samples"] != samples:
            raise ValueError(
                f"Expected the {state['samples']} training samples that the run began with, "
                f"but got {samples}"
            )
        if distributed.rank() == 0 and state.get("data", self._data) != self._data:
            log.warning(
                "files of the training or hold-out images have other names, sizes or times than "
                "when the run began: if their contents changed too, start another run with --out"
            )
        if len(state["history"]) > self.options.epochs:
            raise ValueError(
                f"epochs: {len(state['history'])} are done already, but got {self.options.epochs}"
            )
        self.learner.load_state_dict(state["learner"])
        self.history = state["history"]
        self._losses.load_state_dict(state["sums"], self.device)
        self._seconds = state["seconds"]
        if self._epoch_is_whole:
            self._write_summary()
        if len(state["generators"]) == distributed.world_size():
            checkpoint.set_rng_state(state["generators"][distributed.rank()])
