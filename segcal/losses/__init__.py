"""Losses for training, by name: BASE or BASE+AUX+…, exact on pixels and over ranks."""

from segcal.losses.criterion import (
    AUXILIARY_LOSSES,
    BASE_LOSSES,
    Criterion,
    Loss,
    build_loss,
    describe,
    hyper_names,
    parse_spec,
)

__all__ = [
    "AUXILIARY_LOSSES",
    "BASE_LOSSES",
    "Criterion",
    "Loss",
    "build_loss",
    "describe",
    "hyper_names",
    "parse_spec",
]
