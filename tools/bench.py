"""Speed and memory as ratios against a named baseline, all measured in one run.

python tools/bench.py losses      each loss, forward + backward, against F.cross_entropy
python tools/bench.py posthoc     each scaler's fit, against gathering all logits and L-BFGS
python tools/bench.py train       the trainer's steps against a bare loop; the loader's speed
python tools/bench.py metrics     the meter against one softmax, numpy bincount and torchmetrics
python tools/bench.py scale       1,000 images of 1024×2048 through one meter: pixels/s, flat memory
"""

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = ("losses", "metrics", "posthoc", "scale", "train")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # `benchmarks` lives beside this file
    sys.path.insert(0, str(Path(__file__).parents[1]))  # works without an installed segcal too
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
