"""Reproduces the tables and figures of the paper.

python tools/reproduce.py --list                       all tables and figures, done or missing
python tools/reproduce.py main --scale small           a CPU-sized version of the main table
python tools/reproduce.py segmentation --seeds 3       a table of the paper, in full

Each run has its own folder. The same command continues after a stop.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # `reproduction` lives beside this file
    sys.path.insert(0, str(Path(__file__).parents[1]))  # works without an installed segcal too
    from reproduction.command import reproduce

    sys.exit(reproduce(__doc__, sys.argv[1:]))
