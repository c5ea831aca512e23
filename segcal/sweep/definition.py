"""A sweep as a YAML file defines it: what to train, how to choose, what to evaluate and show.

Each method has a small grid of hyper-parameters. The first seed tries all of it; the best on the
hold-out is reported, and the other seeds take its choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from segcal.data.shift import Shift, parse_shifts
from segcal.files import read_yaml
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss, hyper_names, parse_spec
from segcal.metrics.scores import LOGGED, SCORES
from segcal.posthoc import NONE, method_names
from segcal.settings import build, convert
from segcal.training.config import RECIPES
from segcal.viz.tables import distinct_names

Changes = tuple[tuple[str, Any], ...]  # (dotted name, value) of settings
_MAX_SEEDS = 1000


@dataclass(frozen=True)
class Training:
    """One training: a config, and the settings that replace some of its own."""

    config: str  # a YAML file, or the name of a recipe
    changes: Changes  # the loss, its hyper-parameters, other settings, the seed

    @property
    def label(self) -> str:
        """What it is called: small_scenes-fl-gamma3-seed0."""
        path = Path(self.config)
        words = [path.stem if path.suffix == ".yaml" else self.config]
        for name, value in self.changes:
            words.append(("" if name == "loss" else name) + shown(value))
        return "-".join(re.sub(r"[^\w.+=-]+", "_", word) for word in words)

    @property
    def members(self) -> tuple[Training, ...]:
        """Itself alone; see `Ensemble`."""
        return (self,)


@dataclass(frozen=True)
class Ensemble:
    """The trainings of all seeds of a method, whose predictions are pooled."""

    members: tuple[Training, ...]

    @property
    def label(self) -> str:
        """What it is called: small_scenes-fl-gamma3-seeds0_1_2."""
        label, _, first = self.members[0].label.rpartition("-seed")
        others = (member.label.rpartition("-seed")[2] for member in self.members[1:])
        return f"{label}-seeds{'_'.join([first, *others])}"


Evaluated = Training | Ensemble  # what a row of the tables shows


@dataclass(frozen=True)
class Method:
    """A method of a sweep, as one line of its file states it.

    Attributes:
        name: what tables call it.
        loss: the training loss.
        hyper: the values to choose from, by the name of a hyper-parameter.
        seeds: one training per seed.
        posthoc: short names of the calibrators it is evaluated with.
        shifts: the shifts of the test images it is evaluated under.
        limit: how many images are evaluated under shift; None for all.
        select: the score on the hold-out that chooses hyper-parameters.
        options: settings of this method alone.
        ensemble: whether the mean of the predictions of its seeds is evaluated too.
        holdout: the images that calibrators are fitted on, as a shift data:ROOT; by default the
            hold-out of the training.
        group: a regular expression; images in whose names it finds the same text are one unit of
            the intervals.
    """

    name: str
    loss: str
    hyper: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    seeds: tuple[int, ...] = (0,)
    posthoc: tuple[str, ...] = (NONE,)
    shifts: tuple[Shift, ...] = ()
    limit: int | None = None
    select: str = "accuracy"
    options: Changes = ()
    ensemble: bool = False
    holdout: Shift | None = None
    group: str = ""

    def rows(self) -> list[tuple[str, str, bool]]:
        """Name, post-hoc method, and whether seeds are pooled, of each row of the tables."""
        pooled = (False, True) if self.ensemble and len(self.seeds) > 1 else (False,)
        return [
            (f"{self.name}{' ensemble' * ensemble} / {posthoc}", posthoc, ensemble)
            for ensemble in pooled
            for posthoc in self.posthoc
        ]


@dataclass(frozen=True)
class Tuning:
    """The trainings of a method with one config, of which the best on the hold-out is reported."""

    method: Method
    config: str
    grid: tuple[Changes, ...] = ((),)  # hyper-parameters to choose from
    options: Changes = ()

    def candidates(self) -> list[Training]:
        """The trainings, all of the first seed, that the hyper-parameters are chosen by."""
        return [self.training(hyper, self.method.seeds[0]) for hyper in self.grid]

    def training(self, hyper: Changes, seed: int) -> Training:
        """The training with these hyper-parameters."""
        loss = ("loss", self.method.loss)
        return Training(self.config, (loss, *hyper, *self.options, ("seed", seed)))


class Row(NamedTuple):
    """A row of the tables: a method, or its seeds pooled, after one calibrator."""

    name: str
    tuning: Tuning
    posthoc: str
    ensemble: bool


class Variation(NamedTuple):
    """What the trainings of one table share: a config, and values of the settings that vary."""

    config: str
    options: Changes = ()
    title: str = ""  # what tells it from the others


@dataclass(frozen=True)
class Sweep:
    """A grid of trainings and what its tables show.

    The fields are the keys of its file, which docs/sweeps.md describes; `name` is that of the
    files it writes.
    """

    config: tuple[str, ...]
    methods: tuple[Any, ...]  # of `Method`, in which the keys of the sweep are filled in
    title: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, Any] = field(default_factory=dict)
    seeds: int | tuple[int, ...] = 1
    select: str = "accuracy"
    posthoc: tuple[str, ...] = (NONE,)
    shift: Any = ()
    ensemble: bool = False
    limit: int | None = None
    holdout: str | None = None
    group: str = ""
    grid: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: tuple[str, ...] = ("accuracy", "miou", "ece", "sce")
    compare: tuple[tuple[str, str], ...] = ()
    draw: tuple[str, ...] = ()
    by_shift: tuple[str, ...] = ()
    by_class: tuple[str, ...] = ()
    name: str = ""

    def variations(self) -> list[Variation]:
        """Each config with each combination of the values of `vary`."""
        configs = list(dict.fromkeys(self.config))
        names = [Path(each).stem if each.endswith(".yaml") else each for each in configs]
        if len(set(names)) < len(names):
            names = distinct_names(configs)
        found = []
        for config, name in zip(configs, names, strict=True):
            for options in combinations(_flat(self.vary)):
                words = [f"{key} {shown(value)}" for key, value in options]
                title = ", ".join([*[name] * (len(configs) > 1), *words])
                found.append(Variation(config, options, title))
        return found

    def tunings(self, variation: Variation | None = None) -> list[Tuning]:
        """What is to be trained and evaluated, in one variation or in all."""
        found = []
        for config, varied, _ in self.variations() if variation is None else [variation]:
            for method in self.methods:
                options = {**dict(_flat(self.options)), **dict(method.options)}
                hyper = dict(method.hyper)
                for name, value in varied:
                    if name in hyper_names(method.loss):
                        hyper[name] = (value,)
                    else:
                        options[name] = value
                grid = combinations(sorted(hyper.items()))
                found.append(Tuning(method, config, grid, tuple(options.items())))
        return found

    def rows(self, variation: Variation) -> list[Row]:
        """The rows of a variation."""
        return [
            Row(name, tuning, posthoc, ensemble)
            for tuning in self.tunings(variation)
            for name, posthoc, ensemble in tuning.method.rows()
        ]

    def shifts(self) -> list[Shift]:
        """The shifts of all methods, in order."""
        return list(dict.fromkeys(shift for method in self.methods for shift in method.shifts))

    def changed(self, *, seeds: int | None = None, tune: bool = True) -> Sweep:
        """The same with the seeds 0 to `seeds` - 1, or without choosing: first values alone."""
        methods = self.methods
        if seeds is not None:
            methods = tuple(replace(m, seeds=tuple(range(seeds))) for m in methods)
        if not tune:
            methods = tuple(
                replace(m, hyper=tuple((name, values[:1]) for name, values in m.hyper))
                for m in methods
            )
        return replace(self, methods=methods)


def read_sweep(
    name: str | Path, *, small: bool = False, at_hand: Callable[[str], bool] = lambda config: True
) -> Sweep:
    """The sweep that a YAML file defines.

    Args:
        name: the YAML file, or the name of a sweep that comes with segcal.
        small: take what the file says under `small` in place of its own keys.
        at_hand: whether the data of a config is there. The first small version whose data is there
            is taken, or else the last.

    Raises:
        ValueError: in one line, what is wrong with it.
    """
    path = Path(name)
    ours = RECIPES / "sweeps" / f"{name}.yaml"
    if not path.exists() and ours.exists():
        path = ours
    if not path.is_file():
        raise FileNotFoundError(f"there is no sweep {name}: neither a file nor one of segcal's")
    stated = read_yaml(path)
    if not isinstance(stated, dict):
        raise ValueError(f"{path}: expected a sweep (key: value), but got {stated!r:.60}")
    versions = _listed(stated.pop("small", []))
    sweep = _sweep({"title": path.stem, **stated, "name": path.stem}, path)
    renamed = {"title": f"{sweep.title}, small version", "name": f"{path.stem}_small"}
    smaller = []
    for changes in versions:
        if not isinstance(changes, dict):
            raise ValueError(f"{path}: small: expected keys of a sweep, but got {changes!r:.60}")
        smaller.append(_sweep({**stated, **renamed, **versions[0], **changes}, path))
    if not small:
        return sweep
    if not smaller:
        raise ValueError(f"{path} has no small version: it needs the key small")
    return next((one for one in smaller if all(map(at_hand, one.config))), smaller[-1])


def _sweep(stated: Mapping[str, Any], path: Path) -> Sweep:
    sweep = build(Sweep, stated, f"{path}: ")
    try:
        methods = tuple(_method(line, sweep) for line in sweep.methods)
        scores = [name for name, score in SCORES.items() if score.scope != "classes"]
        of_classes = [name for name, score in SCORES.items() if score.scope == "classes"]
        _expect("scores", sweep.scores, scores)
        _expect("by_shift", sweep.by_shift, scores)
        _expect("by_class", sweep.by_class, of_classes)
        _expect("grid", sweep.grid, [*BASE_LOSSES, *AUXILIARY_LOSSES])
        if not (sweep.config and methods):
            raise ValueError("config and methods must not be empty")
        if sweep.limit is not None and sweep.limit < 1:
            raise ValueError(f"limit: expected at least 1, but got {sweep.limit}")
        rows = [name for method in methods for name, _, _ in method.rows()]
        if twice := [row for row in rows if rows.count(row) > 1]:
            raise ValueError(f"two methods are called {twice[0]}: give one of them another name")
        _expect("compare", [name for pair in sweep.compare for name in pair], rows)
        _expect("draw", sweep.draw, rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    beside = [path.parent / config for config in sweep.config]  # a path is relative to the file
    near = zip(beside, sweep.config, strict=True)
    config = tuple(str(file) if file.is_file() else name for file, name in near)
    return replace(sweep, config=config, methods=methods)


def _method(line: Any, sweep: Sweep) -> Method:
    """A method, with the keys of the sweep in place of those that it does not state."""
    stated = {"loss": line} if isinstance(line, str) else line
    if not isinstance(stated, dict) or "loss" not in stated:
        raise ValueError(f"methods: expected a loss, or keys with a loss, but got {line!r:.60}")
    stated = dict(stated)
    loss = str(stated.pop("loss"))

    def take(key: str, hint: Any, usual: Any) -> Any:
        return convert(stated.pop(key, usual), hint, f"{loss}: {key}")

    name = take("name", str, loss)
    seeds = take("seeds", int | tuple[int, ...], sweep.seeds)
    count = seeds if isinstance(seeds, int) else len(seeds)
    if not 0 < count <= _MAX_SEEDS:
        raise ValueError(f"seeds: expected 1 to {_MAX_SEEDS} of them, but got {count}")
    posthoc = take("posthoc", tuple[str, ...], sweep.posthoc)
    known = method_names(",".join(posthoc))
    shifts = ",".join(map(str, _listed(take("shift", Any, sweep.shift) or [])))
    select = take("select", str, sweep.select)
    _expect("select", [select], [score.name for score in LOGGED])
    ensemble = take("ensemble", bool, sweep.ensemble)
    options = take("options", dict[str, Any], {})

    base, auxiliaries = parse_spec(loss)
    hyper = {k: v for term in (base, *auxiliaries) for k, v in sweep.grid.get(term, {}).items()}
    hyper |= stated  # every key that is not one of a method
    axes = tuple((key, tuple(_listed(hyper[key]))) for key in sorted(hyper))
    for combination in combinations(axes):
        build_loss(loss, **dict(combination))  # raises if a value does not fit
    return Method(
        name=name,
        loss=loss,
        hyper=axes,
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds)),
        posthoc=(NONE, *known) if NONE in posthoc or not known else known,
        shifts=parse_shifts(shifts) if shifts else (),
        limit=sweep.limit,
        select=select,
        options=_flat(options),
        ensemble=ensemble,
        holdout=parse_shifts(f"data:{sweep.holdout}")[0] if sweep.holdout else None,
        group=sweep.group,
    )


def _expect(key: str, names: Sequence[str] | Mapping[str, Any], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: expected names out of {', '.join(known)}, but got {name}")


def combinations(axes: Sequence[tuple[str, Any]]) -> tuple[Changes, ...]:
    """Every combination of one of the values of each name; one empty one without names."""
    return tuple(product(*([(name, each) for each in _listed(values)] for name, values in axes)))


def _flat(stated: Mapping[str, Any], prefix: str = "") -> Changes:
    """Settings nested as in a config, by dotted name."""
    found: list[tuple[str, Any]] = []
    for name, value in stated.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", tuple(value) if isinstance(value, list) else value))
    return tuple(found)


def _listed(stated: Any) -> list[Any]:
    return list(stated) if isinstance(stated, list | tuple) else [stated]


def shown(value: Any) -> str:
    """A value as file names and tables spell it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)
