"""Mutates valid inputs of every kind and sees that nothing worse than one line comes of them.

python -m tests.fuzz.run                       1,000 cases of each target
python -m tests.fuzz.run report --cases 50000  one target, for longer
python -m tests.fuzz.run names --draw          with pages and figures, about 2 s a case
python -m tests.fuzz.run state --guided        mutates further what reached new paths in segcal
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from segcal import CalibrationMeter, TemperatureScaling
from tests.fuzz.guard import Escaped, guarded
from tests.fuzz.mutate import mutated
from tests.fuzz.paths import Paths
from tests.fuzz.targets import TARGETS, draw_nothing

_REPORT_EVERY = 1000  # cases
_MOST_BYTES = 2**20  # of an input that is mutated further


def cases(name, count, seed, pool):
    """What is in the pool, then mutations of what is in it by then; the same for a seed."""
    yield from pool[:count]
    for number in range(min(len(pool), count), count):
        rng = random.Random(f"{name} {seed} {number}")
        yield mutated(rng, rng.choice(pool), TARGETS[name].kind)


def warm_up(name, folder):
    """Try a valid example unguarded: what is loaded late may look for libraries in its own way.

    The compiled meter is loaded for every dtype that a mutation may come to.
    """
    for dtype in (torch.float16, torch.float32, torch.float64):
        logits, labels = torch.arange(4, dtype=dtype).view(2, 2), torch.tensor([0, 1])
        CalibrationMeter(2).update(logits, labels)
        TemperatureScaling().fit([(logits, labels)])
    place = folder / "warm"
    place.mkdir()
    for example in TARGETS[name].examples(folder) if name == "adapters" else ():
        TARGETS[name].attempt(example, folder, place)  # each loads another framework
    TARGETS[name].attempt(TARGETS[name].examples(folder)[0], folder, place)
    shutil.rmtree(place)


def attempt(name, data, folder):
    """Try one case in a place of its own; `Escaped` says what it did that it must not."""
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with guarded(place):
        TARGETS[name].attempt(data, folder, place)


def main(arguments=None):
    """Run; the exit status is the number of defects, at most 100."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="draw figures and pages")
    parser.add_argument("--guided", action="store_true", help="keep inputs that reach new paths")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that show a defect")
    options = parser.parse_args(arguments)
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {unknown.pop()}; there are {', '.join(TARGETS)}")
    torch.set_num_threads(1)
    if not options.draw:
        draw_nothing()
    with tempfile.TemporaryDirectory(prefix="segcal-fuzz-") as folder:
        return min(
            sum(search(name, options, Path(folder)) for name in options.targets or TARGETS), 100
        )


def search(name, options, folder):
    """Try all cases of one target; how many kinds of defect were found."""
    warm_up(name, folder)
    started, found, count, paths = time.monotonic(), {}, 0, Paths()
    pool = TARGETS[name].examples(folder)

    def say():
        seconds = time.monotonic() - started
        kept = f", {len(paths)} paths, {len(pool)} inputs kept" if options.guided else ""
        print(f"{name}: {count} cases, {len(found)} defects, {seconds:.0f} s{kept}", flush=True)

    for data in cases(name, options.cases, options.seed, pool):
        count += 1
        try:
            with paths.followed() if options.guided else contextlib.nullcontext():
                attempt(name, data, folder)
        except Escaped as escape:
            kind = _kind(escape)
            if kind not in found:
                print(f"{name}: case {count}: {escape}\n    {kind}", flush=True)
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / f"{name}-{count}").write_bytes(data)
            found[kind] = found.get(kind, 0) + 1
        if paths.grew() and len(data) <= _MOST_BYTES and data not in pool:
            pool.append(data)
        if count % _REPORT_EVERY == 0:
            say()
    say()
    return len(found)


def _kind(escape):
    """Where an exception came from: the same place is the same defect."""
    trace = (escape.__cause__ or escape).__traceback__
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(frames[-6:]))


if __name__ == "__main__":
    sys.exit(main())
