"""The steps of the trainer against a plain PyTorch loop, and the speed of the loader."""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measure import print_ratios, time_and_memory
from segcal.data import build as build_data
from segcal.data.samples import Batch, Batches
from segcal.losses import Criterion, build_loss
from segcal.models import build as build_model
from segcal.training.config import TrainConfig, parse_train
from segcal.training.log import Progress
from segcal.training.order import EpochOrder
from segcal.training.run import seed_torch
from segcal.training.step import build_optimizer
from segcal.training.trainer import Trainer

_BASELINE = "plain loop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--config", default="configs/scenes.yaml", help="YAML file of the training to measure"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of one measurement")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each loop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--option", nargs="*", default=[], help="options of segcal train, as --optim.lr=1"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the tables."""
    config, _ = parse_train(["--config", arguments.config, *arguments.option])
    config = replace(config, epochs=10_000)  # the schedule must not end before the measurement
    seed_torch(config.seed)
    data = build_data(config.data, seed=config.seed)
    model = build_model(config.model, num_classes=data.num_classes)
    order = EpochOrder(
        len(data.train), batch_size=config.batch_size, epochs=config.epochs, seed=config.seed
    )
    loader = Batches(data.train, workers=0, pin=False, batch_sampler=order)
    batches = [
        (images.to(arguments.device), labels.to(arguments.device))
        for images, labels in itertools.islice(loader, min(arguments.steps, 8))
    ]
    criterion = _loss(config, data.ignore_index)
    trainer = Trainer(copy.deepcopy(model), criterion, data, config, device=arguments.device)
    work = {
        _BASELINE: plain_loop(model.to(arguments.device), config, batches, arguments),
        "trainer": steps_of(trainer, batches, arguments),
    }
    print(
        f"{arguments.steps} steps of {config.model.name} with {config.loss} on batches of "
        f"{config.batch_size} in memory, {arguments.device}, {torch.get_num_threads()} threads\n"
    )
    rows = time_and_memory(work, arguments.repeats, arguments.device)
    print_ratios(rows)
    used = arguments.steps * config.batch_size / rows[1].seconds
    print(f"\nthe steps use {used:.0f} images/s; the loader provides")
    for workers in (0, 1, 2):
        stream = iter(Batches(data.train, workers=workers, pin=False, batch_sampler=order))
        print(f"  {images_per_second(stream, config):.0f} images/s with {workers} workers")


def _loss(config: TrainConfig, ignore_index: int | None = None) -> Criterion:
    hyper: dict[str, Any] = dict(config.hyper)
    return build_loss(config.loss, ignore_index=ignore_index, beta=config.beta, **hyper)


def plain_loop(
    model: torch.nn.Module, config: TrainConfig, batches: list[Batch], arguments: argparse.Namespace
) -> Callable[[], None]:
    """A loop as written by hand: no log, schedule, checks or checkpoints."""
    criterion = _loss(config)
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(memory_format=layout).train()
    optimizer = build_optimizer(model, config.optim)

    def once() -> None:
        for images, labels in itertools.islice(itertools.cycle(batches), arguments.steps):
            loss = criterion(model(images.to(memory_format=layout)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return once


def steps_of(
    trainer: Trainer, batches: list[Batch], arguments: argparse.Namespace
) -> Callable[[], None]:
    """The loop of the trainer on the same batches."""
    stream = itertools.cycle(batches)
    progress = Progress(1, 0, batch_size=1, shown=False)

    def once() -> None:
        trainer.advance(stream, trainer.learner.steps + arguments.steps, progress)

    return once


def images_per_second(stream: Iterator[Batch], config: TrainConfig) -> float:
    """The speed of the loader alone, after its workers have started."""
    next(stream)
    start = time.perf_counter()
    count = sum(1 for _ in itertools.islice(stream, 20))
    return count * config.batch_size / (time.perf_counter() - start)
