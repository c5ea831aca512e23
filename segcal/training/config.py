"""The settings of a training: one frozen dataclass, read from YAML and the command line.

This module loads torch only to check a loss, so that help and typing mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from segcal import settings
from segcal.data import options as data
from segcal.data.options import DataConfig
from segcal.files import read_yaml
from segcal.models import options as models
from segcal.models.options import ModelConfig

CONFIG = "config.yaml"  # in the folder of a run
RECIPES = Path(__file__).parents[1] / "recipes"  # configs/ of the repository, in a wheel its files
_RULES: dict[str, Callable[[float], bool]] = {
    "> 0": lambda value: 0 < value < math.inf,
    ">= 0": lambda value: 0 <= value < math.inf,
    ">= 1": lambda value: 1 <= value < math.inf,
}


def _expect(config: Any, prefix: str, rule: str, *names: str) -> None:
    """Raise a ValueError unless these options, where they are set, keep a rule of `_RULES`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not _RULES[rule](value):
            raise ValueError(f"Expected {prefix}{name} {rule}, but got {value}")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer.

    Attributes:
        name: sgd, adam or adamw.
        lr: Learning rate where the factor of the schedule is 1.
        encoder_lr: Learning rate of the model's encoder, a pretrained backbone; null is lr.
        momentum: Momentum of sgd.
        nesterov: Whether the momentum of sgd is Nesterov's.
        betas: Decay rates of the two running means of adam and adamw.
        weight_decay: L2 penalty (decoupled for adamw).
        clip: Largest norm of the gradient over all parameters; null is no clipping.
    """

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = 0.004
    encoder_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float | None = None

    def __post_init__(self) -> None:
        _expect(self, "optim.", "> 0", "lr", "encoder_lr", "clip")
        _expect(self, "optim.", ">= 0", "momentum", "weight_decay")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("Expected optim.momentum > 0 with optim.nesterov, but got 0")


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of the learning rate: a factor on the rates of the optimizer.

    The factor changes at every step, not at every epoch. The warm-up multiplies it.

    Attributes:
        name: poly, (1 - t)^power with t the finished fraction of the training; cosine,
            (1 + cos(pi t)) / 2; multistep, times decay at each milestone; or constant.
        power: Exponent of poly.
        milestones: Epochs of multistep; 80 means after 80 epochs.
        decay: Factor of multistep at each milestone.
        warmup: Epochs (2 or 0.5) over which the factor rises linearly from warmup_factor to 1;
            null is 2.5, but at most a tenth of the training.
        warmup_factor: Factor at the start of the warm-up.
    """

    name: Literal["poly", "cosine", "multistep", "constant"] = "cosine"
    power: float = 0.9
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    warmup: float | None = None
    warmup_factor: float = 0.04

    def __post_init__(self) -> None:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("Expected schedule.milestones for a multistep schedule, but got none")
        if self.name != "multistep" and self.milestones:
            raise ValueError(
                f"Expected schedule.name=multistep with schedule.milestones, but got {self.name}"
            )
        stones = list(self.milestones)
        if stones != sorted(set(stones)) or min(stones, default=1) < 1:
            raise ValueError(f"Expected rising schedule.milestones >= 1, but got {stones}")
        _expect(self, "schedule.", ">= 0", "power", "decay", "warmup")
        if not 0 <= self.warmup_factor <= 1:
            raise ValueError(
                f"Expected schedule.warmup_factor in 0..1, but got {self.warmup_factor}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training depends on. The defaults suit the embedded scenes.

    Attributes:
        loss: BASE, BASE+AUX or BASE+AUX+AUX…; --list-losses lists them.
        beta: Weight of AUX, or weights by name as in mdca=1,cp=0.1; null is the usual weight.
        hyper: Hyper-parameters of the loss by name, as in gamma=3,sample=64. Each is an option of
            its own too: --gamma 3.
        class_weights: Factors of the base loss, one per class; null is all 1.
        data: What to train on.
        model: What to train.
        device: auto, cpu, cuda, cuda:1 or mps.
        out: Folder of the run; null is runs/DATA-MODEL-LOSS.
        epochs: Passes over the training data.
        batch_size: Samples of one optimizer step, over all processes and micro-batches together,
            so that a config means the same on one GPU and on eight.
        accumulate: Micro-batches that a process splits its share of a batch into, to save memory;
            means over pixels are still over the whole batch, but batch statistics (batch
            normalisation, dice, mdca, dca, mmce, ace, dece) are over a micro-batch.
        mixup: Mix the images of a batch in pairs, and their losses likewise, with a weight sampled
            from Beta(mixup, mixup), such as 0.2; null is no mixup.
        optim: The optimizer.
        schedule: The schedule of the learning rate.
        precision: fp32, or automatic mixed precision with bf16 or fp16.
        channels_last: Store images channels-last, which is faster for most convolutions on GPUs.
        compile: Compile the model with torch.compile.
        ema: Decay of an exponential moving average of the weights; the averaged weights are
            then evaluated and saved as best; null is no average.
        sync_bn: Compute batch normalisation over the samples of all processes (GPUs only).
        workers: Processes that load data, for each training process.
        seed: Seed of the initial weights, the order of the data, augmentation and dropout.
        deterministic: Use deterministic algorithms on GPUs, which are slower; CPUs always do.
        eval_every: Epochs between evaluations on the hold-out.
        save_every: Steps between checkpoints, in addition to the one after each epoch.
        select: Hold-out score that decides which epoch is best: accuracy, miou, nll, ece or sce.
        tensorboard: Log scores and the reliability diagram of the hold-out for TensorBoard too.
        wandb: The same for Weights & Biases.
        mlflow: The same for MLflow.
    """

    loss: str = "fl+mdca"
    beta: float | dict[str, float] | None = None
    hyper: dict[str, bool | int | float] = field(default_factory=dict)
    class_weights: tuple[float, ...] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    epochs: int = 8
    batch_size: int = 16
    accumulate: int = 1
    mixup: float | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = False
    ema: float | None = None
    sync_bn: bool = True
    workers: int = 2
    seed: int = 0
    deterministic: bool = False
    eval_every: int = 1
    save_every: int | None = None
    select: Literal["accuracy", "miou", "nll", "ece", "sce"] = "accuracy"
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    device: str = "auto"
    out: str | None = None

    def __post_init__(self) -> None:
        _expect(self, "", ">= 1", "epochs", "batch_size", "accumulate", "eval_every", "save_every")
        _expect(self, "", ">= 0", "workers", "seed")
        _expect(self, "", "> 0", "mixup")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"Expected ema between 0 and 1, but got {self.ema}")
        if self.model.freeze and self.model.encoder_weights is None:
            raise ValueError("model.freeze: there are no weights to keep without encoder_weights")
        if isinstance(self.beta, dict):
            object.__setattr__(self, "beta", {k.lower(): v for k, v in self.beta.items()})
        from segcal.losses import build_loss  # loads torch

        hyper: dict[str, Any] = dict(self.hyper)
        build_loss(self.loss, beta=self.beta, **hyper)  # raises if a value does not fit

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        if self.out is not None:
            return Path(self.out)
        name = f"{self.data.name}-{self.model.name}-{self.loss.lower()}"
        return Path("runs") / re.sub(r"[^\w.+-]+", "-", name)


def parse_train(arguments: Sequence[str], prog: str = "segcal train") -> tuple[TrainConfig, bool]:
    """The settings that a command line asks for, and whether to resume.

    The command line overrides the files of --config, wherever they stand. A resumed run without
    --config uses its own settings. --help, --list and --list-losses print and exit.

    Raises:
        ValueError: in one line, which option or file is wrong and what was expected.
    """
    printed = {"--help": help_text, "-h": help_text, "--list": list_recipes}
    for asked, text in {**printed, "--list-losses": list_losses}.items():
        if asked in arguments:
            print(text(prog))
            raise SystemExit(0)
    flags = settings.read_flags(arguments)
    stated = {name: value for name, value in flags if name != "config"}
    files = [recipe_path(value) for name, value in flags if name == "config"]
    resume = settings.convert(stated.pop("resume", False), bool, "--resume")
    if "multilabel" in stated:
        stated["data.multilabel"] = stated.pop("multilabel")
    if resume and not files and "out" in stated and (Path(stated["out"]) / CONFIG).exists():
        files = [Path(stated["out"]) / CONFIG]
    layers = [(f"{path}: ", _read(path)) for path in files]
    return settings.read(TrainConfig, [*layers, ("--", _with_hyper(stated))]), resume


def load_config(path: Path) -> TrainConfig:
    """The settings in a YAML file, such as the config.yaml of a run."""
    return settings.build(TrainConfig, _read(path), f"{path}: ")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        near = difflib.get_close_matches(path.stem, recipes(), 1)
        hint = f"; is it the recipe {near[0]}?" if near else ""
        raise FileNotFoundError(f"Expected a YAML file at {path}, but there is none{hint}")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected options (key: value), but got {values!r:.60}")
    return _with_hyper(values)


def _with_hyper(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the numbers of unknown names, such as gamma, among the hyper-parameters."""
    known = [option.name for option in fields(TrainConfig)]
    leaves = [option.name.rpartition(".")[2] for option in settings.options(TrainConfig)]

    def is_hyper(name: str, value: Any) -> bool:
        if name in (*known, *leaves) or "." in name:
            return False
        if difflib.get_close_matches(name, known, 1, cutoff=0.8):  # mistyped
            return False
        try:
            settings.convert(value, bool | int | float, name)
        except ValueError:
            return False
        return True

    return {
        f"hyper.{name}" if is_hyper(str(name), value) else str(name): value
        for name, value in values.items()
        if name in known or value is not None
    }


def recipes() -> dict[str, Path]:
    """The files that come with segcal, by name: "scenes", "small/scenes"."""
    return {
        path.relative_to(RECIPES).with_suffix("").as_posix(): path
        for pattern in ("*.yaml", "small/*.yaml")
        for path in sorted(RECIPES.glob(pattern))
    }


def recipe_path(config: str) -> Path:
    """The file that --config names: a path, or else a recipe."""
    if Path(config).exists():
        return Path(config)
    return recipes().get(config, Path(config))


def help_text(prog: str) -> str:
    """What `segcal train --help` prints: every option."""
    more = {}
    for option in settings.options(TrainConfig):
        group, _, name = option.name.rpartition(".")
        takers = {"data": data.takers, "model": models.takers}.get(group)
        if takers is not None and name != "name" and (who := takers(name)):
            more[option.name] = f"For {who}."
    more["data.name"] = f"One of {settings.list_entries(data.DATASETS)}."
    more["model.name"] = f"One of {settings.list_entries(models.MODELS)}."
    return f"""usage: {prog} [--config FILE] [--OPTION VALUE ...] [--resume]

Train a network. With no option at all: {TrainConfig.loss} on embedded data.

  --config  YAML file of options, or the name of a recipe; the command line overrides it.
  --resume  Continue the run in --out, with its own settings; start it if there is none.
  --list    Print the recipes that --config knows by name, with their cost and result, and exit.
  --help    Print this, and exit.
  --list-losses
            Print the losses with their hyper-parameters, and exit.
  --multilabel
            The same as --data.multilabel true.

{settings.help_text(TrainConfig, more)}"""


def list_recipes(prog: str) -> str:
    """What `segcal train --list` prints: the recipes, each with its cost and result."""
    lines = []
    for name, path in recipes().items():
        lines.append(name)
        for part in header(path):
            lines.append(textwrap.fill(part, 100, initial_indent="  ", subsequent_indent="    "))
        lines.append("")
    return "\n".join([*lines, f"train one: {prog} --config NAME --loss fl+mdca"])


def header(path: Path) -> list[str]:
    """The sentences "cost: …" and "expected: …" of the comments that a config opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    parts: list[str] = []
    for line in takewhile(lambda line: line[:1] in ("#", ""), lines):
        text = line.removeprefix("#")
        if text.startswith("  ") and parts:  # goes on
            parts[-1] += f" {text.strip()}"
        else:
            parts.append(text.strip())
    return [part for part in parts if re.match("cost|expected", part)]


def list_losses(prog: str) -> str:
    """What `segcal train --list-losses` prints: every loss with its hyper-parameters."""
    from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES  # loads torch

    lines = ["BASE, BASE+AUX or BASE+AUX+AUX…, as in --loss fl+mdca --gamma 3 --beta 1", ""]
    for name, loss in {**BASE_LOSSES, **AUXILIARY_LOSSES}.items():
        kind = f"AUX, beta {loss.beta:g}" if name in AUXILIARY_LOSSES else "BASE"
        lines.append(f"  {name:8}{kind:16}{loss.about}")
        hyper = {key: value for key, value in loss.hyper.items() if key != "seed"}
        lines += [f"{'':26}--{key} {value}" for key, value in hyper.items()]
    return "\n".join(lines)
