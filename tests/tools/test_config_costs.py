"""What the configs say of their cost is what is counted."""

import re

import pytest
from reproduction import cost, paper

from segcal.training.config import load_config
from tests.support import ROOT

CONFIGS = ROOT / "configs"
NAMES = sorted({w.experiment for table in paper.tables().values() for w in table.wants()})


def test_flops_of_resnet32():
    """By hand, multiplications and additions of the convolutions; backward costs as much twice."""
    macs, inside = 3 * 9 * 16 * 32**2, 16
    first = macs
    for width, side in ((16, 32), (32, 16), (64, 8)):
        macs += (9 * inside * width + 9 * 9 * width**2) * side**2
        macs += inside * width * side**2 if inside != width else 0
        inside = width
    macs += 64 * 10
    per_image = 2 * (3 * macs - first)  # no gradient of the image itself
    config = load_config(CONFIGS / "cifar10_resnet32.yaml")
    assert cost.training_flops(config) == per_image * 45000 * 160


@pytest.mark.parametrize("name", NAMES)
def test_configs_open_with_command_cost_and_the_papers_numbers(name):
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    epochs = load_config(CONFIGS / f"{name}.yaml").epochs
    assert lines[0] == f"# python tools/train_seg.py --config configs/{name}.yaml --loss fl+mdca"
    assert re.fullmatch(
        rf"# cost: {epochs} epochs, \S+ FLOP \(counted\); on one GPU that sustains 3e12 FLOP/s "
        r"\d+ (minutes|hours), an estimate\.",
        lines[1],
    )
    assert "The paper, " in "".join(line for line in lines if line.startswith("#"))


@pytest.mark.parametrize(  # of each kind of data one: counting takes seconds
    "name",
    ["cifar10_imbalance50_resnet32", "mnist_rotated_resnet20", "pacs_resnet18", "newsgroups_gpcnn"],
)
def test_stated_costs_are_those_counted(name):
    path = CONFIGS / f"{name}.yaml"
    assert f"# cost: {cost.cost_in_words(load_config(path))}\n" in path.read_text(encoding="utf-8")


def test_frozen_parts_go_forward_only():
    frozen = cost.training_flops(load_config(CONFIGS / "mendeley_resnet50.yaml"))
    forward = 2 * 4.1e9 * 4709 * 30  # He et al. 2016 count 3.8e9 multiply-adds for 50 layers
    assert 0.9 * forward < frozen < 1.1 * forward
