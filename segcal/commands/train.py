"""`segcal train`: trains a network, and prints the command that evaluates it."""

from __future__ import annotations

import os
import textwrap

from segcal.data import DATASETS
from segcal.training.config import TrainConfig, header, recipes
from segcal.training.run import train_run
from segcal.training.signals import Interrupted
from segcal.training.trainer import best_record
from segcal.viz.tables import describe_scores

VOC_RECIPE = "voc2012_deeplabv3plus_xception65"


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
        _say(f"train on VOC: {prog} --config {VOC_RECIPE} --loss {config.loss}")


def list_recipes() -> None:
    """Print the recipes that come with segcal, each with its cost and the result to expect."""
    for name, path in recipes().items():
        print(name)
        for part in header(path):
            print(textwrap.fill(part, 100, initial_indent="  ", subsequent_indent="    "))
        print()
    print("train one: segcal train --config NAME --loss fl+mdca")


def _say(line: str) -> None:
    """Print a line, once however many processes there are."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
