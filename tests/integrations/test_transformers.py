"""The Trainer of Transformers with a randomly initialised SegFormer."""

import numpy as np
import pytest
import torch
from transformers import (
    EvalPrediction,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainingArguments,
)

from segcal.integrations.transformers import TrainerLoss, TrainerMetrics
from segcal.losses import build_loss
from segcal.sources.source import resize
from tests.support.framework_batches import CLASSES, assert_same, batches, report_of


class Scenes(torch.utils.data.Dataset):
    """Images of four quadrants, each of one colour, whose number is the label; a border of 255."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        labels = torch.arange(CLASSES).roll(index).view(2, 2).repeat_interleave(16, 0)
        labels = labels.repeat_interleave(16, 1)
        image = torch.eye(CLASSES)[labels][..., :3].permute(2, 0, 1).contiguous()
        labels[:2] = 255
        return {"pixel_values": image, "labels": labels}


def segformer():
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=CLASSES,
        classifier_dropout_prob=0.0,
    )
    return SegformerForSemanticSegmentation(config)


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=3e-3,
        **options,
    )


@pytest.mark.parametrize("in_batches", [True, False])
def test_a_segformer_is_trained_and_evaluated(tmp_path, in_batches):
    metrics = TrainerMetrics(CLASSES, scores=("ece", "miou", "nll"))
    trainer = Trainer(
        model=segformer(),
        args=arguments(
            tmp_path,
            max_steps=30,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=3,
            batch_eval_metrics=in_batches,
        ),
        train_dataset=Scenes(),
        eval_dataset=Scenes(),
        compute_loss_func=TrainerLoss("fl+mdca", gamma=2.0),
        compute_metrics=metrics,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.9 * before["eval_loss"]
    assert after["eval_nll"] < before["eval_nll"]
    with torch.no_grad():
        items = [Scenes()[i] for i in range(8)]
        pairs = []
        for item in items:
            logits = trainer.model.eval()(item["pixel_values"][None]).logits
            assert logits.shape[2:] == (8, 8)  # a quarter of the labels
            pairs.append((resize(logits, (32, 32)), item["labels"][None]))
    report = report_of(pairs)
    for score in ("ece", "miou", "nll"):
        assert after[f"eval_{score}"] == pytest.approx(getattr(report, score), rel=1e-4)
    assert metrics.report.protocol.pixels == 8 * 30 * 32


def test_parts_of_a_batch_add_up_to_the_batch(tmp_path):
    """Gradient accumulation: two parts of four images train as one batch of eight does."""
    weights = []
    for steps in (1, 2):
        trainer = Trainer(
            model=segformer(),
            args=arguments(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=8 // steps,
                gradient_accumulation_steps=steps,
                optim="sgd",
                max_grad_norm=0.0,
                seed=1,
            ),
            train_dataset=Scenes(),
            compute_loss_func=TrainerLoss("nll"),  # a mean over pixels: exact in parts
        )
        trainer.model.apply(_without_batch_norm)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in segformer().parameters()])
    step = weights[0] - start
    assert float(step.norm()) > 0
    assert float((weights[1] - weights[0]).norm()) < 1e-3 * float(step.norm())


def _without_batch_norm(module):
    """Its batch statistics depend on how a batch is divided."""
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum, module.track_running_stats = 0.0, True
        module.forward = lambda x: x


def test_the_loss_is_that_of_the_library_and_padding_counts_for_nothing():
    (logits, labels), (_, more) = batches(2)
    padded = labels.masked_fill(more == 0, -100)
    loss = TrainerLoss("fl+mdca")((logits,), padded)
    assert loss == build_loss("fl+mdca")(logits, labels.masked_fill(more == 0, 255))


def test_numpy_arrays_in_a_tuple_are_counted():
    ((logits, labels),) = data = batches(1)
    metrics = TrainerMetrics(CLASSES, per_image=True)
    found = metrics(
        EvalPrediction(predictions=(logits.numpy(), np.zeros(3)), label_ids=labels.numpy())
    )
    assert found["ece"] == metrics.report.ece
    assert_same(metrics.report, report_of(data, per_image=True))
