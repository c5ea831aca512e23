"""Scores and the reliability diagram in TensorBoard, Weights & Biases and MLflow.

segcal train --tensorboard --wandb --mlflow

Our trainer opens them (`open_tracker`); the Lightning callback finds them among the loggers of its
trainer (`of_logger`). Their own settings hold: WANDB_MODE=offline, MLFLOW_TRACKING_URI and others.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from segcal.files import atomic_write, one_line
from segcal.metrics import Report

log = logging.getLogger(__name__)
NAMES = ("tensorboard", "wandb", "mlflow")
_STEP = "trainer/global_step"  # the axis of steps in W&B, as Lightning calls it


@dataclass(frozen=True)
class Tracker:
    """Takes numbers by name, (H, W, 3) uint8 images, each with the step, and the end of a run."""

    scalars: Callable[[Mapping[str, float], int], Any]
    image: Callable[[str, np.ndarray, int], Any]
    close: Callable[[], Any]

    def epoch(self, record: Mapping[str, Any], report: Report | None) -> bool:
        """Log an epoch of our trainer; False if that failed, as when a server is away."""
        step = record["step"]
        try:
            self.scalars({k: v for k, v in record.items() if isinstance(v, float)}, step)
            if report is not None:
                self.reliability("holdout/reliability", report, step)
        except Exception as error:
            log.warning("a tracker failed, and gets nothing more: %s", error)
            return False
        return True

    def reliability(self, name: str, report: Report, step: int) -> None:
        """Log the reliability diagram of a report."""
        from segcal.viz.plots import figure_png, reliability_diagram  # loads matplotlib

        png = figure_png(lambda: reliability_diagram(report), dpi=100)
        self.image(name, np.asarray(Image.open(io.BytesIO(png)).convert("RGB")), step)


def tensorboard(writer: Any) -> Tracker:
    """A tracker over a `SummaryWriter`."""
    return Tracker(
        lambda values, step: [writer.add_scalar(name, x, step) for name, x in values.items()],
        lambda name, array, step: writer.add_image(name, array, step, dataformats="HWC"),
        writer.close,
    )


def wandb(run: Any) -> Tracker:
    """A tracker over a run of W&B."""
    from wandb import Image as Shown

    return Tracker(
        lambda values, step: run.log({**values, _STEP: step}),
        lambda name, array, step: run.log({name: Shown(array), _STEP: step}),
        run.finish,
    )


def mlflow(client: Any, run: str) -> Tracker:
    """A tracker over an `MlflowClient` and the number of a run."""
    return Tracker(
        lambda values, step: [client.log_metric(run, n, x, step=step) for n, x in values.items()],
        lambda name, array, step: client.log_image(run, array, key=name, step=step),
        lambda: client.set_terminated(run),
    )


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any], *, step: int) -> Tracker:
    """Begin the run of `folder` in one of `NAMES`; at a later step, continue it."""
    kept = folder / f"{name}.id"  # by which a resumed run goes on
    number = kept.read_text(encoding="utf-8") if step and kept.is_file() else ""
    config, title = dict(settings), folder.resolve().name
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # Events after the resumed step come from the run that was interrupted.
            return tensorboard(SummaryWriter(str(folder), purge_step=step + 1))
        if name == "wandb":
            from wandb import init

            number, project = number or secrets.token_hex(8), os.environ.get("WANDB_PROJECT")
            where: Any = {"project": project or "segcal", "dir": folder, "resume": "allow"}
            run = init(id=number, name=title, config=config, **where)
            run.define_metric("*", step_metric=_STEP, step_sync=True)
            tracker = wandb(run)
        else:
            from mlflow import MlflowClient

            client, wanted = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME") or "segcal"
            if not number:
                found = client.get_experiment_by_name(wanted)
                place = found.experiment_id if found else client.create_experiment(wanted)
                number = client.create_run(place, run_name=title).info.run_id
                client.log_dict(number, config, "config.yaml")
            tracker = mlflow(client, number)
    except ImportError:
        raise ValueError(f"--{name} needs a package: pip install 'segcal[{name}]'") from None
    except Exception as error:  # of a server or an account
        raise ValueError(f"--{name} cannot begin a run: {one_line(error):.200}") from error
    with atomic_write(kept) as file:
        file.write(number)
    return tracker


def of_logger(logger: Any) -> Tracker | None:
    """The tracker over a logger of Lightning, if it is of one of the three."""
    kind = type(logger).__name__
    if kind == "MLFlowLogger":
        return mlflow(logger.experiment, logger.run_id)
    over = {"TensorBoardLogger": tensorboard, "WandbLogger": wandb}.get(kind)
    return None if over is None else over(logger.experiment)
