"""Sweeps: grids of trainings with choices on the hold-out, their evaluations and their tables."""
