"""The `segcal` command: runs the given subcommand, and turns errors into one line.

`segcal --help` and the help of every command but train need no torch: a command is imported to run.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from segcal.commands.options import (
    parse_compare,
    parse_eval,
    parse_export,
    parse_merge,
    parse_report,
    parse_sweep,
    spell,
)

Command = Callable[[Sequence[str], str], int | None]  # the exit status, if it is not 0

# What torch.distributed says when another process is gone.
_LOST_PEER = re.compile(
    r"[Cc]onnection (closed|reset|refused)|gloo|NCCL|TCPStore|failed to (connect|recv)"
    r"|Broken pipe|Socket"
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _collect_less() -> None:
    """Collect garbage less often.

    Imports and figures make millions of objects that stay; to scan all of them again and again
    takes a tenth of the time of a short command.
    """
    gc.set_threshold(100_000, 20, 100)


def train_command(arguments: Sequence[str], prog: str) -> None:
    """Train a network for segmentation or classification."""
    if "--list" in arguments:
        from segcal.commands.train import list_recipes

        list_recipes()
        return
    from segcal.training.config import parse_train

    config, resume = parse_train(spell(arguments, "_"), prog)
    from segcal.commands.train import train

    train(config, resume, prog)


def eval_command(arguments: Sequence[str], prog: str) -> None:
    """Evaluate runs, or predictions that any framework saved."""
    options = parse_eval(arguments, prog)
    _collect_less()
    if options.predictions:  # threads of torch that wait busily hinder those that read and count
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from segcal.commands.evaluate import evaluate_inputs

    evaluate_inputs(options)


def report_command(arguments: Sequence[str], prog: str) -> None:
    """Write pages, tables and figures again from reports, without a network."""
    options = parse_report(arguments, prog)
    _collect_less()
    from segcal.commands.report import rewrite_pages

    rewrite_pages(options)


def merge_command(arguments: Sequence[str], prog: str) -> None:
    """Add up the states of evaluations of parts of a data set."""
    options = parse_merge(arguments, prog)
    from segcal.commands.merge import merge_states

    merge_states(options)


def compare_command(arguments: Sequence[str], prog: str) -> None:
    """Compare models on the same images, with intervals of the differences."""
    options = parse_compare(arguments, prog)
    from segcal.commands.compare import compare_states

    compare_states(options)


def export_command(arguments: Sequence[str], prog: str) -> None:
    """Export a network that outputs calibrated probabilities, as .pt2 or .onnx."""
    options = parse_export(arguments, prog)
    from segcal.commands.export import export_run

    export_run(options)


def sweep_command(arguments: Sequence[str], prog: str) -> int:
    """Train and evaluate a grid of methods and seeds, and write its tables."""
    options = parse_sweep(arguments, prog)
    from segcal.commands.sweep import run_sweeps

    return run_sweeps(options, arguments, prog)


# A new command is one function (arguments, prog) and one line here; its docstring is its help.
COMMANDS: dict[str, Command] = {
    "train": train_command,
    "eval": eval_command,
    "report": report_command,
    "merge": merge_command,
    "compare": compare_command,
    "export": export_command,
    "sweep": sweep_command,
}
# What to change when memory runs out, in the options of the commands that run a network.
SAVE_MEMORY: dict[Command, str] = {
    train_command: "lower --batch_size, raise --accumulate or use --precision bf16",
    eval_command: "lower --batch-size or use --device cpu",
    export_command: "lower --batch-size or use --device cpu",
}


def main(arguments: Sequence[str] | None = None, *, prog: str = "segcal") -> int:
    """Run one of `COMMANDS` and return the exit status; `arguments` are sys.argv's by default."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        return run_command(_list_commands, (), prog)
    name, *rest = arguments
    if name not in COMMANDS:
        return _fail(f"Expected a command ({', '.join(COMMANDS)}), but got {name}", 2)
    return run_command(COMMANDS[name], rest, f"{prog} {name}")


def _list_commands(_: Sequence[str], prog: str) -> None:
    print(f"usage: {prog} COMMAND [--help] …\n")
    for name, command in COMMANDS.items():
        print(f"  {name:9}{command.__doc__}")


def script() -> NoReturn:
    """What the installed `segcal` runs."""
    leave(main())


def leave(status: int) -> NoReturn:
    """End this process at once: to free all that torch has loaded takes Python a second."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(status)


def run_command(command: Command, arguments: Sequence[str], prog: str) -> int:
    """Call a command and return the exit status.

    0: all is well; 1: it failed through no fault of the input; 2: the input is wrong;
    128 + n: stopped by signal n. SEGCAL_TRACEBACK=1 in the environment shows where an error arose.
    """
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):  # the path of a result may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command(arguments, prog) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        ours = isinstance(error, ChildProcessError) or error.errno in _DISK_FULL
        return _fail(where, 1 if ours else 2)
    except ValueError as error:
        return _fail(str(error), 2)
    except Exception as error:
        return _stopped(error, SAVE_MEMORY.get(command, "it needs more than there is"))


def _nobody_reads() -> bool:
    """Whether the program that reads what is printed has ended, as head does; the rest is lost."""
    looking = select.poll()
    looking.register(sys.stdout, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in looking.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _stopped(error: Exception, save_memory: str) -> int:
    """The exit status for what stops a command without being wrong input; bugs are raised again."""
    # Not at the top of the file: whatever raised such an error has loaded torch already.
    from torch import OutOfMemoryError

    from segcal.data.samples import WorkerDied
    from segcal.training.log import Diverged
    from segcal.training.signals import Interrupted

    if isinstance(error, Interrupted):
        return 128 + error.signal
    if isinstance(error, (Diverged, WorkerDied)):
        return _fail(str(error), 1)
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        detail = str(error).partition("\n")[0]
        return _fail(f"out of memory: {save_memory}" + (f" ({detail})" if detail else ""), 1)
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        detail = str(error).partition("\n")[0]
        return _fail(f"another process of this run ended; its own error says why ({detail})", 1)
    raise error


def _fail(message: str, status: int) -> int:
    if os.environ.get("SEGCAL_TRACEBACK") == "1":
        traceback.print_exc()
    where = f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print(f"segcal: error: {' '.join(message.split())}{where}", file=sys.stderr)
    return status


def _log_to_stderr() -> None:
    """Show what the library logs: notes from the first process, warnings from all."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("segcal: %(message)s"))
    logger = logging.getLogger("segcal")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
