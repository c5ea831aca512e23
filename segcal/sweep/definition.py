"""A sweep as a YAML file defines it: what to train, how to choose, what to evaluate and show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from segcal.data.shift import parse_shifts
from segcal.files import one_line, read_yaml
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss, parse_spec
from segcal.metrics.scores import LOGGED, SCORES
from segcal.posthoc import NONE, method_names
from segcal.sweep.plan import (
    Evaluation,
    Method,
    Options,
    OptionValue,
    combinations,
    merge_methods,
    value_text,
)

_KEYS = {"title", "config", "options", "vary", "seeds", "select", "posthoc", "shift", "limit"}
_KEYS |= {"methods", "grid", "scores", "compare", "draw", "by_shift", "by_class", "small"}
_LOSSES = [*BASE_LOSSES.values(), *AUXILIARY_LOSSES.values()]
_HYPER = {name for loss in _LOSSES for name in loss.hyper} - {"seed"} | {"beta"}
_MAX_SEEDS = 1000
_CLASS_SCORES = [name for name, score in SCORES.items() if score.scope == "classes"]
_PIXEL_SCORES = [name for name in SCORES if name not in _CLASS_SCORES]
_METHOD_KEYS = {"loss", "name", "seeds", "posthoc", "shift", "options"} | _HYPER


@dataclass(frozen=True)
class Row:
    """A row of the tables of a sweep.

    Attributes:
        name: what tables call it: METHOD / POSTHOC.
        method: what it shows.
        posthoc: short name of the post-hoc method.
    """

    name: str
    method: Method
    posthoc: str


@dataclass(frozen=True)
class Variation:
    """What the trainings of one table share: a config, and settings of `vary`."""

    config: str
    options: Options = ()


@dataclass(frozen=True)
class MethodEntry:
    """A method of a sweep.

    Attributes:
        name: what tables call it.
        loss: the training loss.
        hyper: values to choose from, by the name of a hyper-parameter.
        seeds: one training per seed.
        posthoc: short names of the post-hoc methods it is evaluated with.
        shifts: shifts of the test images, as in fog:3.
        options: settings of this method alone.
    """

    name: str
    loss: str
    hyper: Mapping[str, tuple[OptionValue, ...]]
    seeds: tuple[int, ...]
    posthoc: tuple[str, ...]
    shifts: tuple[str, ...]
    options: Options


@dataclass(frozen=True)
class Sweep:
    """A grid of trainings and what its tables show.

    Attributes:
        name: name of its files.
        title: what it shows.
        configs: YAML files of settings, or names of such in configs/: every method is trained with
            each.
        entries: the methods.
        options: settings that replace those of the configs.
        vary: settings with several values: every method is trained with each.
        select: scores on the hold-out that choose hyper-parameters; tables show the choice of the
            first, and that of the others where it differs.
        limit: number of images under shift; None for all.
        scores: the columns of the tables.
        compare: pairs of rows whose differences are shown.
        draw: rows in the reliability diagram.
        by_shift: scores that are shown for each shift by itself.
        by_class: scores of classes that are shown for each class.
    """

    name: str
    title: str
    configs: tuple[str, ...]
    entries: tuple[MethodEntry, ...]
    options: Options = ()
    vary: tuple[tuple[str, tuple[OptionValue, ...]], ...] = ()
    select: tuple[str, ...] = ("accuracy",)
    limit: int | None = None
    scores: tuple[str, ...] = ("accuracy", "miou", "ece", "sce")
    compare: tuple[tuple[str, str], ...] = ()
    draw: tuple[str, ...] = ()
    by_shift: tuple[str, ...] = ()
    by_class: tuple[str, ...] = ()

    def variations(self) -> list[Variation]:
        """Each config with each combination of `vary`."""
        options = combinations(dict(self.vary))
        return [
            Variation(config, each) for config in dict.fromkeys(self.configs) for each in options
        ]

    def in_words(self, variation: Variation) -> str:
        """What tells a variation from the others, with commas between; nothing if it is alone."""
        several = len(set(self.configs)) > 1
        settings = (f"{name} {value_text(value)}" for name, value in variation.options)
        config = variation.config
        name = Path(config).stem if config.endswith(".yaml") else config
        return ", ".join([*[name] * several, *settings])

    def rows(self, variation: Variation, rule: str) -> list[Row]:
        """The rows of a variation, with hyper-parameters chosen by `rule`."""
        return [
            Row(f"{entry.name} / {posthoc}", self.method(entry, variation, rule), posthoc)
            for entry in self.entries
            for posthoc in entry.posthoc
        ]

    def methods(self) -> list[Method]:
        """All that is to be trained and evaluated."""
        return merge_methods(
            row.method
            for variation in self.variations()
            for rule in self.select
            for row in self.rows(variation, rule)
        )

    def shifts(self) -> list[str]:
        """The shifts of all methods, in order."""
        return list(dict.fromkeys(shift for entry in self.entries for shift in entry.shifts))

    def method(self, entry: MethodEntry, variation: Variation, rule: str) -> Method:
        """The trainings and evaluations of a method, chosen by `rule`."""
        where = [("", None), *((shift, self.limit) for shift in entry.shifts)]
        varied = {name: value for name, value in variation.options if name in _HYPER}
        hyper = {**entry.hyper, **{name: (value,) for name, value in varied.items()}}
        others = [pair for pair in variation.options if pair[0] not in varied]
        return Method(
            config=variation.config,
            loss=entry.loss,
            grid=combinations({name: hyper[name] for name in sorted(hyper)}),
            seeds=entry.seeds,
            evaluations=frozenset(Evaluation(p, *at) for p in entry.posthoc for at in where),
            options=tuple({**dict(self.options), **dict(entry.options), **dict(others)}.items()),
            select=rule,
        )

    def untuned(self) -> Sweep:
        """The same with nothing to choose: of each list of hyper-parameters the first value."""
        firsts = (
            replace(entry, hyper={name: values[:1] for name, values in entry.hyper.items()})
            for entry in self.entries
        )
        return replace(self, entries=tuple(firsts))

    def with_seeds(self, count: int) -> Sweep:
        """The same with the seeds 0 to `count` - 1 for every method."""
        seeds = tuple(range(count))
        return replace(self, entries=tuple(replace(entry, seeds=seeds) for entry in self.entries))


def read_sweep(
    path: Path, *, small: bool = False, at_hand: Callable[[str], bool] = lambda config: True
) -> Sweep:
    """The sweep that a YAML file defines.

    Args:
        path: the YAML file.
        small: take what the file says under `small` in place of its own keys.
        at_hand: whether the data of a config is there: the first small version whose data is there
            is taken, or else the last.

    Raises:
        ValueError: in one line, what is wrong with it.
    """
    if not path.exists():
        raise FileNotFoundError(f"Expected the YAML file of a sweep at {path}, but there is none")
    stated = read_yaml(path)
    try:
        sweep, *smaller = (_beside(path, one) for one in _versions(stated, path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except TypeError as error:  # a number where a list is meant, or a list as a name
        raise ValueError(f"{path}: Expected a sweep, but got {one_line(error)}") from None
    if not small:
        return sweep
    if not smaller:
        raise ValueError(f"Expected small, what a small version changes, in {path}, but got none")
    return next((one for one in smaller if all(map(at_hand, one.configs))), smaller[-1])


def _versions(stated: Any, path: Path) -> list[Sweep]:
    """The sweep, then its small versions; what the first of these says holds for the others."""
    _expect_keys(stated, _KEYS, {"config", "methods"}, "a sweep")
    whole = {key: value for key, value in stated.items() if key != "small"}
    found = [_sweep(whole, path.stem)]
    changes = _listed(stated.get("small", []))
    for change in changes:
        _expect_keys(change, _KEYS - {"small"}, set(), "a small version")
        small = {**whole, "title": f"{found[0].title}, small version", **changes[0], **change}
        found.append(_sweep(small, f"{path.stem}_small"))
    return found


def _beside(path: Path, sweep: Sweep) -> Sweep:
    """The sweep with paths for the configs that lie beside its file."""
    beside = (path.parent / config for config in sweep.configs)
    configs = (
        str(file) if file.is_file() else config
        for file, config in zip(beside, sweep.configs, strict=True)
    )
    return replace(sweep, configs=tuple(configs))


def _sweep(stated: Any, name: str) -> Sweep:
    if not isinstance(stated["methods"], list) or not stated["methods"]:
        raise ValueError(f"Expected a list of methods, but got {stated['methods']!r:.60}")
    sweep = Sweep(
        name=name,
        title=str(stated.get("title", name)),
        configs=_configs(stated["config"]),
        entries=tuple(_entry(entry, stated) for entry in stated["methods"]),
        options=_options(stated.get("options", {})),
        vary=tuple(
            (name, _values(values)) for name, values in _flat(stated.get("vary", {})).items()
        ),
        select=_among("select", stated.get("select", "accuracy"), [s.name for s in LOGGED]),
        limit=_limit(stated.get("limit")),
        scores=_among("scores", stated.get("scores", list(Sweep.scores)), _PIXEL_SCORES),
        compare=tuple(_pair(pair) for pair in stated.get("compare", ())),
        draw=tuple(stated.get("draw", ())),
        by_shift=_among("by_shift", stated.get("by_shift", []), _PIXEL_SCORES),
        by_class=_among("by_class", stated.get("by_class", []), _CLASS_SCORES),
    )
    _expect_rows(sweep)
    return sweep


def _entry(stated: Any, whole: Mapping[str, Any]) -> MethodEntry:
    stated = {"loss": stated} if isinstance(stated, str) else stated
    _expect_keys(stated, _METHOD_KEYS, {"loss"}, "a method")
    default = {**whole, **stated}
    hyper = {
        **_grid_of(str(stated["loss"]), whole.get("grid", {})),
        **{name: stated[name] for name in stated if name in _HYPER},
    }
    posthoc = default.get("posthoc", NONE)
    listed = posthoc if isinstance(posthoc, list) else str(posthoc).split(",")
    known = method_names(",".join(map(str, listed)))
    shift = default.get("shift") or []
    shifts = parse_shifts(",".join(shift if isinstance(shift, list) else [shift])) if shift else ()
    entry = MethodEntry(
        name=str(stated.get("name", stated["loss"])),
        loss=str(stated["loss"]),
        hyper={name: _values(hyper[name]) for name in sorted(hyper)},
        seeds=_seeds(default.get("seeds", 1)),
        posthoc=tuple(p for p in (NONE, *known) if p in known or NONE in map(str, listed)),
        shifts=tuple(map(str, shifts)),
        options=_options(stated.get("options", {})),
    )
    for combination in combinations(entry.hyper):
        chosen: dict[str, Any] = dict(combination)
        build_loss(entry.loss, **chosen)  # complains of what does not fit
    return entry


def _grid_of(loss: str, stated: Any) -> dict[str, Any]:
    """What `grid` says of the terms of a loss."""
    _expect_keys(stated, {*BASE_LOSSES, *AUXILIARY_LOSSES}, set(), "grid")
    for values in stated.values():
        _expect_keys(values, _HYPER, set(), "a term's grid")
    base, auxiliaries = parse_spec(loss)
    return {name: v for part in (base, *auxiliaries) for name, v in stated.get(part, {}).items()}


def _expect_keys(stated: Any, known: set[str], needed: set[str], what: str) -> None:
    if not isinstance(stated, dict):
        raise ValueError(f"Expected {what} (key: value), but got {stated!r:.60}")
    for key in needed - stated.keys():
        raise ValueError(f"Expected {key} in {what}, but there is none")
    for key in stated.keys() - known:
        raise ValueError(
            f"Expected keys of {what} out of {', '.join(sorted(known))}, but got {key}"
        )


def _expect_rows(sweep: Sweep) -> None:
    names = [row.name for row in sweep.rows(sweep.variations()[0], sweep.select[0])]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Expected methods with different names, but got two {name}")
    for name in (*(name for pair in sweep.compare for name in pair), *sweep.draw):
        if name not in names:
            raise ValueError(f"Expected rows out of {', '.join(names)}, but got {name}")


def _flat(stated: Any, prefix: str = "") -> dict[str, Any]:
    """Options nested as in a config, by dotted name."""
    if not isinstance(stated, dict):
        raise ValueError(f"Expected options (key: value), but got {stated!r:.60}")
    found: dict[str, Any] = {}
    for name, value in stated.items():
        found |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return found


def _options(stated: Any) -> Options:
    return tuple((name, _text(value)) for name, value in _flat(stated).items())


def _text(value: Any) -> OptionValue:
    """A value as the command line of training takes it."""
    if value is None:
        return "null"
    return str(value) if isinstance(value, list) else value


def _listed(stated: Any) -> list[Any]:
    return stated if isinstance(stated, list) else [stated]


def _configs(stated: Any) -> tuple[str, ...]:
    configs = _listed(stated)
    if not configs or not all(isinstance(config, str) for config in configs):
        raise ValueError(f"Expected a config or a list of configs, but got {stated!r:.60}")
    return tuple(configs)


def _values(stated: Any) -> tuple[OptionValue, ...]:
    values = _listed(stated)
    if not values or not all(isinstance(value, float | int | str | bool) for value in values):
        raise ValueError(f"Expected a value or a list of values, but got {stated!r:.60}")
    return tuple(values)


def _seeds(stated: Any) -> tuple[int, ...]:
    count = type(stated) is int and 0 < stated <= _MAX_SEEDS
    seeds = list(range(stated)) if count else stated
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int for s in seeds):
        raise ValueError(f"Expected seeds as a number of them or a list, but got {stated!r:.60}")
    return tuple(dict.fromkeys(seeds))


def _limit(stated: Any) -> int | None:
    if stated is not None and (type(stated) is not int or stated < 1):
        raise ValueError(f"Expected limit as a whole number of at least 1, but got {stated!r:.60}")
    return stated


def _among(key: str, stated: Any, known: Iterable[str]) -> tuple[str, ...]:
    names = _listed(stated)
    for name in names:
        if name not in known:
            raise ValueError(f"Expected {key} out of {', '.join(known)}, but got {name}")
    return tuple(names)


def _pair(stated: Any) -> tuple[str, str]:
    if not isinstance(stated, list) or len(stated) != 2:
        raise ValueError(f"Expected two rows to compare, but got {stated!r:.60}")
    return str(stated[0]), str(stated[1])
