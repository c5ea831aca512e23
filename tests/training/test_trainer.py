"""The trainer against a loop written out, and its logs, selection, averages and alarms."""

import copy
import json
import math
import statistics
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import segcal
from segcal.metrics.scores import LOGGED, SCORES
from segcal.training import checkpoint
from segcal.training.config import OptimConfig, ScheduleConfig, TrainConfig
from segcal.training.log import Diverged
from segcal.training.order import permutation
from segcal.training.run import seed_torch
from segcal.training.step import lr_factor, mixed_share, partners
from segcal.training.trainer import best_record
from tests.support.tiny import OPTIONS, Patches, Uneven, network, steady_network, trainer


def batches(epochs=3, size=36, batch_size=8):
    data = Patches(size)
    for epoch in range(epochs):
        order = permutation(size, 0, epoch)
        for start in range(0, size - batch_size + 1, batch_size):
            items = [data[epoch, i] for i in order[start : start + batch_size]]
            yield torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def test_equals_a_bare_loop_bit_for_bit():
    seed_torch(0)
    model = network()
    criterion = segcal.build_loss("fl+mdca")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses = []
    for step, (images, labels) in enumerate(batches()):
        factor = lr_factor(OPTIONS.schedule, step, total=12, per_epoch=4)
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = trainer()
    history = run.fit()
    assert same_weights(run.learner.model.state_dict(), model.state_dict())
    means = [sum(losses[i : i + 4]) / 4 for i in (0, 4, 8)]
    assert [record["train/loss"] for record in history] == pytest.approx(means, rel=1e-6)
    assert [record["step"] for record in history] == [4, 8, 12]
    assert history[-1]["lr"] == pytest.approx(0.1 * (1 / 12) ** 0.9)


def test_it_learns():
    history = trainer(epochs=15, model=steady_network).fit()
    assert history[-1]["train/loss"] < 0.5 * history[0]["train/loss"]
    assert history[-1]["holdout/accuracy"] > 0.8


class Tokens(Patches):
    """Text: numbers of words, which have no mean."""

    def __getitem__(self, key):
        image, label = super().__getitem__(key)
        return image.long(), label


# Those that are means over pixels; the others are statistics of a micro-batch.
PIXEL_MEANS = ["nll", "ls", "fl", "flsd", "dual", "brier", "svls", "nll+cp", "nll+mbls", "nll+nacl"]


@pytest.mark.parametrize(
    ("spec", "options"),
    [*((spec, {}) for spec in PIXEL_MEANS[::2]), (PIXEL_MEANS[1], {"mixup": 0.4})],
    ids=str,
)
def test_micro_batches_add_up_to_the_batch_whatever_is_labelled(spec, options):
    whole, parts = (
        trainer(
            accumulate=accumulate,
            loss=spec,
            model=steady_network,
            train=Uneven(),
            epochs=1,
            **options,
        )
        for accumulate in (1, 4)
    )
    one, other = whole.fit(), parts.fit()
    assert one[0]["train/loss"] == pytest.approx(other[0]["train/loss"], rel=1e-5)
    pairs = (t.learner.model.parameters() for t in (whole, parts))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_micro_batches_follow_class_weights():
    weighted = segcal.build_loss("nll", ignore_index=255, weight=[0.1, 1.0, 5.0])
    weights = []
    for count in (1, 4):
        run = trainer(model=steady_network)
        run.learner.criterion = weighted
        images, labels = next(batches())
        run.learner.step(list(zip(images.chunk(count), labels.chunk(count), strict=True)), 1.0)
        weights.append(run.learner.model.state_dict()["4.weight"].clone())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mdca", "dca"])
def test_batch_statistics_of_micro_batches_are_those_of_each_and_no_smaller(name):
    """|Σ gaps| ≤ Σ |gaps|: what differs between micro-batches does not cancel."""
    images, labels = next(batches())
    run = trainer(loss=f"nll+{name}", model=steady_network)
    criterion, model = run.learner.criterion, copy.deepcopy(run.learner.model)
    micro = list(zip(images.chunk(4), labels.chunk(4), strict=True))
    with torch.no_grad():
        whole = criterion.terms(model(images), labels)
        parts = [criterion.terms(model(x), y)[name] for x, y in micro]
        masses = torch.stack([criterion.mass(y) for _, y in micro])
    expected = float((torch.stack(parts) * masses / masses.sum()).sum())
    accumulated = run.learner.step(micro, 1.0)
    assert float(accumulated["nll"]) == pytest.approx(float(whole["nll"]), rel=1e-5)
    assert float(accumulated[name]) == pytest.approx(expected, rel=1e-5)
    assert expected >= float(whole[name]) - 1e-6
    assert name == "dca" or expected > float(whole[name]) + 1e-4


@pytest.mark.parametrize("spec", ["nll+mdca", "dicece+ace"])
def test_a_micro_batch_without_labels_does_not_change_the_step(spec):
    images, labels = next(batches())
    steps = []
    for empty in (False, True):
        run = trainer(loss=spec, model=steady_network)
        micro = [(images[:4], labels[:4]), (images[4:], labels[4:])]
        if empty:
            micro.insert(1, (images[4:], torch.full_like(labels[4:], 255)))
        terms = run.learner.step(micro, 1.0)
        steps.append((terms["loss"], run.learner.model.state_dict()["4.weight"].clone()))
    torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-7)


def test_mixup_mixes_images_and_losses_in_pairs():
    """One step against the formula, each mask with its own ignored pixels."""
    run = trainer(loss="fl+mdca", model=steady_network, mixup=0.4)
    model, criterion = copy.deepcopy(run.learner.model), segcal.build_loss("fl+mdca")
    images, labels = next(batches())
    share = mixed_share(0.4, 0, 0)
    terms = run.learner.step([(images, labels)], 1.0)
    partner = [1, 0, 3, 2, 5, 4, 7, 6]
    logits = model(share * images + (1 - share) * images[partner])
    loss = share * criterion(logits, labels) + (1 - share) * criterion(logits, labels[partner])
    assert 0 < share < 1 and (labels != labels[partner]).any()
    assert float(terms["loss"]) == pytest.approx(float(loss.detach()), abs=1e-6)
    assert terms.keys() == {"fl", "mdca", "loss"}


def test_mixup_draws_a_share_from_beta_at_every_step():
    shares = [mixed_share(0.5, 0, step) for step in range(2000)]
    # The variance of Beta(a, a) is 1 / (4 (2 a + 1)).
    assert statistics.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert statistics.variance(shares) == pytest.approx(1 / 8, abs=0.01)
    assert mixed_share(0.5, 0, 7) == shares[7] and mixed_share(0.5, 1, 0) != shares[0]


def test_mixup_of_an_odd_number_leaves_the_last_alone():
    assert partners(5, torch.device("cpu")).tolist() == [1, 0, 3, 2, 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 4, "accumulate": 4}, "micro-batches of 2 samples or more"),
        ({"train": Tokens()}, "Expected images to mix with mixup, but got torch.int64"),
    ],
)
def test_mixup_says_what_it_cannot_mix(changes, says):
    with pytest.raises(ValueError, match=says):
        trainer(mixup=0.2, **changes).fit()


def test_gradients_are_clipped():
    run = trainer(
        optim=OptimConfig(name="sgd", lr=1.0, momentum=0, weight_decay=0, clip=0.01), epochs=1
    )
    before = [p.clone() for p in run.learner.model.parameters()]
    images, labels = next(batches())
    run.learner.step([(images, labels)], 1.0)
    change = [a - b for a, b in zip(run.learner.model.parameters(), before, strict=True)]
    norm = math.sqrt(sum(c.square().sum().item() for c in change))
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_average_of_weights_by_its_formula():
    run = trainer(ema=0.5)
    name = "0.weight"
    average = run.learner.model.state_dict()[name].clone()
    for step, batch in enumerate(batches(epochs=1), 1):
        run.learner.step([batch], 1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * run.learner.model.state_dict()[name]
    assert run.learner.evaluated is run.learner.ema
    torch.testing.assert_close(run.learner.evaluated.state_dict()[name], average)
    tracked = run.learner.evaluated.state_dict()["1.num_batches_tracked"]
    assert tracked == 4  # a count is copied, not averaged


def test_log_and_best_checkpoint_agree(tmp_path):
    run = trainer(tmp_path, epochs=5, optim=OptimConfig(name="sgd", lr=0.5))
    history = run.fit()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == history and [line["epoch"] for line in lines] == [1, 2, 3, 4, 5]
    terms = {f"train/{name}" for name in ("fl", "mdca", "loss")}
    scores = {f"holdout/{name}" for name in ("nll", "accuracy", "miou", "ece", "sce")}
    assert terms | scores | {"epoch", "step", "lr", "seconds", "best"} == set(lines[0])
    best = checkpoint.read_checkpoint(tmp_path / "best.pt")
    assert best["record"] == max(history, key=lambda r: r["holdout/accuracy"])
    model = network()
    model.load_state_dict(best["model"])
    loader = torch.utils.data.DataLoader(Patches(14, seed=1), batch_size=8)
    report = segcal.evaluate(model, loader, num_classes=3, progress=False)
    assert report.accuracy == best["record"]["holdout/accuracy"]
    assert report.ece == pytest.approx(best["record"]["holdout/ece"])


@pytest.mark.parametrize(("select", "epoch"), [("accuracy", 2), ("nll", 3), ("ece", 1)])
def test_selection_knows_which_way_is_better(select, epoch):
    values = {"accuracy": [0.5, 0.9, 0.9], "nll": [0.3, 0.2, 0.1], "ece": [0.0, 0.1, 0.0]}
    history = [
        {"epoch": n + 1, **{f"holdout/{name}": v[n] for name, v in values.items()}}
        for n in range(3)
    ]
    assert best_record([{"epoch": 0}, *history], select)["epoch"] == epoch  # the first of equals


def test_evaluation_can_be_rarer_but_never_misses_the_end(tmp_path):
    history = trainer(tmp_path, epochs=5, eval_every=2).fit()
    assert [r["epoch"] for r in history if "holdout/nll" in r] == [2, 4, 5]
    assert checkpoint.read_checkpoint(tmp_path / "best.pt")["record"]["epoch"] in (2, 4, 5)


def test_what_can_be_selected_is_logged():
    choices = get_args(get_type_hints(TrainConfig)["select"])
    assert set(choices) == {score.name for score in LOGGED}
    assert all(SCORES[name].better != "neither" for name in choices)


def test_select_must_exist_for_the_task():
    class Images(Patches):
        def __getitem__(self, key):
            image, label = super().__getitem__(key)
            return image, label[0, 0]

    with pytest.raises(ValueError, match=r"accuracy, nll, ece, sce, but got miou"):
        trainer(holdout=Images(), select="miou")


class Bomb(nn.Module):
    """A layer whose output is not finite from call `fuse` on."""

    def __init__(self, fuse, value):
        super().__init__()
        self.calls, self.fuse, self.value = 0, fuse, value

    def forward(self, x):
        self.calls += self.training
        return x * (self.value if self.calls >= self.fuse else 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, value):
    run = trainer(tmp_path, model=lambda: nn.Sequential(network(), Bomb(7, value)))
    with pytest.raises(Diverged, match=r"loss term '(fl|mdca)' is no longer finite at step 7"):
        run.fit()
    state = checkpoint.read_checkpoint(
        tmp_path / "last.pt"
    )  # the end of the first epoch, untouched
    assert state["learner"]["steps"] == 4
    assert all(w.isfinite().all() for w in state["model"].values())


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """A gradient may be NaN where the loss is not; then the weights are, a step later."""
    run = trainer(tmp_path, epochs=1)
    last = run.learner.model[-1].bias
    last.register_hook(lambda g: g * (math.nan if run.learner.steps == 3 else 1.0))
    with pytest.raises(Diverged, match=r"weights are no longer finite after step 4"):
        run.fit()
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_near(precision):
    exact = trainer(model=steady_network).fit()[-1]["train/loss"]
    mixed = trainer(model=steady_network, precision=precision).fit()[-1]["train/loss"]
    assert mixed == pytest.approx(exact, rel=0.1) and mixed != exact


def test_channels_last_and_compile_change_nothing_but_speed(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: compile_(m, backend="eager"))
    plain = trainer(model=steady_network, epochs=1).fit()
    other = trainer(model=steady_network, epochs=1, channels_last=True, compile=True).fit()
    assert other[0]["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=1e-4)


def test_workers_change_nothing():
    alone = trainer()
    alone.fit()
    helped = trainer(workers=2)
    helped.fit()
    assert same_weights(alone.learner.model.state_dict(), helped.learner.model.state_dict())


def test_the_seed_changes_everything():
    one, other = trainer(seed=1).fit(), trainer(seed=2).fit()
    assert one[0]["train/loss"] != other[0]["train/loss"]


def test_rates_of_the_schedule_reach_the_optimiser():
    seen = []
    run = trainer(schedule=ScheduleConfig(name="multistep", milestones=(1, 2), warmup=0))
    step = run.learner.optimizer.step
    run.learner.optimizer.step = lambda: (
        seen.append(run.learner.optimizer.param_groups[0]["lr"]),
        step(),
    )
    run.fit()
    assert seen == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 4)
