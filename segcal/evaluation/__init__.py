"""Evaluation: predictions of networks and files, their reports, post-hoc fits and results."""
