"""Adapters whose framework runs on several ranks: uneven shares give what one rank gives."""

import os

import pytest
import torch

from segcal.losses import build_loss
from segcal.metrics import Report
from tests.support.framework_batches import CLASSES, batches, report_of
from tests.support.ranks import free_port, run_on_ranks

pytestmark = pytest.mark.slow  # starts processes

IMAGES = 5  # rank 0 has images 0, 2, 4, rank 1 has 1 and 3


def _images():
    return [
        (logits[None], label[None])
        for pair in batches(IMAGES, images=1)
        for logits, label in zip(*pair, strict=True)
    ]


def _on_rank(rank):
    from mmengine.evaluator import Evaluator
    from mmengine.structures import BaseDataElement, PixelData

    from segcal.integrations.mmengine import CalibrationMetric as ForMmengine
    from segcal.integrations.monai import CalibrationMetric as ForMonai
    from segcal.integrations.torchmetrics import CalibrationMetric as ForTorchmetrics

    options = {"per_image": True, "scores": ("ece", "image_ece")}
    data = _images()
    torchmetrics = ForTorchmetrics(CLASSES, **options)
    monai = ForMonai(CLASSES, **options)
    for logits, labels in data[rank::2]:
        torchmetrics.update(logits, labels)
        monai(logits, labels[:, None])
    mmengine = Evaluator(ForMmengine(CLASSES, **options))
    for logits, labels in [*data, data[0]][rank::2]:  # as its sampler does it
        sample = BaseDataElement()
        sample.seg_logits, sample.gt_sem_seg = PixelData(data=logits[0]), PixelData(data=labels)
        mmengine.process([sample])
    return {
        "torchmetrics": torchmetrics.compute(),
        "monai": monai.aggregate(),
        "mmengine": mmengine.evaluate(IMAGES),
        "low": torchmetrics.report().intervals["ece"].low,
        "own": int(torchmetrics.sum_images),
    }


def test_ranks_together_count_every_image_once():
    report = report_of(_images(), per_image=True)
    for rank, found in enumerate(run_on_ranks(_on_rank)):
        for framework in ("torchmetrics", "monai", "mmengine"):
            prefix = "calibration/" if framework == "mmengine" else ""
            for score in ("ece", "image_ece"):
                value = torch.as_tensor(found[framework][prefix + score]).item()
                assert value == pytest.approx(getattr(report, score), rel=1e-6), framework
        assert found["low"] == pytest.approx(report.intervals["ece"].low, rel=1e-6)
        assert found["own"] == (3, 2)[rank]  # torchmetrics gives a rank its own sums back


class Scored(torch.utils.data.Dataset):
    """The logits of an image as its input, for networks that scale them."""

    def __init__(self, images=6):
        self._pairs = batches(images, images=1)

    def __len__(self):
        return len(self._pairs)

    def __getitem__(self, index):
        logits, labels = self._pairs[index]
        return logits[0], labels[0]


def _lightning(folder):
    import lightning.pytorch as pl

    from segcal.integrations.lightning import CalibrationCallback

    class Scaling(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.criterion = build_loss("fl+mdca")

        def training_step(self, batch, index):
            return self.criterion(self.scale * batch[0], batch[1])

        def validation_step(self, batch, index):
            return self.scale * batch[0]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    callback = CalibrationCallback(CLASSES, folder=folder, per_image=True)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[callback],
    )
    module = Scaling()
    train = torch.utils.data.DataLoader(Scored(), batch_size=1)
    trainer.fit(module, train, torch.utils.data.DataLoader(Scored(), batch_size=1))
    return {
        "ece": callback.reports["val"].ece,
        "logged": float(trainer.callback_metrics["val/ece"]),
        "images": callback.reports["val"].protocol.images,
        "scale": module.scale.detach(),
    }


class Network(torch.nn.Module):
    """One number that scales the logits."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs, labels=None):
        return {"logits": self.scale * inputs}


class Named(Scored):
    def __getitem__(self, index):
        logits, labels = super().__getitem__(index)
        return {"inputs": logits, "labels": labels}


def _transformers(folder, **options):
    from transformers import Trainer, TrainingArguments

    from segcal.integrations.transformers import TrainerLoss, TrainerMetrics

    metrics = TrainerMetrics(CLASSES, scores=("ece", "nll"))
    trainer = Trainer(
        model=Network(),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            save_strategy="no",
            max_steps=3,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            batch_eval_metrics=True,
            **options,
        ),
        train_dataset=Named(),
        eval_dataset=Named(),
        compute_loss_func=TrainerLoss("fl+mdca", gamma=2.0),
        compute_metrics=metrics,
    )
    trainer.train()
    after = trainer.evaluate()
    return {
        "scale": trainer.model.scale.detach().clone(),
        "ece": after["eval_ece"],
        "pixels": metrics.report.protocol.pixels,
    }


def _trainers_on_rank(rank, port, folder):
    """Both trainers find the ranks by what torchrun sets."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0}
    values |= {"TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in values.items()})
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 1}
    return {
        "lightning": _lightning(folder),
        "transformers": _transformers(f"{folder}/two", **sizes),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each rank found, and the folder of the callback."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(_trainers_on_rank, free_port(), str(folder)), folder


def test_the_callback_of_lightning_counts_the_images_of_all_ranks(trained):
    found, folder = [one["lightning"] for one in trained[0]], trained[1]
    scale = found[0]["scale"]
    report = report_of([(scale * x[None], y[None]) for x, y in Scored()], per_image=True)
    for one in found:
        assert one["scale"] == scale != 0.5 and one["images"] == 6
        assert one["ece"] == pytest.approx(report.ece, rel=1e-6)
        assert one["logged"] == pytest.approx(report.ece, rel=1e-5)
    assert Report.load(folder / "val/report.json").ece == pytest.approx(report.ece, rel=1e-6)


def test_loss_and_metrics_of_transformers_on_two_ranks_are_those_of_one(trained, tmp_path):
    """All six images are a batch, on one rank or on two: the statistics of MDCA are of all."""
    sizes = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 2}
    one = _transformers(str(tmp_path), **sizes)
    assert abs(float(one["scale"]) - 0.5) > 1e-2
    report = report_of([(one["scale"] * x[None], y[None]) for x, y in Scored()])
    for found in (each["transformers"] for each in trained[0]):
        assert float(found["scale"]) == pytest.approx(float(one["scale"]), rel=1e-5)
        assert found["ece"] == pytest.approx(report.ece, rel=1e-5)
        assert found["pixels"] == one["pixels"] == report.protocol.pixels
