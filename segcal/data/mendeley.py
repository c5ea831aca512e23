"""The chest X-rays of Mendeley V2: normal or pneumonia (Kermany et al. 2018)."""

from __future__ import annotations

from pathlib import Path

from segcal.data.folders import class_part
from segcal.data.options import DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, RawDataset

CLASS_NAMES = ("NORMAL", "PNEUMONIA")


def mendeley(config: DataConfig) -> RawDataset:
    """The official train and test folders; images are resized to 224x224, as for ImageNet."""
    folder = Path(config.root) / "chest_xray"
    for name in (f"{part}/{kind}" for part in ("train", "test") for kind in CLASS_NAMES):
        if not (folder / name).is_dir():
            raise ValueError(
                f"Expected chest X-rays (train and test with NORMAL and PNEUMONIA) in {folder}, "
                f"but it has no {name}; data/README.md says how to get them"
            )
    train, test = (class_part(folder / part, CLASS_NAMES) for part in ("train", "test"))
    return RawDataset(
        train=train,
        test=test,
        class_names=tuple(name.lower() for name in CLASS_NAMES),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )
