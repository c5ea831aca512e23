"""Learning rates by hand-computed numbers; parameter groups."""

import math

import pytest
import torch
from torch import nn

from segcal.training.config import OptimConfig, ScheduleConfig
from segcal.training.step import build_optimizer, lr_factor


def factors(schedule, steps, *, total, per_epoch):
    return [lr_factor(schedule, step, total=total, per_epoch=per_epoch) for step in steps]


def test_poly():
    got = factors(
        ScheduleConfig(name="poly", power=0.9, warmup=0), [0, 50, 99], total=100, per_epoch=10
    )
    assert got == pytest.approx([1.0, 0.5358867, 0.0158489], abs=1e-6)  # 1, 0.5^0.9, 0.01^0.9


def test_cosine():
    got = factors(ScheduleConfig(name="cosine", warmup=0), [0, 25, 50, 75], total=100, per_epoch=10)
    half = math.sqrt(0.5)
    assert got == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])


def test_multistep_drops_after_so_many_epochs():
    schedule = ScheduleConfig(name="multistep", milestones=(2, 4), decay=0.1, warmup=0)
    got = factors(schedule, [0, 19, 20, 39, 40, 59], total=60, per_epoch=10)
    assert got == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_warmup_rises_linearly_and_multiplies():
    schedule = ScheduleConfig(name="constant", warmup=0.5, warmup_factor=0.2)
    got = factors(schedule, [0, 1, 2, 3, 4, 5], total=100, per_epoch=8)  # 4 steps of warm-up
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    poly = ScheduleConfig(name="poly", power=1.0, warmup=1, warmup_factor=0.5)
    assert factors(poly, [5], total=20, per_epoch=10) == pytest.approx([0.75 * 0.75])


def test_the_usual_warmup_is_at_most_a_tenth_of_the_training():
    schedule = ScheduleConfig(name="constant", warmup_factor=0.2)
    short = factors(schedule, range(12), total=100, per_epoch=25)  # 4 epochs
    assert short == pytest.approx([0.2 + 0.08 * min(step, 10) for step in range(12)])
    long = factors(schedule, range(300), total=10_000, per_epoch=100)
    assert [step for step, factor in enumerate(long) if factor < 1] == list(range(250))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_encoder_has_its_own_rate(name):
    model = nn.Module()
    model.encoder, model.decoder = nn.Linear(3, 2), nn.Linear(2, 5)
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.5, encoder_lr=0.1))
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert {rate[id(p)] for p in model.encoder.parameters()} == {0.1}
    assert {rate[id(p)] for p in model.decoder.parameters()} == {0.5}
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.1, 0.5]


def test_encoder_rate_without_encoder():
    with pytest.raises(ValueError, match=r"no encoder"):
        build_optimizer(nn.Linear(2, 2), OptimConfig(encoder_lr=0.1))


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    optimizer = build_optimizer(model, OptimConfig())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 2
    with pytest.raises(ValueError, match=r"parameters to train"):
        build_optimizer(model.requires_grad_(False), OptimConfig())


def test_sgd_step_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    config = OptimConfig(name="sgd", lr=0.1, momentum=0.5, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()  # gradient 1
        optimizer.step()
    # v1 = 1 + 0.1·2 = 1.2, w1 = 1.88; v2 = 0.5·1.2 + 1 + 0.1·1.88 = 1.788, w2 = 1.7012
    assert model.weight.item() == pytest.approx(1.7012)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OptimConfig(lr=0),
        lambda: OptimConfig(lr=float("nan")),
        lambda: OptimConfig(clip=-1),
        lambda: OptimConfig(weight_decay=-1e-4),
        lambda: OptimConfig(name="sgd", momentum=0, nesterov=True),
        lambda: ScheduleConfig(name="multistep"),
        lambda: ScheduleConfig(name="poly", milestones=(3,)),
        lambda: ScheduleConfig(name="multistep", milestones=(5, 3)),
        lambda: ScheduleConfig(name="multistep", milestones=(0, 3)),
        lambda: ScheduleConfig(warmup=-1),
        lambda: ScheduleConfig(warmup_factor=2),
    ],
)
def test_options_out_of_range(make):
    with pytest.raises(ValueError, match=r"^Expected .*(optim|schedule).* but got"):
        make()
