"""Runs the `segcal` command as `python -m segcal`, also where no script is installed."""

import sys

from segcal.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m segcal"))
