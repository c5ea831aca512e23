"""A sweep as a YAML file defines it: what to train, how to choose, what to evaluate and show.

Each method has a small grid of hyper-parameters. The first seed tries all of it; the best on the
hold-out is reported, and the other seeds take its choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """One training, or those of several seeds, whose predictions are pooled."""

    config: str  # a YAML file, or the name of a recipe
    changes: Changes  # the loss, its hyper-parameters, and other settings
    seeds: tuple[int, ...] = (0,)

    @property
    def label(self) -> str:
        """What it is called: small_scenes-fl-gamma3-seed0, or …-seeds0_1_2."""
        path = Path(self.config)
        words = [path.stem if path.suffix == ".yaml" else self.config]
        words += [("" if name == "loss" else name) + shown(value) for name, value in self.changes]
        several = "s" if len(self.seeds) > 1 else ""
        words.append(f"seed{several}{'_'.join(map(str, self.seeds))}")
        return "-".join(re.sub(r"[^\w.+=-]+", "_", word) for word in words)

    @property
    def members(self) -> list[Training]:
        """The training of each seed."""
        return [replace(self, seeds=(seed,)) for seed in self.seeds]


@dataclass(frozen=True)
class Method:
    """A method in one table: trainings of which the best on the hold-out is reported."""

    name: str
    loss: str
    config: str  # a YAML file, or the name of a recipe
    table: str = ""  # what the title of its table begins with; "" if the sweep has one table
    grid: tuple[Changes, ...] = ((),)  # the hyper-parameters to choose from
    options: Changes = ()  # settings in place of the config's
    seeds: tuple[int, ...] = (0,)  # the first tries the whole grid
    posthoc: tuple[str, ...] = (NONE,)  # short names of calibrators
    shifts: tuple[Shift, ...] = ()
    limit: int | None = None  # of images under shift
    select: str = "accuracy"  # the score on the hold-out that chooses hyper-parameters
    ensemble: bool = False  # whether the mean of the predictions of its seeds is a row too
    holdout: Shift | None = None  # data:ROOT, the images that calibrators are fitted on instead
    group: str = ""  # see `Source`

    def training(self, hyper: Changes, *seeds: int) -> Training:
        """The training with these hyper-parameters."""
        return Training(self.config, (("loss", self.loss), *hyper, *self.options), seeds)

    def candidates(self) -> list[Training]:
        """The trainings that the hyper-parameters are chosen by."""
        return [self.training(hyper, self.seeds[0]) for hyper in self.grid]

    def rows(self) -> list[Row]:
        """Its rows in the table."""
        pooled = (False, True) if self.ensemble and len(self.seeds) > 1 else (False,)
        return [Row(self, posthoc, ensemble) for ensemble in pooled for posthoc in self.posthoc]


class Row(NamedTuple):
    """A row of a table: a method, or its seeds pooled, after one calibrator."""

    method: Method
    posthoc: str
    ensemble: bool

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.method.name}{' ensemble' * self.ensemble} / {self.posthoc}"


@dataclass(frozen=True)
class Sweep:
    """A grid of trainings and what its tables show.

    The fields are the keys of its file, which docs/sweeps.md describes; `name` is that of the
    files it writes. `methods` are `Method`s, once for each config and combination of `vary`.
    """

    config: tuple[str, ...]
    methods: tuple[Any, ...]
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

    def tables(self) -> dict[str, list[Row]]:
        """The rows of each table, by what its title begins with."""
        found: dict[str, list[Row]] = {}
        for method in self.methods:
            found.setdefault(method.table, []).extend(method.rows())
        return found

    def shifts(self) -> list[Shift]:
        """The shifts of all methods, in order."""
        return list(dict.fromkeys(shift for method in self.methods for shift in method.shifts))

    def changed(self, *, seeds: int | None = None, tune: bool = True) -> Sweep:
        """The same with the seeds 0 to `seeds` - 1, or without choosing: first values alone."""
        methods = self.methods
        if seeds is not None:
            methods = tuple(replace(m, seeds=tuple(range(seeds))) for m in methods)
        if not tune:
            methods = tuple(replace(m, grid=m.grid[:1]) for m in methods)
        return replace(self, methods=methods)


def read_sweep(
    name: str | Path, *, small: bool = False, at_hand: Callable[[str], bool] = lambda config: True
) -> Sweep:
    """The sweep that a YAML file defines, or that comes with segcal under this name.

    With `small`, what the file says under `small` is in place of its own keys. Of several small
    versions the first is taken whose data is `at_hand`, or else the last.
    """
    path = Path(name)
    ours = RECIPES / "sweeps" / f"{name}.yaml"
    if not path.exists() and ours.exists():
        path = ours
    if not path.is_file():
        raise FileNotFoundError(f"there is no sweep {name}: neither a file nor one of segcal's")
    stated = convert(read_yaml(path), dict[str, Any], f"{path}")
    listed = _listed(stated.pop("small", []))
    versions = [convert(one, dict[str, Any], f"{path}: small") for one in listed]
    sweep = _sweep({"title": path.stem, **stated, "name": path.stem}, path)
    renamed = {"title": f"{sweep.title}, small version", "name": f"{path.stem}_small"}
    smaller = [_sweep({**stated, **renamed, **versions[0], **own}, path) for own in versions]
    if not small:
        return sweep
    if not smaller:
        raise ValueError(f"{path} has no small version: it needs the key small")
    return next((one for one in smaller if all(map(at_hand, one.config))), smaller[-1])


def _sweep(stated: Mapping[str, Any], path: Path) -> Sweep:
    sweep = build(Sweep, stated, f"{path}: ")
    beside = [path.parent / name for name in sweep.config]  # a path is relative to the file
    near = zip(beside, sweep.config, strict=True)
    sweep = replace(sweep, config=tuple(str(p) if p.is_file() else name for p, name in near))
    try:
        if not (sweep.config and sweep.methods):
            raise ValueError("config and methods must not be empty")
        if sweep.limit is not None and sweep.limit < 1:
            raise ValueError(f"limit: expected at least 1, but got {sweep.limit}")
        scores = [name for name, score in SCORES.items() if score.scope != "classes"]
        _expect("scores", sweep.scores, scores)
        _expect("by_shift", sweep.by_shift, scores)
        _expect("by_class", sweep.by_class, [name for name in SCORES if name not in scores])
        _expect("grid", sweep.grid, [*BASE_LOSSES, *AUXILIARY_LOSSES])
        methods = []
        for config, varied, table in _variations(sweep):
            methods += [_method(line, sweep, config, varied, table) for line in sweep.methods]
        sweep = replace(sweep, methods=tuple(methods))
        for rows in sweep.tables().values():
            names = [row.name for row in rows]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two methods are called {twice[0]}: give one another name")
            _expect("compare", [name for pair in sweep.compare for name in pair], names)
            _expect("draw", sweep.draw, names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return sweep


def _variations(sweep: Sweep) -> Iterator[tuple[str, Changes, str]]:
    """Each config with each combination of the values of `vary`, and what its table is called."""
    configs = list(dict.fromkeys(sweep.config))
    names = [Path(each).stem if each.endswith(".yaml") else each for each in configs]
    if len(set(names)) < len(names):
        names = distinct_names(configs)
    for config, name in zip(configs, names, strict=True):
        for varied in _combinations(_flat(sweep.vary)):
            words = [f"{key} {shown(value)}" for key, value in varied]
            yield config, varied, ", ".join([*[name] * (len(configs) > 1), *words])


def _method(line: Any, sweep: Sweep, config: str, varied: Changes, table: str) -> Method:
    """One of `methods`, with the keys of the sweep in place of those that it does not state."""
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
    options = dict(_flat(sweep.options)) | dict(_flat(take("options", dict[str, Any], {})))

    base, auxiliaries = parse_spec(loss)
    hyper = {k: v for term in (base, *auxiliaries) for k, v in sweep.grid.get(term, {}).items()}
    hyper |= stated  # every key that is not one of a method
    for key, value in varied:
        (hyper if key in hyper_names(loss) else options)[key] = value
    grid = _combinations(tuple(sorted(hyper.items())))
    for combination in grid:
        build_loss(loss, **dict(combination))  # raises if a value does not fit
    return Method(
        name=name,
        loss=loss,
        config=config,
        table=table,
        grid=grid,
        options=tuple(options.items()),
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds)),
        posthoc=(NONE, *known) if NONE in posthoc or not known else known,
        shifts=parse_shifts(shifts) if shifts else (),
        limit=sweep.limit,
        select=select,
        ensemble=ensemble,
        holdout=parse_shifts(f"data:{sweep.holdout}")[0] if sweep.holdout else None,
        group=sweep.group,
    )


def _expect(key: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: expected names out of {', '.join(known)}, but got {name}")


def _combinations(axes: Changes) -> tuple[Changes, ...]:
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
