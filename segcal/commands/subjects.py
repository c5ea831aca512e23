"""What a command line names, opened: runs and folders of saved predictions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segcal.config import CONFIG, to_dict
from segcal.data.predictions import PredictionFolder
from segcal.data.shift import Shift
from segcal.evaluation.shifted import digest, file_digest
from segcal.evaluation.sources import (
    EVERYTHING,
    NamedPredictions,
    SavedPredictions,
    SplitPredictions,
    shard_of,
)
from segcal.run import open_run
from segcal.training.trainer import LOG

_STATED = (
    "kind",
    "layout",
    "labels",
    "images",
    "num_classes",
    "class_names",
    "ignore_index",
    "align_corners",
)


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: a network, or the predictions that it left.

    Attributes:
        name: what tables call it.
        home: its folder; results go to `eval` inside.
        source: the predictions to evaluate.
        holdout: makes the predictions to fit post-hoc methods on.
        shifted: makes the predictions under a shift.
        key: a digest of the network and its settings.
        config: the settings of the run, YAML.
        history: its log, one record an epoch.
    """

    name: str
    home: Path
    source: NamedPredictions
    holdout: Callable[[], NamedPredictions]
    shifted: Callable[[Shift], SplitPredictions]
    key: str = ""
    config: str = ""
    history: Sequence[Mapping[str, Any]] = ()


def run_subject(folder: Path, options: argparse.Namespace, device: torch.device) -> Subject:
    """The run in `folder`, on the part of its data that is asked for."""
    run = open_run(folder, weights=f"{options.weights}.pt", skip_bad=options.skip_bad)
    if options.split == "holdout" and (options.posthoc or options.operate or options.conformal):
        raise ValueError(
            "Expected --split test with --posthoc, --operate and --conformal: on the hold-out they "
            "would be evaluated on what they were fitted on"
        )
    if options.split == "holdout" and (options.shift or options.shift_data):
        raise ValueError("Expected --split test with --shift: it changes the test images alone")

    def split(name: str, shard: tuple[int, int], shift: Shift | None = None) -> SplitPredictions:
        return run.predictions(
            name,
            device=device,
            batch_size=options.batch_size,
            workers=options.workers,
            shard=shard,
            shift=shift,
            limit=options.limit if name == options.split else None,  # the fit takes all
        )

    settings = to_dict(run.config)
    return Subject(
        name=folder.resolve().name,
        home=folder,
        source=split(options.split, options.shard),
        holdout=lambda: split("holdout", EVERYTHING),
        shifted=lambda shift: split("test", options.shard, shift),
        key=digest(
            file_digest(folder / f"{options.weights}.pt"), settings["data"], settings["model"]
        ),
        config=(folder / CONFIG).read_text(encoding="utf-8"),
        history=_read_log(folder / LOG),
    )


def saved_subject(path: Path, fit: Path | None, options: argparse.Namespace) -> Subject:
    """The predictions in `path`, with those in `fit` as hold-out."""
    stated = {name: getattr(options, name) for name in _STATED}
    stated = {name: value for name, value in stated.items() if value is not None}

    def saved(path: Path, shard: tuple[int, int]) -> SavedPredictions:
        folder = PredictionFolder(path, **stated)
        return SavedPredictions(
            shard_of(folder, shard, f"files in {path}"), skip_bad=options.skip_bad
        )

    def shifted(shift: Shift) -> SplitPredictions:
        raise ValueError(f"Expected a run to evaluate under {shift}, but got predictions in {path}")

    def holdout() -> NamedPredictions:
        if fit is None:
            raise ValueError(
                "Expected --fit-predictions with --predictions for --posthoc, --operate and "
                "--conformal, but got none"
            )
        return saved(fit, EVERYTHING)

    resolved = path.resolve()
    return Subject(
        name=resolved.stem if path.is_file() else resolved.name,
        home=path.parent if path.is_file() else path,
        source=saved(path, options.shard),
        holdout=holdout,
        shifted=shifted,
    )


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: Expected one JSON object a line, but got {error}") from None
