"""All the paper's losses, exact on pixels and over ranks."""

from segcal.losses.auxiliary import AUXILIARY_LOSSES, dca, mdca, mmce
from segcal.losses.base import BASE_LOSSES, brier, fl, flsd, ls, nll
from segcal.losses.criterion import Criterion, build_loss, hyper_names, parse_spec

__all__ = [
    "AUXILIARY_LOSSES",
    "BASE_LOSSES",
    "Criterion",
    "brier",
    "build_loss",
    "dca",
    "fl",
    "flsd",
    "hyper_names",
    "ls",
    "mdca",
    "mmce",
    "nll",
    "parse_spec",
]
