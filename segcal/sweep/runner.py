"""Trains and evaluates the runs of a sweep; it can be stopped and continued at any time.

A training is known by its settings, not by the name of its folder: `Runs.identity` has all that it
learns from, with the folder of its data. The files of the data, with their sizes and times, are
kept in the folder of the run and compared before anything of it is used. An evaluation is stored
under a key of all that it depends on, and made again where the key is another.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import segcal
from segcal import settings
from segcal.data import DATASETS, DataConfig
from segcal.data import build as build_data
from segcal.data.splits import Splits, missing, shifted
from segcal.distributed import choose_device
from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.folder import place, store, stored
from segcal.evaluation.shifts import FORMAT
from segcal.files import atomic_write, one_line
from segcal.integrations.trackers import NAMES
from segcal.losses import hyper_names
from segcal.metrics.scores import SCORES
from segcal.sources.members import Members
from segcal.sources.network import RunSource
from segcal.sources.source import digest, file_digest
from segcal.sweep.definition import Changes, Method, Row, Training, shown
from segcal.training.checkpoint import BEST
from segcal.training.config import CONFIG, TrainConfig, header, load_config, recipe_path
from segcal.training.run import train_run
from segcal.training.trainer import LOG

if TYPE_CHECKING:
    from segcal.sweep.pools import Pool

RESAMPLES = 1000
DATA = "data.json"  # in the folder of a run: the fingerprint of its training and hold-out images
# Settings that say where and how fast a run is made, not what it learns.
_ELSEWHERE = ("out", "device", "workers", "save_every", *NAMES)
Scores = Mapping[str, float]
# The hold-out scores of the best epoch, or why there are none. Pooled runs have no epochs: {}.
Outcome = Scores | str


class Runs:
    """The runs of a sweep: their settings and folders, what they learned and what was measured.

    Args:
        root: the folder of the folders of new runs, and of all evaluations.
        data: the folder that stands in for data/ in the configs.
        elsewhere: folders with complete runs to reuse; nothing is written there.
        moved: where data was when runs were trained on it, by the folder where it is now; the same
            folder if only times have changed.
    """

    def __init__(
        self,
        root: Path,
        *,
        data: Path | None = None,
        device: str = "auto",
        elsewhere: Sequence[Path] = (),
        moved: Mapping[Path, Path] | None = None,
    ) -> None:
        self.root, self.data, self.device, self.moved = root, data, device, dict(moved or {})
        self._configs: dict[Training, TrainConfig] = {}
        self.known: dict[Training, Scores] = {}  # hold-out scores of the trained ones
        self.failures: dict[Training, str] = {}
        self.measured: dict[Training, Sequence[Method]] = {}  # what each is evaluated for
        self.found: dict[str, Path] = {}  # folders of runs by `identity`
        for top in (root, *elsewhere):
            for path in (top / CONFIG, *sorted(top.glob(f"*/{CONFIG}"))):
                try:
                    config = load_config(path)
                except (ValueError, FileNotFoundError):  # no run, or one of another version
                    continue
                if top == root or holdout_scores(path.parent, config) is not None:
                    self.found.setdefault(self.identity(config), path.parent)

    def identity(self, config: TrainConfig) -> str:
        """A digest of all settings that a run learns from, with the folder of its data."""
        stated = settings.to_dict(config)
        for name in _ELSEWHERE:
            del stated[name]
        del stated["data"]["download"]
        embedded = DATASETS[config.data.name].embedded
        stated["data"]["root"] = "" if embedded else str(self._earlier(config.data.root)[0])
        weights = config.model.encoder_weights
        stated["model"]["encoder_weights"] = weights and Path(weights).name
        return digest(stated)

    def _earlier(self, root: str) -> tuple[Path, bool]:
        """Where data was when runs were trained on it, and whether the user said so."""
        place = Path(root).resolve()
        for now, before in self.moved.items():
            if place.is_relative_to(now.resolve()):
                return before.resolve() / place.relative_to(now.resolve()), True
        return place, False

    def config(self, training: Training) -> TrainConfig:
        """The settings of a training; `out` is the folder of its run."""
        if training in self._configs:
            return self._configs[training]
        own = load_config(recipe_path(training.config))
        changes: dict[str, Any] = {**dict(training.changes), "seed": training.seeds[0]}
        if self.data is not None:  # in the configs, data/NAME is NAME in this folder
            weights = own.model.encoder_weights
            for name, place in (("data.root", own.data.root), ("model.encoder_weights", weights)):
                parts = Path(place or "").parts
                if parts[:1] == ("data",):
                    changes.setdefault(name, str(self.data.joinpath(*parts[1:])))
        hyper = hyper_names(changes["loss"]) - {"beta"}
        stated = {f"hyper.{k}" if k in hyper else k: v for k, v in changes.items()}
        layers = [("", settings.to_dict(own)), ("", {**stated, "device": self.device})]
        config = settings.read(TrainConfig, layers)
        key = self.identity(config)
        folder = self.found.get(key, self._own(training, key))
        self._configs[training] = replace(config, out=str(folder))
        return self._configs[training]

    def folder(self, training: Training) -> Path:
        """Where the evaluations of a training are, also if its run was found elsewhere."""
        keys = [self.identity(self.config(member)) for member in training.members]
        return self._own(training, keys[0] if len(keys) == 1 else digest(*keys))

    def _own(self, training: Training, key: str) -> Path:
        return self.root / f"{training.label}-{key[:8]}"

    def scores(self, training: Training) -> Scores | None:
        """The hold-out scores of the best epoch; None while the training is not complete."""
        if training not in self.known:
            config = self.config(training)
            found = holdout_scores(config.folder, config)
            if found is None:
                return None
            self.known[training] = found
        return self.known[training]

    def complete(self, training: Training) -> bool:
        """Whether a training, or each member of an ensemble, is complete."""
        return all(self.scores(member) is not None for member in training.members)

    def choice(self, method: Method) -> Changes | None:
        """The hyper-parameters that are best on the hold-out; None until all are trained.

        Equally good ones are told apart by their NLL. Candidates that failed do not count; if all
        did, there is no choice.
        """
        if len(method.grid) == 1:
            return method.grid[0]
        sign = 1 if SCORES[method.select].higher else -1
        ranks = {}
        for training, hyper in zip(method.candidates(), method.grid, strict=True):
            scores = self.scores(training)
            if scores is not None:
                ranks[hyper] = (sign * scores[method.select], -scores["nll"])
            elif training not in self.failures:
                return None
        return max(ranks, key=ranks.__getitem__) if ranks else None

    def chosen(self, method: Method) -> list[Training]:
        """The trainings that are reported, one per seed; none while there is no choice."""
        hyper = self.choice(method)
        return [] if hyper is None else [method.training(hyper, seed) for seed in method.seeds]

    def reported(self, row: Row) -> list[Training]:
        """What a row shows: the trainings of `chosen`, or these pooled."""
        hyper = self.choice(row.method)
        if row.ensemble and hyper is not None:
            return [row.method.training(hyper, *row.method.seeds)]
        return self.chosen(row.method)

    def do(self, training: Training, methods: Sequence[Method] = ()) -> Outcome:
        """Train a run, if it is not trained yet, and evaluate it for some methods.

        A KeyboardInterrupt comes after the run was saved.
        """
        try:
            for member in training.members:
                config = self.config(member)
                self.require_same_data(config)
                if holdout_scores(config.folder, config) is None:
                    train_run(config, resume=True)
            for method in methods:
                self._evaluate(training, method)
            return self.scores(training) or {} if len(training.seeds) == 1 else {}
        except (ValueError, ArithmeticError, RuntimeError, OSError) as error:
            return one_line(error) or type(error).__name__

    def weights_remark(self, method: Method) -> str:
        """Which epoch is evaluated, in a sentence for the tables."""
        config = self.config(method.candidates()[0])
        if config.eval_every >= config.epochs:
            return "The weights of the last epoch are evaluated."
        select = config.select
        return f"The weights of the epoch with the best {select} on the hold-out are evaluated."

    def lacks(self, config: str, *, fetch: bool = True) -> str | None:
        """Why a config cannot be trained: data or weights that are neither there nor `fetch`ed."""
        found = self.config(Training(config, (("loss", "nll"),)))
        weights = Path(found.model.encoder_weights or "")
        if len(weights.parts) > 1 and not weights.exists():
            return f"there is no file {weights}"
        return None if fetch and found.data.download else missing(found.data)

    def at_hand(self, config: str) -> bool:
        """Whether the data and weights of a config are on the disk."""
        return self.lacks(config, fetch=False) is None

    def require_data(self, methods: Sequence[Method]) -> None:
        """Raise a ValueError if data is missing, or is not what the runs were trained on."""
        for name in dict.fromkeys(method.config for method in methods):
            if (reason := self.lacks(name)) is not None:
                raise ValueError(f"{reason} (for {name})")
        for method in methods:
            for training in dict.fromkeys([*method.candidates(), *self.chosen(method)]):
                config = self.config(training)
                if (config.folder / DATA).is_file():
                    self.require_same_data(config)
            for shift in (*method.shifts, method.holdout):
                if shift is not None and shift.brings_images:
                    # Raises if they are missing or have other classes.
                    shifted(_splits(config.data), config.data, shift)

    def require_same_data(self, config: TrainConfig) -> None:
        """Note what a new run is trained on; raise a ValueError if that of an old one changed."""
        splits, path = _splits(config.data), config.folder / DATA
        now = digest(splits.train.fingerprint(), splits.holdout.fingerprint())
        if path.is_file():
            stated = self._earlier(config.data.root)[1]
            if not stated and json.loads(path.read_text(encoding="utf-8")) != now:
                raise ValueError(
                    f"the images in {config.data.root} are not those that the run in "
                    f"{config.folder} was trained on: remove its folder to train it again, or say "
                    f"--same-data {config.data.root} if only their times have changed"
                )
        elif config.folder.parent == self.root:
            config.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                json.dump(now, file)

    def _evaluate(self, training: Training, method: Method) -> None:
        """Evaluate a trained run, or several pooled, as far as no stored result still holds."""
        source = None
        for limit, keys in self._keys(training, method).items():
            open_ = {path: key for path, key in keys.items() if stored(path, key) is None}
            if not open_:
                continue
            if source is None:
                device = choose_device(self.device)
                folders = [self.config(member).folder for member in training.members]
                each = [RunSource(folder, device=device) for folder in folders]
                source = Members(each) if len(each) > 1 else each[0]
                source.group = method.group
            found = evaluate_source(
                source if limit is None else source.limited(limit),
                holdout=None if method.holdout is None else source.shifted(method.holdout),
                posthoc=method.posthoc,
                shifts=method.shifts if limit == method.limit else (),
                resamples=RESAMPLES,
                overlays="none",
            )
            for at, report in found.reports.items():
                name = place(*at) if isinstance(at, tuple) else place(at)
                path = self.evaluations(training, limit) / name
                if path in open_:
                    store(path, report, found.meters[at], {"key": open_[path]})

    def _keys(self, training: Training, method: Method) -> dict[int | None, dict[Path, str]]:
        """A digest of all that each evaluation depends on, by number of images and folder."""
        configs = [self.config(member) for member in training.members]
        config = configs[0]  # they differ in the seed alone
        splits = _splits(config.data)
        stated = settings.to_dict(config)
        network = {k: v for k, v in stated["model"].items() if k != "encoder_weights"}
        data = {k: v for k, v in stated["data"].items() if k not in ("root", "download")}
        weights = [file_digest(one.folder / BEST) for one in configs]
        run = (FORMAT, segcal.__version__, RESAMPLES, *weights, network, data, method.group)
        fitted_on = splits.holdout
        if method.holdout is not None:
            fitted_on = shifted(splits, config.data, method.holdout).test
        wanted = [(None, None), *((method.limit, shift) for shift in method.shifts)]
        keys: dict[int | None, dict[Path, str]] = {}
        for limit, shift in wanted:  # all clean images, and shifted ones up to the limit
            test = splits.test if shift is None else shifted(splits, config.data, shift).test
            images = digest(test.limited(limit).fingerprint(), fitted_on.fingerprint())
            for posthoc in method.posthoc:
                path = self.evaluations(training, limit) / place(posthoc, str(shift or ""))
                keys.setdefault(limit, {})[path] = digest(*run, images, str(shift), posthoc)
        return keys

    def evaluations(self, training: Training, limit: int | None) -> Path:
        """The folder of the evaluations with `limit` images."""
        return self.folder(training) / ("eval" if limit is None else f"eval-limit-{limit}")


def holdout_scores(folder: Path, config: TrainConfig) -> dict[str, float] | None:
    """The scores of the best epoch in the log of a run, and the seconds that all epochs took.

    None while the run is not complete: the log is written after the weights.
    """
    path = folder / LOG
    if not path.is_file():
        return None
    log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(log) < config.epochs:
        return None
    best = [record for record in log if record["best"]][-1]
    scores = {k.removeprefix("holdout/"): v for k, v in best.items() if k.startswith("holdout/")}
    return {**scores, "seconds": sum(record["seconds"] for record in log)}


@cache
def _splits(config: DataConfig) -> Splits:
    return build_data(config)


def work(
    methods: Iterable[Method],
    runs: Runs,
    pool: Pool,
    *,
    train: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> dict[Training, str]:
    """Train, choose and evaluate until nothing is left; the reason for each run that failed.

    `runs` note what was measured, and `say` is called with a line for each run that is done.
    Without `train`, only what is trained already is evaluated. A KeyboardInterrupt comes after
    every run under way was saved.
    """
    methods = list(dict.fromkeys(methods))
    under_way: dict[Training, list[Method]] = {}
    done, started = 0, time.monotonic()
    try:
        while True:
            left, _ = _left(methods, runs, train=train)
            ready = [training for training in left if training not in under_way]
            for training in ready[: pool.size - len(under_way)]:
                under_way[training] = left[training]
                pool.start(training, left[training])
            if not under_way:
                return runs.failures
            training, outcome = pool.wait()
            done += 1
            asked = under_way.pop(training)
            if isinstance(outcome, str):
                runs.failures[training] = outcome
                said = f"failed: {outcome}"
            else:
                runs.known[training], runs.measured[training] = outcome, asked
                scores = [(SCORES[name], outcome.get(name)) for name in ("accuracy", "ece")]
                texts = [f"{score.label} {score.brief(x)}" for score, x in scores if x is not None]
                said = f"hold-out {', '.join(texts)}" if texts else "evaluated"
            left, count = _left(methods, runs, train=train)
            later = _later(methods, runs)
            if left or later:
                seconds = (time.monotonic() - started) / done * (len(left) + later)
                said += f"; about {in_time(seconds)} left"
            say(f"[{count - len(left)}/{count + later}] {training.label}: {said}")
    except KeyboardInterrupt as stopped:
        pool.stop(getattr(stopped, "signal", SIGINT))
        raise


def _left(
    methods: Iterable[Method], runs: Runs, *, train: bool
) -> tuple[dict[Training, list[Method]], int]:
    """What of `_wanted` is left to do, and how much is wanted; not `train` leaves trainings out."""
    known = _wanted(methods, runs).items()
    wanted = {run: asked for run, asked in known if train or runs.complete(run)}
    left = {
        run: asked
        for run, asked in wanted.items()
        if run not in runs.failures
        and not (runs.complete(run) and asked == runs.measured.get(run, []))
    }
    return left, len(wanted)


def _wanted(methods: Iterable[Method], runs: Runs) -> dict[Training, list[Method]]:
    """What is known to be needed, and the methods that each is evaluated for.

    A candidate is evaluated for none. Pooled seeds are needed once they are trained.
    """
    found: dict[Training, list[Method]] = {}
    for method in methods:
        if len(method.grid) > 1:
            for training in method.candidates():
                found.setdefault(training, [])
        for row in method.rows():
            for training in runs.reported(row):
                if not row.ensemble or runs.complete(training):
                    asked = found.setdefault(training, [])
                    asked += [] if method in asked else [method]
    return found


def _later(methods: Iterable[Method], runs: Runs) -> int:
    """How many trainings wait for a choice of hyper-parameters."""
    return sum(len(method.seeds) - 1 for method in methods if runs.choice(method) is None)


def plan(methods: Iterable[Method], runs: Runs) -> list[str]:
    """Lines that say how many trainings there are and what is left, with their commands."""
    methods = list(dict.fromkeys(methods))
    wanted = [training for training in _wanted(methods, runs) if len(training.seeds) == 1]
    later = _later(methods, runs)
    done = [scores for training in wanted if (scores := runs.scores(training)) is not None]
    left = [training for training in wanted if runs.scores(training) is None]
    count = len(left) + later
    lines = [f"{len(wanted) + later} trainings, {len(done)} done"]
    if done and count:
        mean = sum(scores["seconds"] for scores in done) / len(done)
        lines.append(f"about {in_time(count * mean)} of training left, as the done ones took")
    elif count:
        for path in dict.fromkeys(recipe_path(training.config) for training in left):
            costs = [text for text in header(path) if text.startswith("cost: ")] or ["cost unknown"]
            lines.append(f"one training, by {path}: {costs[0].removeprefix('cost: ')}")
    for training in left:
        own = settings.to_dict(load_config(recipe_path(training.config)))
        stated = settings.differences(own, settings.to_dict(runs.config(training)))
        words = ["--config", str(recipe_path(training.config))]
        for name, value in stated.items():
            words += [f"--{name}", shown(value)]
        lines.append(shlex.join(["segcal", "train", *words, "--resume"]))
    return lines


def in_time(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
