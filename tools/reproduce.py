"""Reproduces the tables and figures of the paper.

python tools/reproduce.py --list                       what there is, what is done, what is missing
python tools/reproduce.py main --scale small           a CPU-sized version of the main table
python tools/reproduce.py segmentation --seeds 3       a table as the paper has it

Each run has a folder of its own. The same command continues where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # `reproduction` lives beside this file
    sys.path.insert(0, str(Path(__file__).parents[1]))  # works without an installed segcal too
    from reproduction.command import reproduce

    sys.exit(reproduce(__doc__, sys.argv[1:]))
