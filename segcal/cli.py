"""The place for commands: what is typed, what is printed, and one line when something is wrong."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

import torch

from segcal.runtime import Interrupted
from segcal.training.loader import WorkerDied
from segcal.training.log import Diverged, describe_scores

VOC_CONFIG = "configs/voc2012_deeplabv3plus_xception65.yaml"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(arguments: Sequence[str], prog: str) -> None:
    """Train a network; `--help` lists the options."""
    from segcal.config import parse_train
    from segcal.run import train_run
    from segcal.training.trainer import best_record

    config, resume = parse_train(arguments, prog)
    try:
        history = train_run(config, resume=resume)
    except Interrupted:
        _say(f"saved; go on with: {prog} --resume --out {config.folder}")
        raise
    best = best_record(history, config.select)
    assert best is not None  # the last epoch is always evaluated
    evaluate = prog.replace("train_seg.py", "eval_calib.py").replace("segcal train", "segcal eval")
    _say(
        f"best by {config.select}: epoch {best['epoch']} of {len(history)}, hold-out "
        f"{describe_scores(best, 'holdout/')}\n"
        f"evaluate it:  {evaluate} {config.folder}"
    )
    if config.data.name in ("scenes", "digits"):
        _say(f"train on VOC: {prog} --config {VOC_CONFIG} --loss {config.loss}")


def evaluate(arguments: Sequence[str], prog: str) -> None:
    """Judge runs, or predictions saved by anything; `--help` lists the options."""
    from segcal.commands.evaluate import evaluate

    evaluate(arguments, prog)


def report(arguments: Sequence[str], prog: str) -> None:
    """Make pages, tables and figures again from reports alone."""
    from segcal.commands.report import report

    report(arguments, prog)


def merge(arguments: Sequence[str], prog: str) -> None:
    """Add up the states of evaluations of parts of a data set."""
    from segcal.commands.merge import merge

    merge(arguments, prog)


def compare(arguments: Sequence[str], prog: str) -> None:
    """Say how models differ on the same images, with intervals of the differences."""
    from segcal.commands.compare import compare

    compare(arguments, prog)


def export(arguments: Sequence[str], prog: str) -> None:
    """Write a network that gives calibrated probabilities, as .pt2 or .onnx."""
    from segcal.commands.export import export

    export(arguments, prog)


# A new command is one function (arguments, prog) and one line here; its docstring is its help.
COMMANDS: dict[str, Callable[[Sequence[str], str], None]] = {
    "train": train,
    "eval": evaluate,
    "report": report,
    "merge": merge,
    "compare": compare,
    "export": export,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`segcal COMMAND …`: run one of `COMMANDS`; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: segcal COMMAND [--help] …\n")
        for name, command in COMMANDS.items():
            print(f"  {name:9}{command.__doc__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(
            f"segcal: error: Expected a command ({', '.join(COMMANDS)}), but got {name}",
            file=sys.stderr,
        )
        return 2
    return run(COMMANDS[name], rest, f"segcal {name}")


def run(command: Callable[[Sequence[str], str], None], arguments: Sequence[str], prog: str) -> int:
    """Call a command; the exit status: 0, 1 no fault of the input, 2 bad input, 128 + n signal n.

    SEGCAL_TRACEBACK=1 in the environment shows where an error came from.
    """
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):  # the path of a result may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command(arguments, prog)
    except Interrupted as stop:
        return 128 + stop.signal
    except KeyboardInterrupt:
        return 130
    except (Diverged, WorkerDied) as error:
        return _fail(str(error), 1)
    except torch.OutOfMemoryError as error:
        advice = "lower --batch_size, raise --accumulate or use --precision bf16"
        return _fail(f"out of memory: {advice} ({str(error).splitlines()[0]})", 1)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _fail(where, 1 if error.errno in _DISK_FULL else 2)
    except ValueError as error:
        return _fail(str(error), 2)
    return 0


def _fail(message: str, status: int) -> int:
    if os.environ.get("SEGCAL_TRACEBACK") == "1":
        traceback.print_exc()
    where = f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print(f"segcal: error: {' '.join(message.split())}{where}", file=sys.stderr)
    return status


def _say(line: str) -> None:
    """Print, once however many processes there are."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _log_to_stderr() -> None:
    """Show what the library logs: notes from the first process, warnings from all."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("segcal: %(message)s"))
    logger = logging.getLogger("segcal")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
