"""A sweep as a YAML file defines it: what to train, how to choose, what to evaluate and show.

Each method has a small grid of hyper-parameters. The first seed tries all of it; the best on the
hold-out is reported, and the other seeds take its choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from segcal.data.shift import Shift, parse_shifts
from segcal.files import read_yaml
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss, hyper_names, parse_spec
from segcal.metrics.scores import LOGGED, SCORES
from segcal.posthoc import NONE, method_names
from segcal.settings import build
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
        options: settings of this method alone.
        ensemble: whether the mean of the predictions of its seeds is evaluated too.
    """

    name: str
    loss: str
    hyper: tuple[tuple[str, tuple[Any, ...]], ...]
    seeds: tuple[int, ...]
    posthoc: tuple[str, ...]
    shifts: tuple[Shift, ...]
    options: Changes
    ensemble: bool = False

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
    """The trainings of a method with one config; the score `rule` chooses what is reported."""

    method: Method
    config: str
    grid: tuple[Changes, ...]  # hyper-parameters to choose from
    options: Changes
    rule: str
    limit: int | None  # images under shift

    def candidates(self) -> list[Training]:
        """The trainings, all of the first seed, that the hyper-parameters are chosen by."""
        return [self._training(hyper, self.method.seeds[0]) for hyper in self.grid]

    def chosen(self, hyper: Changes) -> list[Training]:
        """The trainings that are reported, one per seed."""
        return [self._training(hyper, seed) for seed in self.method.seeds]

    def _training(self, hyper: Changes, seed: int) -> Training:
        loss = ("loss", self.method.loss)
        return Training(self.config, (loss, *hyper, *self.options, ("seed", seed)))


@dataclass(frozen=True)
class Row:
    """A row of the tables: a method, or its seeds pooled, after one calibrator."""

    name: str
    tuning: Tuning
    posthoc: str
    ensemble: bool


@dataclass(frozen=True)
class Variation:
    """What the trainings of one table share: a config, and values of the settings that vary."""

    config: str
    options: Changes
    title: str  # what tells it from the others; empty if it is alone


@dataclass(frozen=True)
class Sweep:
    """A grid of trainings and what its tables show; docs/sweeps.md describes the file.

    Attributes:
        name: the name of its files.
        title: what it shows.
        configs: YAML files, or names of recipes: every method is trained with each.
        methods: the methods.
        options: settings that replace those of the configs.
        vary: settings with several values: every method is trained with each.
        select: scores on the hold-out that choose hyper-parameters. Tables show the choice of the
            first, and that of the others where it differs.
        limit: the number of images under shift; None for all.
        scores: the columns of the tables.
        compare: pairs of rows whose differences are shown.
        draw: rows in the diagrams.
        by_shift: scores that are shown for each shift by itself.
        by_class: scores of classes that are shown for each class.
    """

    name: str
    title: str
    configs: tuple[str, ...]
    methods: tuple[Method, ...]
    options: Changes = ()
    vary: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    select: tuple[str, ...] = ("accuracy",)
    limit: int | None = None
    scores: tuple[str, ...] = ("accuracy", "miou", "ece", "sce")
    compare: tuple[tuple[str, str], ...] = ()
    draw: tuple[str, ...] = ()
    by_shift: tuple[str, ...] = ()
    by_class: tuple[str, ...] = ()

    def variations(self) -> list[Variation]:
        """Each config with each combination of the values of `vary`."""
        configs = list(dict.fromkeys(self.configs))
        names = [Path(each).stem if each.endswith(".yaml") else each for each in configs]
        if len(set(names)) < len(names):
            names = distinct_names(configs)
        found = []
        for config, name in zip(configs, names, strict=True):
            for options in combinations(self.vary):
                words = [f"{key} {shown(value)}" for key, value in options]
                title = ", ".join([*[name] * (len(configs) > 1), *words])
                found.append(Variation(config, options, title))
        return found

    def tuning(self, method: Method, variation: Variation, rule: str) -> Tuning:
        """The trainings of a method in a variation, chosen by `rule`."""
        taken = hyper_names(method.loss)
        varied = {name: (value,) for name, value in variation.options if name in taken}
        grid = combinations(sorted({**dict(method.hyper), **varied}.items()))
        others = [(name, value) for name, value in variation.options if name not in taken]
        options = {**dict(self.options), **dict(method.options), **dict(others)}
        return Tuning(method, variation.config, grid, tuple(options.items()), rule, self.limit)

    def rows(self, variation: Variation, rule: str) -> list[Row]:
        """The rows of a variation, with hyper-parameters chosen by `rule`."""
        return [
            Row(name, self.tuning(method, variation, rule), posthoc, ensemble)
            for method in self.methods
            for name, posthoc, ensemble in method.rows()
        ]

    def tunings(self) -> list[Tuning]:
        """All that is to be trained and evaluated."""
        return [
            self.tuning(method, variation, rule)
            for variation in self.variations()
            for method in self.methods
            for rule in self.select
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


@dataclass(frozen=True)
class _File:
    """The keys of a sweep's file."""

    config: tuple[str, ...]
    methods: tuple[Any, ...]
    title: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, Any] = field(default_factory=dict)
    seeds: int | tuple[int, ...] = 1
    select: tuple[str, ...] = Sweep.select
    posthoc: tuple[str, ...] = (NONE,)
    shift: tuple[str, ...] = ()
    ensemble: bool = False
    limit: int | None = None
    grid: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: tuple[str, ...] = Sweep.scores
    compare: tuple[tuple[str, str], ...] = ()
    draw: tuple[str, ...] = ()
    by_shift: tuple[str, ...] = ()
    by_class: tuple[str, ...] = ()
    small: Any = None


@dataclass(frozen=True)
class _Line:
    """The keys of a method but for its hyper-parameters."""

    loss: str
    name: str
    seeds: int | tuple[int, ...]
    posthoc: tuple[str, ...]
    shift: tuple[str, ...]
    ensemble: bool
    options: dict[str, Any] = field(default_factory=dict)


def find_sweep(
    name: str, *, small: bool = False, at_hand: Callable[[str], bool] = lambda config: True
) -> Sweep:
    """`read_sweep` of a file, or of the name of a sweep that comes with segcal."""
    ours = RECIPES / "sweeps" / f"{name}.yaml"
    path = ours if ours.exists() and not Path(name).exists() else Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"there is no sweep {name}: neither a file nor one of segcal's")
    return read_sweep(path, small=small, at_hand=at_hand)


def read_sweep(
    path: Path, *, small: bool = False, at_hand: Callable[[str], bool] = lambda config: True
) -> Sweep:
    """The sweep that a YAML file defines.

    Args:
        path: the YAML file.
        small: take what the file says under `small` in place of its own keys.
        at_hand: whether the data of a config is there. The first small version whose data is there
            is taken, or else the last.

    Raises:
        ValueError: in one line, what is wrong with it.
    """
    stated = read_yaml(path)
    if not isinstance(stated, dict):
        raise ValueError(f"{path}: expected a sweep (key: value), but got {stated!r:.60}")
    whole = {key: value for key, value in stated.items() if key != "small"}
    sweep = _sweep(whole, path.stem, path)
    versions = _listed(stated.get("small", []))
    smaller = []
    for changes in versions:
        if not isinstance(changes, dict):
            raise ValueError(f"{path}: small: expected keys of a sweep, but got {changes!r:.60}")
        title = {"title": f"{sweep.title}, small version"}
        merged = {**whole, **title, **versions[0], **changes}
        smaller.append(_sweep(merged, f"{path.stem}_small", path))
    if not small:
        return sweep
    if not smaller:
        raise ValueError(f"{path} has no small version: it needs the key small")
    return next((one for one in smaller if all(map(at_hand, one.configs))), smaller[-1])


def _sweep(stated: Mapping[str, Any], name: str, path: Path) -> Sweep:
    where = f"{path}: "
    file = build(_File, {**stated, "shift": _text(stated.get("shift", []))}, where)
    try:
        methods = tuple(_method(line, file) for line in file.methods)
        scores = [score for score in SCORES if SCORES[score].scope != "classes"]
        of_classes = [score for score in SCORES if SCORES[score].scope == "classes"]
        _expect("select", file.select, [score.name for score in LOGGED])
        _expect("scores", file.scores, scores)
        _expect("by_shift", file.by_shift, scores)
        _expect("by_class", file.by_class, of_classes)
        if not (file.config and methods and file.select):
            raise ValueError("config, methods and select must not be empty")
        if file.limit is not None and file.limit < 1:
            raise ValueError(f"limit: expected at least 1, but got {file.limit}")
        varied = _flat(file.vary)
        rows = [name for method in methods for name, _, _ in method.rows()]
        if twice := [row for row in rows if rows.count(row) > 1]:
            raise ValueError(f"two methods are called {twice[0]}: give one of them another name")
        _expect("compare and draw", [*(n for pair in file.compare for n in pair), *file.draw], rows)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    beside = [path.parent / config for config in file.config]
    return Sweep(
        name=name,
        title=file.title or name,
        configs=tuple(
            str(near) if near.is_file() else config
            for near, config in zip(beside, file.config, strict=True)
        ),
        methods=methods,
        options=_flat(file.options),
        vary=tuple((name, tuple(_listed(values))) for name, values in varied),
        **{
            key: getattr(file, key)
            for key in ("select", "limit", "scores", "compare", "draw", "by_shift", "by_class")
        },
    )


def _method(line: Any, file: _File) -> Method:
    stated = {"loss": line} if isinstance(line, str) else line
    if not isinstance(stated, dict) or "loss" not in stated:
        raise ValueError(f"methods: expected a loss, or keys with a loss, but got {line!r:.60}")
    loss = str(stated["loss"])
    keys = {f.name for f in fields(_Line)}
    usual = {"name": loss} | {
        k: getattr(file, k) for k in ("seeds", "posthoc", "shift", "ensemble")
    }
    found = {**usual, **{key: value for key, value in stated.items() if key in keys}}
    read = build(_Line, {**found, "shift": _text(found["shift"])}, f"{loss}: ")
    base, auxiliaries = parse_spec(loss)
    _expect("grid", file.grid, [*BASE_LOSSES, *AUXILIARY_LOSSES])
    hyper = {k: v for term in (base, *auxiliaries) for k, v in file.grid.get(term, {}).items()}
    hyper |= {key: value for key, value in stated.items() if key not in keys}
    axes = tuple((key, tuple(_listed(hyper[key]))) for key in sorted(hyper))
    for combination in combinations(axes):
        build_loss(loss, **dict(combination))  # raises if a value does not fit
    count = read.seeds if isinstance(read.seeds, int) else len(read.seeds)
    if not 0 < count <= _MAX_SEEDS:
        raise ValueError(f"seeds: expected 1 to {_MAX_SEEDS} of them, but got {count}")
    seeds = tuple(range(count)) if isinstance(read.seeds, int) else read.seeds
    known = method_names(",".join(read.posthoc))
    plain = (NONE,) if NONE in read.posthoc or not known else ()
    shifts = parse_shifts(",".join(read.shift)) if read.shift else ()
    return Method(
        *(read.name, loss, axes, tuple(dict.fromkeys(seeds)), (*plain, *known), shifts),
        options=_flat(read.options),
        ensemble=read.ensemble,
    )


def _text(shift: Any) -> str:
    """A list of shifts as one text, whose commas `parse_shifts` understands."""
    return ",".join(map(str, shift)) if isinstance(shift, list | tuple) else str(shift or "")


def _expect(key: str, names: Sequence[str] | Mapping[str, Any], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: expected names out of {', '.join(known)}, but got {name}")


def combinations(axes: Sequence[tuple[str, Sequence[Any]]]) -> tuple[Changes, ...]:
    """Every combination of one value for each name; one empty one if there are no names."""
    return tuple(product(*([(name, value) for value in values] for name, values in axes)))


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
