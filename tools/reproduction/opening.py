"""The panels of the paper's first figure.

Which image a panel shows is decided by a rule about the network trained with NLL alone, stated over
the panel; what MDCA does on it is then whatever it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from reproduction.figures import FigureMaker, first_folder, first_reports, row_of
from segcal import viz
from segcal.data.samples import Samples
from segcal.data.shift import parse_shifts
from segcal.sources.network import NetworkSource, RunSource
from segcal.sweep.results import Results
from segcal.viz.plots import new_figure, plain
from segcal.viz.style import run_style

LOSSES = ("nll", "nll+mdca")
_IMAGES, _RARE, _PHOTOS, _MASKS = range(4)  # places in the configs of the sweep
_BARS = 3  # classes shown beside an image


@dataclass(frozen=True)
class Answers:
    """What the networks say of a set of images.

    Attributes:
        source: the images.
        labels: (n,) their classes.
        probs: (n, C) by loss.
        class_names: C names.
    """

    source: NetworkSource
    labels: Tensor
    probs: Mapping[str, Tensor]
    class_names: tuple[str, ...]


def draw_panels(results: Sequence[Results]) -> dict[str, Figure]:
    """Panels a to f."""
    (found,) = results
    shown = answers(found, _IMAGES)
    rare = answers(found, _RARE)
    inside = answers(found, _PHOTOS, part="holdout")
    outside = answers(found, _PHOTOS, shifted=True)
    return {
        "_a": image_and_answers(shown, surest_mistake(shown), "NLL's surest mistake"),
        "_b": image_and_answers(rare, typical_of_rarest(rare), "rarest class, typical for NLL"),
        "_c": image_and_answers(inside, surest_hit(inside), "in domain: NLL's surest hit"),
        "_d": image_and_answers(outside, surest_mistake(outside), "out of it: its surest mistake"),
        "_e": activation_maps(found),
        "_f": viz.classwise_reliability(first_reports(found, _IMAGES)),
    }


def answers(results: Results, place: int, *, part: str = "test", shifted: bool = False) -> Answers:
    """What the networks of the first seed say of the test set, under shift, or of the hold-out."""
    probs = {}
    for loss in LOSSES:
        source: NetworkSource
        source = RunSource(folder_of(results, place, loss), split=part, workers=0)
        if shifted:
            pacs = source.data_config is not None and source.data_config.name == "pacs"
            (shift,) = parse_shifts("domain:art" if pacs else "rotation:15")
            source = source.shifted(shift)
        batches = list(source)
        probs[loss] = torch.cat([batch.probs.float() for batch in batches])
    labels = torch.cat([batch.labels for batch in batches if batch.labels is not None])
    return Answers(source, labels, probs, source.class_names)


def folder_of(results: Results, place: int, loss: str) -> Path:
    """The folder of the first seed's run of a loss, with the config at `place`."""
    return first_folder(results, row_of(results, results.sweep.config[place], loss))


def surest_mistake(answered: Answers) -> int:
    """The wrong prediction of NLL with the highest confidence (the surest of all if none)."""
    confidence, predicted = answered.probs["nll"].max(1)
    wrong = predicted != answered.labels
    return int(torch.where(wrong, confidence, confidence - 1).argmax())


def surest_hit(answered: Answers) -> int:
    """The right prediction of NLL with the highest confidence."""
    confidence, predicted = answered.probs["nll"].max(1)
    return int(torch.where(predicted == answered.labels, confidence, 0).argmax())


def typical_of_rarest(answered: Answers) -> int:
    """Of the last class, the rarest in training: the median image by NLL's probability for it."""
    rarest = len(answered.class_names) - 1
    at = (answered.labels == rarest).nonzero().squeeze(1)
    return int(at[answered.probs["nll"][at, rarest].argsort()[len(at) // 2]])


def image_and_answers(answered: Answers, index: int, rule: str) -> Figure:
    """An image, and the likeliest classes for it under both losses."""
    figure = new_figure(6.4, 2.8)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    left.imshow(answered.source.image(index))
    left.set_axis_off()
    label = int(answered.labels[index])
    left.set_title(f"label: {plain(answered.class_names[label])}")
    probs = {loss: each[index] for loss, each in answered.probs.items()}
    draw_answers(right, probs, answered.class_names)
    right.set_title(rule)
    return figure


def draw_answers(ax: Axes, probs: Mapping[str, Tensor], class_names: tuple[str, ...]) -> None:
    """Bars of the likeliest classes, those of all losses side by side."""
    likeliest = torch.stack(list(probs.values())).amax(0).argsort(descending=True)[:_BARS]
    places = np.arange(len(likeliest))
    height = 0.8 / len(probs)
    for i, (loss, p) in enumerate(probs.items()):
        lengths, color = 100 * p[likeliest].numpy(), run_style(i)["color"]
        ax.barh(places + i * height, lengths, height, label=loss, color=color)
    names = [plain(class_names[int(c)]) for c in likeliest]
    ax.set_yticks(places + height * (len(probs) - 1) / 2, names)
    ax.set(xlim=(0, 100), xlabel="confidence (%)")
    ax.invert_yaxis()
    ax.legend(loc="lower right")


def activation_maps(results: Results, images: int = 2) -> Figure:
    """Grad-CAM (Selvaraju et al. 2017) of a class in its pixels: the image and both networks.

    Temperature scaling, which the paper compares with, divides all logits by one number: it
    leaves a normalised activation map as it was. So the map of NLL is that of NLL+TS too.
    """
    figure = new_figure(2.6 * (1 + len(LOSSES)), 2.8 * images)
    axes = figure.subplots(images, 1 + len(LOSSES), squeeze=False)
    for column, loss in enumerate(LOSSES, start=1):
        source = RunSource(folder_of(results, _MASKS, loss))
        for row, (index, label) in zip(axes, _objects(source.samples, images), strict=True):
            picture = source.image(index)
            image, target = source.samples[index]
            name = source.class_names[label]
            row[0].imshow(picture)
            row[0].set_title(f"label: {plain(name)}")
            row[column].imshow(picture, alpha=0.5)
            row[column].imshow(grad_cam(source.model, image, target == label, label), alpha=0.5)
            row[column].set_title("nll, nll + ts" if loss == "nll" else loss)
    for ax in axes.flat:
        ax.set_axis_off()
    return figure


def _objects(samples: Samples, wanted: int) -> list[tuple[int, int]]:
    """(image, class) of the first images, each with another class that fills most of it."""
    found: dict[int, int] = {}
    for index in range(len(samples)):
        label = samples[index][1]
        classes, counts = label[(label != 0) & (label != 255)].unique(return_counts=True)
        if len(classes):
            found.setdefault(int(classes[counts.argmax()]), index)
        if len(found) == wanted:
            break
    return [(index, label) for label, index in found.items()]


def grad_cam(model: nn.Module, image: Tensor, mask: Tensor, label: int) -> np.ndarray:
    """(H, W) map in 0..1 of what makes the pixels in `mask` be of class `label`."""
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import SemanticSegmentationTarget
    except ImportError:
        raise ValueError(
            "Expected grad-cam to be installed for class activation maps, but it is not: "
            'pip install "segcal[cam]"'
        ) from None
    with GradCAM(model, [deepest(model, image)]) as cam:
        target = SemanticSegmentationTarget(label, mask.numpy().astype(np.float32))
        return cam(image.unsqueeze(0), [target])[0]


@torch.no_grad()
def deepest(model: nn.Module, image: Tensor) -> nn.Module:
    """The last convolution of the encoder: the smallest map there is, with the most channels.

    Maps of a single pixel do not count: they say nothing about where.
    """
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def note(layer: nn.Module, _: object, output: Tensor) -> None:
        if output[0, 0].numel() > 1:
            sizes[layer] = (-output[0, 0].numel(), output.shape[1])

    layers = [m for m in getattr(model, "encoder", model).modules() if isinstance(m, nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    model(image.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    best = max(sizes.values())
    return [layer for layer, size in sizes.items() if size == best][-1]


OPENING = FigureMaker("opening", lambda sweep: [sweep], draw_panels)
