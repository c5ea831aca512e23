"""A training run, opened again from its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from segcal import data as data_sets
from segcal import models
from segcal.data.shift import Shift
from segcal.data.splits import Splits, shifted
from segcal.evaluation.sources import EVERYTHING, SplitPredictions, shard_of
from segcal.training import checkpoint
from segcal.training.config import CONFIG, TrainConfig, load_config
from segcal.training.log import Record


@dataclass(frozen=True)
class Run:
    """A trained run, opened.

    Attributes:
        config: its settings, with `download` off and `skip_bad` as it was opened.
        data: its data.
        model: with the weights of one of its checkpoints, in evaluation mode, on the CPU.
        record: the log line of the epoch those weights are from; None if it never was evaluated.
    """

    config: TrainConfig
    data: Splits
    model: nn.Module
    record: Record | None

    def predictions(
        self,
        split: str = "test",
        *,
        device: torch.device,
        batch_size: int | None = None,
        workers: int | None = None,
        shard: tuple[int, int] = EVERYTHING,
        shift: Shift | None = None,
        limit: int | None = None,
    ) -> SplitPredictions:
        """The predictions of the model on a split of the data.

        Args:
            split: test or holdout.
            device: where the model works; it is moved there.
            batch_size: images at a time; by default as in training.
            workers: processes that read images; by default as in training.
            shard: (k, n): every n-th image from image k on.
            shift: a change of the test images.
            limit: use only this many images, evenly spaced, before `shard` is taken of them.
        """
        data = self.data
        if shift is not None:
            data = shifted(data, self.config.data, shift)
        samples = getattr(data, split).limited(limit)
        return SplitPredictions(
            self.model,
            data,
            shard_of(samples, shard, f"{split} images"),
            device=device,
            batch_size=self.config.batch_size if batch_size is None else batch_size,
            workers=self.config.workers if workers is None else workers,
        )


def open_run(folder: Path, *, weights: str = checkpoint.BEST, skip_bad: bool = False) -> Run:
    """Open the run in `folder`.

    Args:
        folder: of the run.
        weights: the file of its weights: best.pt or last.pt.
        skip_bad: leave images that cannot be used out of its data; a run may say so itself.
    """
    if not (folder / CONFIG).exists():
        raise FileNotFoundError(f"Expected a run with a {CONFIG} in {folder}, but there is none")
    config = load_config(folder / CONFIG)
    state = checkpoint.load_state(folder / weights)
    # A run may come from someone else: opening it downloads nothing.
    skip_bad = skip_bad or config.data.skip_bad
    config = replace(config, data=replace(config.data, download=False, skip_bad=skip_bad))
    data = data_sets.build(config.data, seed=config.seed)
    # The checkpoint has all weights: pretrained ones of the encoder are not needed.
    bare = replace(config.model, encoder_weights=None)
    model = models.build(bare, data.num_classes, words=data.words)
    with checkpoint.expect_whole(folder / weights):
        model.load_state_dict(state["model"])
        return Run(config, data, model.eval(), state["record"])
