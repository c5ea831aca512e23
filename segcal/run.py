"""Training runs: started from their settings, and opened again from their folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import segcal
from segcal import distributed
from segcal.config import (
    CONFIG,
    TrainConfig,
    differences,
    load_config,
    save_config,
    to_dict,
    with_defaults,
)
from segcal.data.build import Splits, build_data, build_shifted
from segcal.data.shift import Shift
from segcal.evaluation.sources import EVERYTHING, SplitPredictions, shard_of
from segcal.files import Busy, locked
from segcal.losses import build_loss
from segcal.models.build import build_model
from segcal.runtime import choose_device, process_group, seed_everything
from segcal.training import checkpoint
from segcal.training.labels import check_labels
from segcal.training.log import Record
from segcal.training.trainer import LOG, Trainer

log = logging.getLogger(__name__)

# Settings that a resumed run may change: they do not touch what it learns. `epochs` does, through
# the schedule, but going on for longer is what people want.
_MAY_CHANGE = {"out", "device", "workers", "eval_every", "save_every", "tensorboard", "epochs"}
_MAY_CHANGE |= {"data.root", "data.download", "data.skip_bad", "model.encoder_weights"}


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
            data = build_shifted(data, self.config.data, shift)
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
    data = build_data(config.data, seed=config.seed)
    # The checkpoint has all weights: pretrained ones of the encoder are not needed.
    bare = replace(config.model, encoder_weights=None)
    model = build_model(bare, num_classes=data.num_classes, words=data.words)
    with checkpoint.expect_whole(folder / weights):
        model.load_state_dict(state["model"])
        return Run(config, data, model.eval(), state["record"])


def train_run(config: TrainConfig, *, resume: bool = False) -> list[Record]:
    """Train as `config` says into `config.folder`; the records of all epochs.

    Under torchrun every process calls this. With `resume` a run that is already in the folder is
    continued; without it that is an error.

    Raises:
        ValueError: in one line, what cannot be trained, or why the folder cannot be used.
        Interrupted: a signal stopped the run, which was saved.
        Diverged: the loss or the weights are no longer finite.
    """
    device = choose_device(config.device)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not config.deterministic
    with process_group(device), _claimed(config.folder):
        if distributed.rank() == 0:
            (_expect_whole_run if resume else _expect_no_run)(config.folder)
        if distributed.is_distributed():
            dist.barrier()  # the others wait until the first has checked the folder
        state = checkpoint.load_last(config.folder) if resume else None
        trainer = _build(config, device, restored=state is not None)
        if state is not None:
            with checkpoint.expect_whole(config.folder / checkpoint.LAST):
                _expect_same(state["config"], to_dict(config), config.folder)
                trainer.restore(state)
        if distributed.rank() == 0:
            _prepare_folder(config)
            _announce(config, trainer)
        return trainer.fit()


def _build(config: TrainConfig, device: torch.device, *, restored: bool) -> Trainer:
    seed_everything(config.seed)
    data = build_data(config.data, seed=config.seed)
    if not restored:
        check_labels(data)
    settings = replace(config.model, encoder_weights=None) if restored else config.model
    return Trainer(
        build_model(settings, num_classes=data.num_classes, words=data.words),
        build_loss(
            config.loss,
            ignore_index=data.ignore_index,
            weight=_class_weights(config, data),
            multilabel=data.multilabel,
            **config.hyper,
        ),
        data.train,
        data.holdout,
        options=config,
        num_classes=data.num_classes,
        ignore_index=data.ignore_index,
        device=device,
        uniform=data.uniform,
        skipped=len(data.train.skipped) + len(data.holdout.skipped),
        folder=config.folder,
        config=to_dict(config),
    )


def _class_weights(config: TrainConfig, data: Splits) -> tuple[float, ...] | None:
    weights = config.class_weights
    if weights is not None and len(weights) != data.num_classes:
        raise ValueError(
            f"Expected {data.num_classes} class_weights, one per class, but got {len(weights)}"
        )
    return weights


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep other trainings out of `folder` until the block or its process ends."""
    if distributed.rank() != 0:
        yield
        return
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, wait=False):
            yield
    except Busy as busy:
        raise ValueError(
            f"Expected a folder of its own for each training, but {busy.holder} trains in "
            f"{folder}: choose another one with --out"
        ) from None
    finally:
        if made:
            with suppress(OSError):  # raised unless the folder is empty
                folder.rmdir()


def _expect_whole_run(folder: Path) -> None:
    """Raise if a run is to be resumed that has results, but has lost what it goes on from."""
    checkpoints = (checkpoint.LAST, checkpoint.PREVIOUS)
    found = [name for name in (checkpoint.BEST, LOG) if (folder / name).exists()]
    if found and not any((folder / name).exists() for name in checkpoints):
        raise ValueError(
            f"Expected {' or '.join(checkpoints)} in {folder} to resume its run, but there is "
            f"only {found[0]}, which would be overwritten: start another run with --out"
        )


def _expect_no_run(folder: Path) -> None:
    # A config.yaml alone is a run that never got anywhere: nothing is lost with it.
    names = (LOG, checkpoint.LAST, checkpoint.PREVIOUS, checkpoint.BEST)
    if any((folder / name).exists() for name in names):
        raise ValueError(
            f"Expected a new folder, but {folder} holds a run already: continue it with --resume, "
            "or choose another folder with --out"
        )


def changed_settings(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, same: Container[str] = ()
) -> dict[str, Any]:
    """Where the settings `ours` of a run differ from `theirs` in what it learns, with our values.

    Both are as `to_dict` gives them; `theirs` may be of an earlier version. `same` names settings
    that a resumed run may change, and that are to be compared all the same.
    """
    found = differences(with_defaults(theirs), ours)
    return {key: v for key, v in found.items() if key not in _MAY_CHANGE or key in same}


def _expect_same(theirs: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    if changed := changed_settings(theirs, ours):
        shown = ", ".join(f"{key}={value}" for key, value in changed.items())
        raise ValueError(
            f"Expected the settings of the run in {folder} to resume it, but got {shown}; "
            "start another run with --out"
        )


def _prepare_folder(config: TrainConfig) -> None:
    config.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.remove_leftovers(config.folder, LOG, CONFIG)
    header = (
        f"segcal {segcal.__version__}; run again with --config {config.folder / CONFIG} --out …"
    )
    resolved = replace(config, out=str(config.folder))
    save_config(resolved, config.folder / CONFIG, header)


def _announce(config: TrainConfig, trainer: Trainer) -> None:
    model = trainer.learner.model
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    processes = distributed.world_size()
    print(
        f"{config.folder}: {config.loss} on {config.data.name}, {config.model.name} "
        f"({parameters:.2f} M parameters), {len(trainer.train_set)} training and "
        f"{len(trainer.holdout_set)} hold-out images, {trainer.device}"
        + (f" x {processes} processes" if processes > 1 else "")
    )
    if trainer.skipped:
        print(f"left out {trainer.skipped} training and hold-out images that cannot be used")
    if trainer.learner.steps:
        print(f"going on from step {trainer.learner.steps} of {trainer.total_steps}")
    if (
        processes > 1
        and config.sync_bn
        and trainer.device.type != "cuda"
        and _has_batch_norm(model)
    ):
        log.warning("batch normalisation is not synchronised between processes: that needs GPUs")


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
