"""Measures speed and memory as ratios to a named baseline, all in one run.

python tools/bench.py losses      each loss, forward + backward, against F.cross_entropy
python tools/bench.py posthoc     the fit of each calibrator, against L-BFGS on all logits in memory
python tools/bench.py train       the trainer against a plain PyTorch loop; the speed of the loader
python tools/bench.py metrics     the meter against one softmax, numpy, torchmetrics and others
python tools/bench.py objects     the objects of an image against labelling its components
python tools/bench.py eval        `segcal eval` on saved predictions: import, read, count, draw
python tools/bench.py scale       1,000 images of 1024×2048 through one meter: pixels/s and memory
python tools/bench.py members     members pooled, against their forwards alone: time and memory
python tools/bench.py volumes     `segcal eval` on saved volumes of 128³: seconds and memory
python tools/bench.py page P.html a report page in Chromium: size, and time until it is interactive
"""

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = (
    "eval",
    "losses",
    "members",
    "metrics",
    "objects",
    "page",
    "posthoc",
    "scale",
    "train",
    "volumes",
)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # `benchmarks` lives beside this file
    sys.path.insert(0, str(Path(__file__).parents[1]))  # works without installation
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    arguments.run(arguments)
