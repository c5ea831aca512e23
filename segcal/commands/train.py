"""`segcal train`: trains a network, and prints the command that evaluates it."""

from __future__ import annotations

import os
import re
import textwrap
from itertools import takewhile
from pathlib import Path

from segcal.config import TrainConfig, recipes
from segcal.data.build import DATASETS
from segcal.metrics.rows import describe_scores
from segcal.run import train_run
from segcal.runtime import Interrupted
from segcal.training.trainer import best_record

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


def header(path: Path) -> list[str]:
    """The sentences "cost: …" and "expected: …" of the comments that a config opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    parts: list[str] = []
    for line in takewhile(lambda line: line[:1] in ("#", ""), lines):
        text = line.removeprefix("#")
        if text.startswith("  ") and parts:  # goes on
            parts[-1] += f" {text.strip()}"
        else:
            parts.append(text.strip())
    return [part for part in parts if re.match("cost|expected", part)]


def _say(line: str) -> None:
    """Print a line, once however many processes there are."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
