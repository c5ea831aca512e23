"""Trains as the settings say, into a folder; `resume` goes on where a run stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import segcal
from segcal import data, distributed, models, settings
from segcal.data.samples import Samples
from segcal.data.splits import Splits
from segcal.distributed import choose_device, process_group
from segcal.files import Busy, locked
from segcal.integrations.trackers import NAMES
from segcal.losses import build_loss
from segcal.training import checkpoint
from segcal.training.config import CONFIG, TrainConfig
from segcal.training.log import Record
from segcal.training.trainer import LOG, Trainer

log = logging.getLogger(__name__)

# Settings that a resumed run may change: they do not touch what it learns. `epochs` does, through
# the schedule, but going on for longer is what people want.
_MAY_CHANGE = {"out", "device", "workers", "eval_every", "save_every", "epochs", *NAMES}
_MAY_CHANGE |= {"data.root", "data.download", "data.skip_bad", "model.encoder_weights"}
_MAX_LISTED = 8  # classes named in a warning
_LABELS_READ = 500  # of a part, to find absent classes


def train_run(config: TrainConfig, *, resume: bool = False) -> list[Record]:
    """Train as `config` says into `config.folder`; the records of all epochs.

    Under torchrun every process calls this. With `resume` a run that is already in the folder is
    continued; without it that is an error. Raises `Interrupted` if a signal stopped the run, which
    was saved, and `Diverged` if the loss or the weights are no longer finite.
    """
    device, folder = choose_device(config.device), config.folder
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not config.deterministic
    with process_group(device), _claimed(folder):
        first = distributed.rank() == 0
        if first:
            _check_folder(folder, resume=resume)
        if distributed.is_distributed():
            dist.barrier()  # the others wait until the first has checked the folder
        state = checkpoint.load_last(folder) if resume else None
        seed_torch(config.seed)
        splits = data.build(config.data, seed=config.seed)
        if state is None:
            check_labels(splits)
        trainer = _build_trainer(config, splits, device, pretrained=state is None)
        if state is not None:
            with checkpoint.expect_whole(folder / checkpoint.LAST):
                other = settings.differences(state["config"], settings.to_dict(config))
                asked = [f"{key}={v}" for key, v in other.items() if key not in _MAY_CHANGE]
                if asked:
                    raise ValueError(
                        f"the run in {folder} was started with other settings than "
                        f"{', '.join(asked)}; start another run with --out"
                    )
                trainer.restore(state)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_leftovers(folder, LOG, CONFIG)
            again = f"run again with --config {folder / CONFIG} --out …"
            header = f"segcal {segcal.__version__}; {again}"
            settings.save(replace(config, out=str(folder)), folder / CONFIG, header)
            _announce(trainer)
        return trainer.fit()


def _build_trainer(
    config: TrainConfig, splits: Splits, device: torch.device, *, pretrained: bool
) -> Trainer:
    """A trainer; without `pretrained` weights where a checkpoint has them all."""
    weights = config.class_weights
    if weights is not None and len(weights) != splits.num_classes:
        raise ValueError(
            f"class_weights: expected {splits.num_classes}, one per class, but got {len(weights)}"
        )
    network = config.model if pretrained else replace(config.model, encoder_weights=None)
    model = models.build(network, splits.num_classes, words=splits.words)
    criterion = build_loss(
        config.loss,
        ignore_index=splits.ignore_index,
        weight=weights,
        multilabel=splits.multilabel,
        beta=config.beta,
        **dict[str, Any](config.hyper),
    )
    return Trainer(model, criterion, splits, config, device=device, folder=config.folder)


def seed_torch(seed: int) -> None:
    """Seed the initial weights and dropout, differently in each process."""
    torch.manual_seed(int(np.random.SeedSequence((seed, distributed.rank())).generate_state(1)[0]))


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
    except Busy:
        raise ValueError(
            f"another process trains in {folder}: choose another folder with --out"
        ) from None
    finally:
        if made:
            with suppress(OSError):  # raised unless the folder is empty
                folder.rmdir()


def _check_folder(folder: Path, *, resume: bool) -> None:
    """Raise unless a run can begin, or be resumed, in the folder."""
    last = (checkpoint.LAST, checkpoint.PREVIOUS)
    # A config.yaml alone is a run that never got anywhere: nothing is lost with it.
    found = [name for name in (checkpoint.BEST, LOG, *last) if (folder / name).exists()]
    if found and not resume:
        raise ValueError(
            f"Expected a new folder, but {folder} holds a run already: continue it with --resume, "
            "or choose another folder with --out"
        )
    if found and not set(found) & set(last):
        raise ValueError(
            f"Expected {' or '.join(last)} in {folder} to resume its run, but there is "
            f"only {found[0]}, which would be overwritten: start another run with --out"
        )


def check_labels(splits: Splits) -> None:
    """Report absent classes and ignored labels; raise if all labels of a part are ignored."""
    binary = splits.multilabel or splits.num_classes == 2
    for name, part in (("training", splits.train), ("hold-out", splits.holdout)):
        classes, ignored, items = count_labels(
            part, splits.num_classes, splits.ignore_index, multilabel=splits.multilabel
        )
        hint = ""
        if binary and splits.ignore_index == 255 and ignored:
            hint = "; if 255 is the foreground in the masks, write it as 1: 255 is ignored"
        if ignored == 1 and items == len(part):
            raise ValueError(
                f"Expected labels in the {name} images, but got only {splits.ignore_index}, the "
                f"label that is ignored{hint}"
            )
        if name == "hold-out" or distributed.rank() != 0:
            continue
        where = f"in {items} of {len(part)} training images"
        if ignored:
            print(f"labels {where}: {ignored:.1%} are ignored")
        absent = [n for n, count in zip(splits.class_names, classes, strict=True) if not count]
        if absent:
            listed = ", ".join(absent[:_MAX_LISTED]) + ", …" * (len(absent) > _MAX_LISTED)
            of_them = f"{len(absent)} of the {splits.num_classes} classes"
            log.warning("no label %s is of %s: %s%s", where, of_them, listed, hint)


def count_labels(
    samples: Samples,
    num_classes: int,
    ignore_index: int,
    *,
    multilabel: bool = False,
    most: int = _LABELS_READ,
) -> tuple[np.ndarray, float, int]:
    """Count the labels of at most `most` items, evenly spaced; files of images are not read.

    Returns:
        (K,) labels of each class, the share of labels that are ignored, and the number of items.
    """
    some = samples.limited(most).indices

    def count(index: int) -> np.ndarray:
        label = np.asarray(samples.part.label(index))
        counted = label[label != ignore_index].astype(np.int64)
        classes = np.bincount(counted, minlength=num_classes)
        if multilabel:
            classes = (label == 1).sum((1, 2))
        return np.array([*classes, label.size - counted.size, label.size])

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders let other threads run
        *classes, ignored, labels = sum(pool.map(count, some), np.zeros(num_classes + 2, int))
    return np.array(classes), ignored / labels, len(some)


def _announce(trainer: Trainer) -> None:
    config, model, splits = trainer.options, trainer.learner.model, trainer.splits
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    processes = distributed.world_size()
    print(
        f"{config.folder}: {config.loss} on {config.data.name}, {config.model.name} "
        f"({parameters:.2f} M parameters), {len(splits.train)} training and "
        f"{len(splits.holdout)} hold-out images, {trainer.device}"
        + (f" x {processes} processes" if processes > 1 else "")
    )
    if trainer.skipped:
        print(f"left out {trainer.skipped} training and hold-out images that cannot be used")
    if trainer.learner.steps:
        print(f"going on from step {trainer.learner.steps} of {trainer.total_steps}")
    normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if processes > 1 and config.sync_bn and trainer.device.type != "cuda" and normalised:
        log.warning("batch normalisation is not synchronised between processes: that needs GPUs")
