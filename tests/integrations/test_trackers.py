"""Trackers: the real packages, offline; W&B and MLflow where they are installed."""

import sys
from contextlib import suppress

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import loggers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Subset

from segcal.data import build as build_data
from segcal.data.options import DataConfig
from segcal.integrations import trackers
from segcal.integrations.lightning import CalibrationCallback
from segcal.training import checkpoint
from segcal.training import trainer as training
from tests.support.tiny import trainer

LOGGED = []  # what W&B was given


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    LOGGED.clear()
    with suppress(ImportError):
        from wandb import Run

        log = Run.log
        monkeypatch.setattr(Run, "log", lambda run, row: (LOGGED.append(row), log(run, row)))


def in_tensorboard(folder, expected):
    events = EventAccumulator(str(folder))
    events.Reload()
    found = {p.step: p.value for p in events.Scalars("holdout/ece")}
    assert found == pytest.approx(expected, rel=1e-6)
    assert [p.step for p in events.Images("holdout/reliability")] == [*expected]


def in_mlflow(folder, expected):
    from mlflow import MlflowClient

    client, run = MlflowClient(), (folder / "mlflow.id").read_text()
    found = {p.step: p.value for p in client.get_metric_history(run, "holdout/ece")}
    assert found == pytest.approx(expected, rel=1e-6)
    paths = [file.path for file in client.list_artifacts(run, "images") if ".png" in file.path]
    assert sorted(int(path.split("+step+")[1].split("+")[0]) for path in paths) == [*expected]


def in_wandb(folder, expected):
    """Its files have no public reader: the numbers are those that `offline` saw it take."""
    rows = [row for row in LOGGED if "holdout/ece" in row]
    assert {row["trainer/global_step"]: row["holdout/ece"] for row in rows} == expected
    runs = folder.glob(f"wandb/offline-run-*-{(folder / 'wandb.id').read_text()}")
    images = [path for run in runs for path in run.glob("files/media/images/holdout/*.png")]
    assert len(images) == len(expected)


FOUND = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}
every_tracker = pytest.mark.parametrize("name", trackers.NAMES)


@every_tracker
def test_scores_and_figures_of_every_epoch_also_of_a_resumed_run(tmp_path, name):
    pytest.importorskip(name)
    folder = tmp_path / "run"
    trainer(folder, epochs=2, **{name: True}).fit()
    kept = {path.name: path.read_text() for path in folder.glob("*.id")}
    resumed = trainer(folder, epochs=3, **{name: True})
    resumed.restore(checkpoint.load_last(folder))
    history = resumed.fit()
    assert kept == {path.name: path.read_text() for path in folder.glob("*.id")}
    assert len(history) == 3
    FOUND[name](folder, {record["step"]: record["holdout/ece"] for record in history})


def test_what_is_not_installed_is_named_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = trainer(tmp_path / "run", wandb=True)
    with pytest.raises(ValueError, match=r"pip install 'segcal\[wandb\]'"):
        run.fit()
    assert run.learner.steps == 0


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ConnectionError("the server is away")

    broken = trackers.Tracker(fail, fail, lambda: None)
    monkeypatch.setattr(training, "open_tracker", lambda *_, **__: broken)
    assert len(trainer(tmp_path / "run", tensorboard=True).fit()) == 3
    assert caplog.text.count("the server is away") == 1


class Network(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 11, 1)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1], ignore_index=255)

    def validation_step(self, batch, index):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@every_tracker
def test_loggers_of_lightning_get_the_figure(tmp_path, name):
    pytest.importorskip(name)
    folder = tmp_path / "logs"
    logger = {
        "tensorboard": lambda: loggers.TensorBoardLogger(folder, name="", version=""),
        "wandb": lambda: loggers.WandbLogger(save_dir=folder, offline=True),
        "mlflow": lambda: loggers.MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"),
    }[name]()
    folder.mkdir(exist_ok=True)
    images = Subset(build_data(DataConfig(name="scenes")).test, range(4))
    module = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=[logger, loggers.CSVLogger(folder)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[CalibrationCallback(11)],
        log_every_n_steps=1,
    )
    loader = DataLoader(images, batch_size=4)
    module.fit(Network(), loader, loader)
    if name == "tensorboard":
        events = EventAccumulator(str(folder))
        events.Reload()
        assert [p.step for p in events.Images("val/reliability")] == [1]
    elif name == "wandb":
        assert (
            len([*folder.glob("wandb/offline-run-*/files/media/images/val/reliability*.png")]) == 1
        )
    else:
        files = logger.experiment.list_artifacts(logger.run_id, "images")
        assert sum(file.path.endswith(".png") for file in files) == 1
