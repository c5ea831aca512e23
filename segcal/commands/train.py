"""`segcal train`: trains a network, and says what to do next."""

from __future__ import annotations

import os

from segcal.config import TrainConfig
from segcal.data.registry import DATASETS
from segcal.run import train_run
from segcal.runtime import Interrupted
from segcal.training.log import describe_scores
from segcal.training.trainer import best_record

VOC_CONFIG = "configs/voc2012_deeplabv3plus_xception65.yaml"


def train(config: TrainConfig, resume: bool, prog: str) -> None:
    """Train as `config` says; `prog` is what was typed before the options."""
    try:
        history = train_run(config, resume=resume)
    except Interrupted:
        _say(f"saved; continue with: {prog} --resume --out {config.folder}")
        raise
    best = best_record(history, config.select)
    assert best is not None  # the last epoch is always evaluated
    evaluate = prog.replace("train_seg.py", "eval_calib.py").replace("segcal train", "segcal eval")
    _say(
        f"best by {config.select}: epoch {best['epoch']} of {len(history)}, hold-out "
        f"{describe_scores(best, 'holdout/')}\n"
        f"evaluate it:  {evaluate} {config.folder}"
    )
    if DATASETS[config.data.name].embedded:
        _say(f"train on VOC: {prog} --config {VOC_CONFIG} --loss {config.loss}")


def _say(line: str) -> None:
    """Print a line, once however many processes there are."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
