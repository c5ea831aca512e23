"""Which steps from line to line segcal has taken, to find inputs that reach something new."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import segcal

_ROOT = str(Path(segcal.__file__).parent)


class Paths:
    """The steps (code, line before, line) inside segcal while it was followed."""

    def __init__(self):
        self._steps, self._seen = set(), 0

    def __len__(self):
        return len(self._steps)

    def grew(self):
        """Whether there are new steps since this was last asked."""
        before, self._seen = self._seen, len(self._steps)
        return self._seen > before

    @contextlib.contextmanager
    def followed(self):
        """Take note of the steps inside the block."""
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return None
        before = 0

        def line(frame, event, _):
            nonlocal before
            if event == "line":
                self._steps.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line
