"""Runs the `segcal` command as `python -m segcal`, also where no script is installed."""

from segcal.cli import leave, main

if __name__ == "__main__":
    leave(main(prog="python -m segcal"))
