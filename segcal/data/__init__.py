"""Data sets: the embedded scenes and digits, public benchmarks, and a user's own folders.

`build(DataConfig(name="voc2012", root="data"))` gives the training, hold-out and test samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segcal.data.options import DATASETS, DataConfig

if TYPE_CHECKING:
    from segcal.data.splits import Splits

__all__ = ["DATASETS", "DataConfig", "build"]


def build(config: DataConfig, *, seed: int = 0) -> Splits:
    """Read a data set; see `segcal.data.splits.build`."""
    from segcal.data import splits  # loads torch

    return splits.build(config, seed=seed)
