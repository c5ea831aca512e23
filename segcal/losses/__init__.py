"""Losses for training, by name: BASE or BASE+AUX+…, exact on pixels and over ranks."""

from segcal.losses.auxiliary import AUXILIARY_LOSSES
from segcal.losses.base import BASE_LOSSES
from segcal.losses.criterion import (
    Criterion,
    Term,
    all_terms,
    build_loss,
    hyper_names,
    parse_spec,
    term,
)

__all__ = [
    "AUXILIARY_LOSSES",
    "BASE_LOSSES",
    "Criterion",
    "Term",
    "all_terms",
    "build_loss",
    "hyper_names",
    "parse_spec",
    "term",
]
