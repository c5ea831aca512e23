"""One training of a grid: trained and evaluated by the code behind `segcal train` and `eval`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from segcal.data.shift import Shift, parse_shifts
from segcal.data.splits import missing
from segcal.distributed import choose_device
from segcal.evaluation.evaluate import evaluate_source
from segcal.files import read_yaml
from segcal.posthoc import NONE
from segcal.settings import to_dict
from segcal.sources.network import RunSource
from segcal.sweep.plan import Evaluation, Method, Training, value_text
from segcal.sweep.store import Store, every_run
from segcal.training import checkpoint
from segcal.training.config import CONFIG, TrainConfig, parse_train, recipe_path
from segcal.training.log import Diverged
from segcal.training.run import changed_settings, train_run
from segcal.training.trainer import LOG, best_record

OUTPUT = "output.txt"
RESAMPLES = 1000
_SAME = ("epochs", "eval_every")  # a resumed run may change them, but they decide what is evaluated


def find_config(name: str) -> Path:
    """The YAML file that a sweep calls `name`: a path, or a recipe.

    Raises:
        FileNotFoundError: there is none.
    """
    path = recipe_path(name)
    if not path.exists():
        raise FileNotFoundError(f"Expected a config at {path}, but there is none")
    return path


@dataclass(frozen=True)
class TrainingWorker:
    """Trains and evaluates runs.

    Attributes:
        data: folder that stands in for data/ in the configs; None for data/ itself.
        device: see `TrainConfig`.
    """

    data: Path | None = None
    device: str = "auto"

    def arguments(self, run: Training, folder: Path) -> list[str]:
        """The command line of `segcal train` that makes `run` in `folder`."""
        config = find_config(run.config)
        options: list[tuple[str, Any]] = [*run.hyper, ("seed", run.seed), *run.options]
        options.append(("device", self.device))
        if self.data is not None:
            settings = _parse("--config", str(config))
            places = {
                "data.root": settings.data.root,
                "model.encoder_weights": settings.model.encoder_weights or "",
            }
            for name, place in places.items():
                parts = Path(place).parts
                if parts[:1] == ("data",) and name not in dict(run.options):
                    options.append((name, self.data.joinpath(*parts[1:])))
        options.append(("out", folder))
        words = ["--config", str(config), "--loss", run.loss]
        for name, value in options:
            words += [f"--{name}", value_text(value)]
        return words

    def config(self, run: Training, store: Store) -> TrainConfig:
        """The settings of `run`.

        Raises:
            ValueError: in one line, what is wrong with them.
        """
        return _parse(*self.arguments(run, store.folder(run)))

    def command(self, run: Training, store: Store) -> str:
        """A line for a shell that trains `run`."""
        words = self.arguments(run, store.folder(run))
        return shlex.join(["segcal", "train", *words, "--resume"])

    def missing(self, config: str, *, fetch: bool = True) -> str | None:
        """In one line, why no run of a config can be trained: data or weights that are not there.

        Args:
            config: a YAML file, or the name of one in configs/.
            fetch: data that is fetched when it is needed is not missing.
        """
        return _missing(self, config, fetch)

    def train(self, run: Training, store: Store) -> dict[str, Any]:
        """Train or resume `run`; the hold-out scores of its best epoch."""
        folder = store.folder(run)
        config = self.config(run, store)
        with _output_to(folder / OUTPUT):
            try:
                history = train_run(config, resume=True)
            except Diverged as error:
                raise ValueError(str(error)) from None
        return _best_scores(history, config)

    def evaluate(self, run: Training, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Write the report of each evaluation to its place in `store`."""
        folder = store.trained_folder(run)
        device = choose_device(self.device)
        methods = sorted({evaluation.posthoc for evaluation in evaluations} - {NONE})
        with _output_to(store.folder(run) / OUTPUT):
            opened = RunSource(folder, device=device)
            for limit in dict.fromkeys(e.limit for e in evaluations):
                together = [e for e in evaluations if e.limit == limit]
                found = evaluate_source(
                    opened if limit is None else opened.limited(limit),
                    posthoc=methods,
                    shifts=[e.shift for e in together if e.shift],
                    resamples=RESAMPLES,
                    overlays="none",
                )
                for evaluation in together:
                    method, shift = evaluation.posthoc, evaluation.shift
                    key = (method, str(to_shift(shift))) if shift else method
                    path = store.report(run, evaluation)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found.meters[key].save(path.with_suffix(".npz"))
                    found.reports[key].save(path)

    def expect_same(self, methods: Sequence[Method], store: Store) -> None:
        """Raise a ValueError if a run in `store` was trained with other settings than planned."""
        for run in dict.fromkeys(run for method in methods for run in every_run(method, store)):
            path = store.trained_folder(run) / CONFIG
            settings = to_dict(self.config(run, store))  # complains of what cannot be trained
            if path.exists() and (
                changed := changed_settings(read_yaml(path), settings, same=_SAME)
            ):
                shown = ", ".join(f"{key}={value}" for key, value in changed.items())
                raise ValueError(
                    f"Expected the settings of the run in {path.parent}, but got {shown}; choose "
                    "another folder with --out"
                )

    def found_in(
        self, folders: Sequence[Path], methods: Sequence[Method], store: Store
    ) -> dict[str, dict[str, Any]]:
        """The runs of a grid that were trained elsewhere: their scores and folders by name.

        A complete run whose settings are those of a planned training is that training, whatever
        its folder is called.

        Args:
            folders: of runs, or of folders of runs.
            methods: of the grid.
            store: the files of the grid.
        """
        paths = [path for top in folders for path in (top, *sorted(top.glob("*")))]
        complete = {path: known for path in paths if (known := _complete_run(path)) is not None}
        found: dict[str, dict[str, Any]] = {}
        looked: set[Training] = set()
        while True:  # as runs are found, hyper-parameters are chosen, and more runs are known
            now = Store(store.root, found)
            runs = {run for method in methods for run in every_run(method, now)} - looked
            if not runs:
                return found
            looked |= runs
            for run in runs:
                if now.trained(run) is not None:
                    continue
                config = self.config(run, store)
                settings = to_dict(config)
                for path, (theirs, history) in complete.items():
                    if not changed_settings(theirs, settings, same=_SAME):
                        seconds = sum(record["seconds"] for record in history)
                        found[run.name] = {
                            "folder": str(path.resolve()),
                            "seconds": round(seconds, 1),
                            **_best_scores(history, config),
                        }
                        break


@cache
def _parse(*arguments: str) -> TrainConfig:
    return parse_train(arguments)[0]


@cache
def _missing(worker: TrainingWorker, config: str, fetch: bool) -> str | None:
    settings = _parse(*worker.arguments(Training(config, "nll"), Path("unused")))
    weights = Path(settings.model.encoder_weights or "")
    if len(weights.parts) > 1 and not weights.exists():
        return f"Expected the file {weights}, but there is none"
    if fetch and settings.data.download:
        return None
    return missing(settings.data)


def _complete_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The settings and the log of a run, if all its epochs are done."""
    if not all((folder / name).is_file() for name in (CONFIG, LOG, checkpoint.BEST)):
        return None
    settings = read_yaml(folder / CONFIG)
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return (settings, [json.loads(x) for x in lines]) if len(lines) == settings["epochs"] else None


def _best_scores(history: list[dict[str, Any]], config: TrainConfig) -> dict[str, Any]:
    best = best_record(history, config.select)
    assert best is not None  # the last epoch is always evaluated
    scores = {k.partition("/")[2]: v for k, v in best.items() if k.startswith("holdout/")}
    return {"epoch": best["epoch"], **scores}


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append what is printed to a file: many runs would bury the grid's own lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def to_shift(named: str) -> Shift | None:
    """The shift that a text such as fog:3 names; None for the clean images."""
    return parse_shifts(named)[0] if named else None
