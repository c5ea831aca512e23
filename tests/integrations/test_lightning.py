"""Lightning: the callback in a real Trainer on the embedded scenes, and the metric in a module."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from segcal.data import build as build_data
from segcal.data.options import DataConfig
from segcal.integrations.lightning import CalibrationCallback, logits_and_labels
from segcal.integrations.torchmetrics import CalibrationMetric
from segcal.losses import build_loss
from segcal.metrics import CalibrationMeter, Report

CLASSES = 11


class Network(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, CLASSES, 1),
        )  # logits at half the size of the labels
        self.criterion = build_loss("fl+mdca")
        self.metric = CalibrationMetric(CLASSES, scores=("ece", "nll"))

    def logits(self, images):
        return torch.nn.functional.interpolate(self.network(images), scale_factor=2.0)

    def training_step(self, batch, index):
        return self.criterion(self.logits(batch[0]), batch[1])

    def validation_step(self, batch, index, dataloader_idx=0):
        logits = self.logits(batch[0])
        if dataloader_idx == 0:
            self.metric.update(logits, batch[1])
        return {"logits": logits}

    def on_validation_epoch_end(self):
        found = self.metric.compute()
        self.log_dict({f"metric/{name}": value for name, value in found.items()})
        self.metric.reset()

    def test_step(self, batch, index):
        return self.network(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after fit and test, its module, callback, folder, and what it has logged."""
    folder = tmp_path_factory.mktemp("lightning")
    data = build_data(DataConfig(name="scenes"), seed=0)
    train, test = Subset(data.train, range(16)), Subset(data.test, range(10))
    callback = CalibrationCallback(CLASSES, folder=folder / "calibration", per_image=True)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
    )
    module = Network()
    loaders = [DataLoader(test, batch_size=4), DataLoader(train, batch_size=4)]
    trainer.fit(module, DataLoader(train, batch_size=4, shuffle=True), loaders)
    logged = dict(trainer.callback_metrics)
    trainer.test(module, loaders[0], verbose=False)
    return trainer, module, callback, folder / "calibration", logged, test


def expected(module, images):
    meter = CalibrationMeter(CLASSES, per_image=True)
    with torch.no_grad():
        for image, label in (images[i] for i in range(len(images))):
            meter.update(module.logits(image[None]), label[None])
    return meter.compute()


def test_scores_of_every_loader_are_logged(trained):
    _, module, callback, _, logged, images = trained
    report = expected(module, images)
    for score in ("accuracy", "miou", "nll", "ece", "sce"):
        assert float(logged[f"val/{score}"]) == pytest.approx(getattr(report, score), rel=1e-5)
    assert set(callback.reports) == {"val", "val/1", "test"}
    assert callback.reports["val"].protocol.images == 10
    assert callback.reports["val/1"].protocol.images == 16


def test_the_metric_of_torchmetrics_logs_the_same_with_log_dict(trained):
    logged = trained[4]
    assert float(logged["metric/ece"]) == pytest.approx(float(logged["val/ece"]), rel=1e-5)
    assert float(logged["metric/nll"]) == pytest.approx(float(logged["val/nll"]), rel=1e-5)


def test_reports_and_pages_are_written(trained):
    trainer, _, callback, folder, _, _ = trained
    for name, report in callback.reports.items():
        assert Report.load(folder / name / "report.json").ece == report.ece
        assert f"{100 * report.ece:.2f}" in (folder / name / "report.html").read_text()
    assert float(trainer.callback_metrics["test/ece"]) == pytest.approx(
        callback.reports["test"].ece, rel=1e-5
    )


def test_smaller_logits_are_resized_to_the_labels(trained):
    """The network's own output, half the size of the labels, is what test_step returns."""
    _, module, callback, _, _, images = trained
    meter = CalibrationMeter(CLASSES)
    with torch.no_grad():
        for image, label in (images[i] for i in range(len(images))):
            logits = module.network(image[None])
            assert logits.shape[2] == label.shape[0] // 2
            meter.update(
                torch.nn.functional.interpolate(logits, label.shape, mode="bilinear"), label[None]
            )
    report, expected = callback.reports["test"], meter.compute()
    assert report.protocol.pixels == expected.protocol.pixels
    assert (report.ece, report.nll) == pytest.approx((expected.ece, expected.nll), rel=1e-5)


def test_where_logits_and_labels_are_found():
    logits, labels = torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long)
    for outputs, batch in [
        (logits, (None, labels)),
        ((logits, 1), [None, labels, "name"]),
        ({"out": logits, "labels": labels}, None),
        (logits, {"image": None, "labels": labels}),
    ]:
        found = logits_and_labels(outputs, batch)
        assert found[0] is logits and found[1] is labels
    with pytest.raises(ValueError, match="return the logits"):
        logits_and_labels(None, (None, labels))
    with pytest.raises(ValueError, match="no labels"):
        logits_and_labels(logits, logits)
