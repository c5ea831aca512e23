"""Data sets: the embedded scenes and digits, public benchmarks, and a user's own folders."""

from segcal.data.build import DATASETS, DataConfig, Splits, build_data

__all__ = ["DATASETS", "DataConfig", "Splits", "build_data"]
