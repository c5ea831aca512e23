"""The `segcal` command: runs a subcommand, and turns errors into one line and an exit status.

A file of `segcal.commands` defines a subcommand: its docstring is the help, `add_arguments` the
options, `run` the work. These files import torch and all that needs it only when they run.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import segcal
from segcal.commands.options import Parser

# A new command is one file in segcal/commands and one name here.
COMMANDS = ("train", "eval", "apply", "report", "merge", "compare", "export", "sweep")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None, *, command: str = "", prog: str = "segcal") -> int:
    """Run one of `COMMANDS` and return the exit status.

    0: all is well; 1: it failed through no fault of the input; 2: the input is wrong; 3: a score or
    the images broke a condition that was asked for; 128 + n: signal n stopped it.

    Args:
        arguments: what was typed; by default what this process was started with.
        command: the command, if it is not the first of the arguments.
        prog: what was typed before the arguments, for the help.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    words = [word for word in typed if word != "--traceback"]
    _prepare_streams()
    try:
        status = _run(words, command, prog)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as stopped:  # also training's Interrupted, which knows its signal
        return 128 + int(getattr(stopped, "signal", signal.SIGINT))
    except BrokenPipeError:  # the program that reads our output has ended, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python flushes it at the end)
        return 128 + signal.SIGPIPE
    except Exception as error:
        message, status = _explain(error)
        if len(words) < len(typed):
            traceback.print_exc()
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        where = f" (process {os.environ.get('RANK', '0')})" if several else ""
        print(f"segcal: error: {' '.join(message.split())}{where}", file=sys.stderr)
        return status


def _run(words: Sequence[str], name: str, prog: str) -> int:
    modules = {known: import_module(f"segcal.commands.{known}") for known in COMMANDS}
    if not name and words[:1] == ["--version"]:
        print(f"segcal {segcal.__version__}")
        return 0
    if not name and words and words[0] not in ("-h", "--help"):
        name, *words = words
        prog = f"{prog} {name}"
    if not name:
        print(f"usage: {prog} COMMAND [--help] …\n")
        for known, module in modules.items():
            print(f"  {known:9}{(module.__doc__ or '').partition(chr(10))[0]}")
        print("\nWith --traceback, an error also shows where it arose.")
        return 0
    if name not in modules:
        raise ValueError(f"there is no command {name}: choose one of {', '.join(COMMANDS)}")
    module = modules[name]
    if name == "train":  # its options are the fields of its settings, which read themselves
        return module.run(words, prog) or 0
    parser = Parser(prog, module.__doc__ or "")
    module.add_arguments(parser)
    options = parser.parse(words)
    if getattr(options, "units", "paper") == "percent":
        from segcal.metrics.scores import in_percent

        with in_percent():
            return module.run(options) or 0
    return module.run(options) or 0


def _explain(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit status. An error that only a bug makes is raised."""
    if isinstance(error, ValueError):
        return str(error), 2
    if isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        ours = isinstance(error, ChildProcessError) or error.errno in _DISK_FULL
        return text, 1 if ours else 2
    if isinstance(error, ArithmeticError):  # a training whose loss is no longer finite
        return str(error), 1
    kind, detail = type(error).__name__, str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":  # torch's, without torch
        advice = "use a smaller --batch-size, or --device cpu"
        return f"out of memory: {advice}" + (f" ({detail})" if detail else ""), 1
    lost = kind in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo" in detail
    if isinstance(error, RuntimeError) and lost:
        return f"another process of this run ended; its own error says why ({detail})", 1
    raise error


def _prepare_streams() -> None:
    """Show what the library logs: notes from the first process, warnings from all."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the path of a result may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("segcal: %(message)s"))
    logger = logging.getLogger("segcal")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
