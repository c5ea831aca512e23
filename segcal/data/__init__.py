"""Data sets: the embedded scenes and digits, public benchmarks, and a user's own folders."""

from segcal.data.build import Splits, build_data
from segcal.data.options import DataConfig
from segcal.data.registry import DATASETS

__all__ = ["DATASETS", "DataConfig", "Splits", "build_data"]
