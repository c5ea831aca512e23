"""Hostile inputs by the thousand; `python -m tests.fuzz.run --help` says how."""
