"""Data sets: the embedded scenes and digits, public benchmarks, and a user's own folders."""

from segcal.data.build import DATASETS, Splits, build_data
from segcal.data.options import DataConfig

__all__ = ["DATASETS", "DataConfig", "Splits", "build_data"]
