"""The place where one run of a grid is trained and evaluated, by the code behind the tools."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reproduction.experiments import CONFIGS
from reproduction.plan import Evaluation, Run
from reproduction.store import Store
from segcal.config import load_config, parse_train
from segcal.data.build import Splits, build_data
from segcal.data.samples import Samples
from segcal.evaluation.calibrate import fit_scalers
from segcal.evaluation.judge import labelled, measure
from segcal.evaluation.sources import NetworkSource
from segcal.run import Run as Opened
from segcal.run import open_run, train_run
from segcal.runtime import choose_device
from segcal.training.log import Diverged
from segcal.training.trainer import best_record

OUTPUT = "output.txt"
RESAMPLES = 1000


@dataclass(frozen=True)
class Cell:
    """Trains and evaluates runs.

    Attributes:
        data: folder that stands in for data/ in the configs.
        device: see `TrainConfig`.
    """

    data: Path
    device: str = "auto"

    def arguments(self, run: Run, folder: Path) -> list[str]:
        """The command line of `tools/train_seg.py` that makes `run` in `folder`."""
        config = CONFIGS / f"{run.config}.yaml"
        options = [*run.hyper, ("seed", run.seed), *run.options, ("device", self.device)]
        settings = load_config(config)
        places = {
            "data.root": settings.data.root,
            "model.encoder_weights": settings.model.encoder_weights or "",
        }
        for name, place in places.items():
            parts = Path(place).parts
            if parts[:1] == ("data",):
                options.append((name, self.data.joinpath(*parts[1:])))
        options.append(("out", folder))
        words = ["--config", str(config), "--loss", run.loss]
        for name, value in options:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        return words

    def command(self, run: Run, store: Store) -> str:
        """The same as a line for a shell."""
        words = self.arguments(run, store.folder(run))
        return shlex.join(["python", "tools/train_seg.py", *words, "--resume"])

    def train(self, run: Run, store: Store) -> dict[str, Any]:
        """Train or resume `run`; the hold-out scores of its best epoch."""
        folder = store.folder(run)
        config, _ = parse_train(self.arguments(run, folder))
        with _output_to(folder / OUTPUT):
            try:
                history = train_run(config, resume=True)
            except Diverged as error:
                raise ValueError(str(error)) from None
        best = best_record(history, config.select)
        assert best is not None  # the last epoch is always evaluated
        scores = {k.partition("/")[2]: v for k, v in best.items() if k.startswith("holdout/")}
        return {"epoch": best["epoch"], **scores}

    def evaluate(self, run: Run, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Write the report of each evaluation to its place in `store`."""
        folder = store.folder(run)
        opened = open_run(folder)

        def predictions(data: Splits, part: Samples) -> NetworkSource:
            return NetworkSource(
                opened.model,
                data,
                part,
                device=choose_device(self.device),
                batch_size=opened.config.batch_size,
                workers=opened.config.workers,
            )

        methods = sorted({posthoc for posthoc, _ in evaluations} - {"none"})
        with _output_to(folder / OUTPUT):
            scalers = fit_scalers(methods, lambda: predictions(opened.data, opened.data.holdout))
            for shift in dict.fromkeys(shift for _, shift in evaluations):
                data = shifted(opened, shift).data
                wanted = {name: scalers[name] for name, tested in evaluations if tested == shift}
                for posthoc, meter in measure(predictions(data, data.test), wanted).items():
                    path = store.report(run, (posthoc, shift))
                    path.parent.mkdir(exist_ok=True)
                    meter.save(path.with_suffix(".npz"))
                    labelled(meter, RESAMPLES, run.name).save(path)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append what is printed to a file: many runs would bury the grid's own lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def shifted(opened: Opened, shift: tuple[str, str] | None) -> Opened:
    """An opened run whose test data is changed by `shift`."""
    if shift is None:
        return opened
    kind, value = shift
    option: dict[str, Any] = {kind: float(value) if kind == "rotation" else value}
    changed = replace(opened.config.data, download=False, **option)
    return replace(opened, data=build_data(changed, seed=opened.config.seed))
