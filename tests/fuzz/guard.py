"""What no input may bring about: code run, files written elsewhere, a hang, an odd exception."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

# No case takes a second of the processor's time; by the clock, a busy machine may stretch it.
LIMITS = {
    signal.SIGPROF: (signal.ITIMER_PROF, 20),
    signal.SIGALRM: (signal.ITIMER_REAL, 600),
}
_RUNS_CODE = {
    "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "subprocess.Popen",
    "pickle.find_class", "socket.connect", "ctypes.dlopen", "urllib.Request",
}  # fmt: skip
_WRITES = {
    "open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod",
    "os.truncate", "shutil.rmtree", "shutil.move", "shutil.copyfile",
}  # fmt: skip
_TWO = ("os.rename", "os.link", "os.symlink")  # name two places
_HARMLESS = ("/dev/null", "/proc/", "/sys/")
_watched: list[Path] = []  # the folder that the case under way may write to


class Escaped(BaseException):
    """Not an Exception, so that nothing catches it on its way."""


def _watch(event, args):
    if not _watched:
        return
    if event in _RUNS_CODE:
        raise Escaped(f"{event} {args!r:.200}")
    if event in _WRITES and (event != "open" or _writes(args)):
        first, last = (1, 2) if event == "shutil.copyfile" else (0, 2 if event in _TWO else 1)
        paths = args[first:last]
        for path in paths:
            inside = isinstance(args[-1], int) and args[-1] > 2  # relative to an open folder
            if isinstance(path, (str, bytes, os.PathLike)) and not (inside and event != "open"):
                place = os.path.abspath(os.fsdecode(path))
                allowed = str(_watched[0])
                if place != allowed and not place.startswith((allowed + os.sep, *_HARMLESS)):
                    raise Escaped(f"{event} {args!r:.200}")


def _writes(args):
    _, mode, flags = args
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


sys.addaudithook(_watch)  # cannot be taken away again: it looks only while something is watched


@contextlib.contextmanager
def guarded(folder):
    """Raise `Escaped` for anything but a result, a ValueError or an OSError, soon, in `folder`."""

    def late(number, _):
        raise Escaped(f"no end after {LIMITS[number][1]} s")

    usual = {number: signal.signal(number, late) for number in LIMITS}
    for timer, seconds in LIMITS.values():
        signal.setitimer(timer, seconds)
    _watched.append(Path(os.path.abspath(folder)))
    try:
        yield
    except (ValueError, OSError) as error:
        if not str(error).strip():
            raise Escaped("an error without a word") from error
    except Exception as error:
        raise Escaped(f"{type(error).__name__}: {error}") from error
    finally:
        _watched.clear()
        for number, (timer, _) in LIMITS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, usual[number])


def command(*arguments):
    """`segcal …`, which must end with 0, or with 1 or 2 and one line."""
    from segcal.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    said = err.getvalue()
    errors = [line for line in said.splitlines() if line.startswith("segcal: error: ")]
    if status not in (0, 1, 2) or len(errors) != (status != 0) or "Traceback" in said:
        raise Escaped(f"status {status}, and said {said!r:.500}")
    return status
