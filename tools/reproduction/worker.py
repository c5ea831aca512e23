"""One training of a grid: trained and evaluated by the code behind tools/train_seg.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.experiments import CONFIGS
from reproduction.plan import Evaluation, Training
from reproduction.store import Store
from segcal.config import load_config, parse_train
from segcal.data.shift import Shift, parse_shifts
from segcal.evaluation.calibrate import fit_scalers
from segcal.evaluation.evaluate import measure, require_pixels
from segcal.run import open_run, train_run
from segcal.runtime import choose_device
from segcal.training.log import Diverged
from segcal.training.trainer import best_record

OUTPUT = "output.txt"
RESAMPLES = 1000


@dataclass(frozen=True)
class TrainingWorker:
    """Trains and evaluates runs.

    Attributes:
        data: folder that stands in for data/ in the configs.
        device: see `TrainConfig`.
    """

    data: Path
    device: str = "auto"

    def arguments(self, run: Training, folder: Path) -> list[str]:
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

    def command(self, run: Training, store: Store) -> str:
        """The same as a line for a shell."""
        words = self.arguments(run, store.folder(run))
        return shlex.join(["python", "tools/train_seg.py", *words, "--resume"])

    def train(self, run: Training, store: Store) -> dict[str, Any]:
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

    def evaluate(self, run: Training, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Write the report of each evaluation to its place in `store`."""
        folder = store.folder(run)
        device = choose_device(self.device)
        methods = sorted({posthoc for posthoc, _ in evaluations} - {"none"})
        with _output_to(folder / OUTPUT):
            scalers = fit_scalers(
                methods, lambda: open_run(folder).predictions("holdout", device=device)
            )
            for shift in dict.fromkeys(shift for _, shift in evaluations):
                source = open_run(folder).predictions(device=device, shift=to_shift(shift))
                wanted = {name: scalers[name] for name, tested in evaluations if tested == shift}
                for posthoc, found in measure(source, wanted).items():
                    path = store.report(run, (posthoc, shift))
                    path.parent.mkdir(exist_ok=True)
                    found.whole.save(path.with_suffix(".npz"))
                    require_pixels(found.report(resamples=RESAMPLES), run.name).save(path)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append what is printed to a file: many runs would bury the grid's own lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def to_shift(named: tuple[str, str] | None) -> Shift | None:
    """The shift that the paper's tables name, such as rotation 45."""
    return None if named is None else parse_shifts(":".join(named))[0]
