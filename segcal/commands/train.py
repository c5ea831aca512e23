"""Train a network for segmentation or classification."""

from __future__ import annotations

import os
from collections.abc import Sequence


def run(arguments: Sequence[str], prog: str) -> None:
    """Train, and print the command that evaluates the run."""
    from segcal.training.config import parse_train

    config, resume = parse_train(arguments, prog)
    from segcal.data import DATASETS
    from segcal.training.run import train_run
    from segcal.training.trainer import best_record
    from segcal.viz.tables import describe_scores

    first = os.environ.get("RANK", "0") == "0"
    try:
        history = train_run(config, resume=resume)
    except KeyboardInterrupt:
        if first:
            print(f"saved; continue with: {prog} --resume --out {config.folder}", flush=True)
        raise
    best = best_record(history, config.select)
    assert best is not None  # the last epoch is always evaluated
    evaluate = prog.replace("train_seg.py", "eval_calib.py").replace("segcal train", "segcal eval")
    if first:
        scores = describe_scores(best, "holdout/")
        print(
            f"best by {config.select}: epoch {best['epoch']} of {len(history)}, hold-out {scores}"
        )
        print(f"evaluate it:  {evaluate} {config.folder}")
        if DATASETS[config.data.name].embedded:
            recipe = "voc2012_deeplabv3plus_xception65"
            print(f"train on VOC: {prog} --config {recipe} --loss {config.loss}")
