"""The data and networks behind each row of the paper, in full and at a small scale.

At full scale an experiment is the file of its name in configs/. At small scale a stand-in from
configs/small/ takes its place: the first in the list whose data is at hand. The last one of each
list needs nothing but scikit-learn's bundled digits, so every table runs on a bare machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from reproduction.grids import Scale

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Experiment:
    """A data set and network, of the paper or of our own tables.

    Attributes:
        title: as a table names it.
        needs: files below the data folder without which it cannot run; any one of them will do.
        stand_ins: names in `STAND_INS`, the preferred first.
        grids: by loss, the hyper-parameters to choose from instead of the paper's grids.
    """

    title: str
    needs: tuple[str, ...]
    stand_ins: tuple[str, ...]
    grids: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class StandIn:
    """A small experiment in place of one of the paper.

    Attributes:
        title: as a table names it.
        needs: see `Experiment`; empty if the data is bundled.
        shifts: its own change to the test data for a change that it cannot make.
    """

    title: str
    needs: tuple[str, ...] = ()
    shifts: Mapping[str, str] | None = None


STAND_INS = {
    "small/scenes": StandIn("scenes, small U-Net"),
    "small/digits_resnet8": StandIn(
        "digits, ResNet-8",
        shifts={
            "domain:art": "rotation:15",
            "domain:cartoon": "rotation:45",
            "domain:sketch": "rotation:75",
        },
    ),
    "small/digits_resnet14": StandIn("digits, ResNet-14"),
    "small/digits_imbalance10": StandIn("digits, imbalance 10, ResNet-8"),
    "small/digits_imbalance50": StandIn("digits, imbalance 50, ResNet-8"),
    "small/digits_imbalance100": StandIn("digits, imbalance 100, ResNet-8"),
    "small/cifar10_resnet8": StandIn("CIFAR-10 (1000 images), ResNet-8", ("cifar10_small",)),
    "small/mnist_resnet8": StandIn("MNIST (2000 images), ResNet-8", ("MNIST/raw",)),
    "small/pacs_resnet8": StandIn("PACS (420 images), ResNet-8", ("pacs_small",)),
    "small/tiny_imagenet_resnet8": StandIn(
        "Tiny-ImageNet (at most 2000 images), ResNet-8", ("tiny-imagenet-200",)
    ),
}

_CIFAR10, _CIFAR100 = ("cifar-10-batches-py",), ("cifar-100-python",)
_SVHN = ("train_32x32.mat",)

EXPERIMENTS = {
    "cifar10_resnet32": Experiment(
        "CIFAR-10, ResNet-32", _CIFAR10, ("small/cifar10_resnet8", "small/digits_resnet8")
    ),
    "cifar10_resnet56": Experiment("CIFAR-10, ResNet-56", _CIFAR10, ("small/digits_resnet14",)),
    "cifar100_resnet32": Experiment("CIFAR-100, ResNet-32", _CIFAR100, ("small/digits_resnet8",)),
    "cifar100_resnet56": Experiment("CIFAR-100, ResNet-56", _CIFAR100, ("small/digits_resnet14",)),
    "svhn_resnet20": Experiment(
        "SVHN, ResNet-20", _SVHN, ("small/mnist_resnet8", "small/digits_resnet8")
    ),
    "svhn_resnet56": Experiment("SVHN, ResNet-56", _SVHN, ("small/digits_resnet14",)),
    "mendeley_resnet50": Experiment(
        "Mendeley V2, ResNet-50", ("chest_xray",), ("small/digits_resnet8",)
    ),
    "tiny_imagenet_resnet34": Experiment(
        "Tiny-ImageNet, ResNet-34",
        ("tiny-imagenet-200",),
        ("small/tiny_imagenet_resnet8", "small/digits_resnet8"),
    ),
    "newsgroups_gpcnn": Experiment(
        "20 Newsgroups, global-pooling CNN", ("20news-bydate-train",), ("small/digits_resnet8",)
    ),
    "pacs_resnet18": Experiment(
        "PACS, ResNet-18", ("PACS",), ("small/pacs_resnet8", "small/digits_resnet8")
    ),
    "mnist_rotated_resnet20": Experiment(
        "Rotated MNIST, ResNet-20", ("MNIST/raw",), ("small/mnist_resnet8", "small/digits_resnet8")
    ),
    "voc2012_deeplabv3plus_xception65": Experiment(
        "PASCAL VOC 2012, DeepLabV3+ Xception65",
        ("VOCdevkit/VOC2012",),
        ("small/scenes",),
        grids={"fl": {"gamma": (3,)}, "fl+mdca": {"gamma": (3,)}},  # fixed by the paper
    ),
    "voc2012_half_deeplabv3plus_lite0": Experiment(
        "PASCAL VOC 2012 at half resolution (379 + 387 images), DeepLabV3+ EfficientNet-Lite0",
        ("voc2012_half",),
        ("small/scenes",),
    ),
    "cifar10_small_resnet20": Experiment(
        "CIFAR-10 (5000 + 2000 images), ResNet-20",
        ("cifar10_small",),
        ("small/digits_resnet8",),
    ),
} | {
    f"cifar10_imbalance{factor}_resnet32": Experiment(
        f"CIFAR-10, imbalance {factor}", _CIFAR10, (f"small/digits_imbalance{factor}",)
    )
    for factor in (10, 50, 100)
}


def at_hand(needs: tuple[str, ...], data: Path) -> bool:
    """Whether the files that an experiment needs are below `data`."""
    return not needs or any((data / path).exists() for path in needs)


def missing(config: str, data: Path) -> str | None:
    """What a config lacks to be run: its own file, or one below `data`; None if nothing.

    A config that downloads its data can be run.
    """
    path = CONFIGS / f"{config}.yaml"
    if not path.exists():
        return f"configs/{config}.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    needs = (STAND_INS.get(config) or EXPERIMENTS[config]).needs
    if not at_hand(needs, data) and not settings["data"].get("download"):
        return str(data / needs[0])
    weights = Path(settings.get("model", {}).get("encoder_weights") or "")
    local = data.joinpath(*weights.parts[1:])  # in place of data/
    return str(local) if weights.parts[:1] == ("data",) and not local.exists() else None


def config_name(experiment: str, scale: Scale, data: Path) -> str:
    """Name of the file in configs/ that `experiment` is trained from."""
    if scale == "full":
        return experiment
    names = EXPERIMENTS[experiment].stand_ins
    return next((name for name in names if at_hand(STAND_INS[name].needs, data)), names[-1])


def title(experiment: str, scale: Scale, data: Path) -> str:
    """What a table calls the experiment: at small scale, also what stood in for it."""
    full = EXPERIMENTS[experiment].title
    if scale == "full":
        return full
    return f"{full} (here: {stand_in_title(experiment, data)})"


def stand_in_title(experiment: str, data: Path) -> str:
    """What stands in for the experiment at small scale."""
    return STAND_INS[config_name(experiment, "small", data)].title
