"""Overlays: which images to draw, their panels, and the arrays that these are drawn from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from segcal.evaluation.evaluate import LogitMap, calibrated, count_batch, new_meter
from segcal.evaluation.sources import Kind, NamedPredictions, Predictions
from segcal.files import BadFile
from segcal.metrics import Report
from segcal.viz.overlay import Overlay, Picture, make_overlay, shift_panel

log = logging.getLogger(__name__)
WORST, RANDOM, _NO_IMAGES = "worst", "random", "none"


def require_images(which: str, source: NamedPredictions) -> None:
    """Raise if `which` (see `choose`) names images that `source` does not have."""
    for name in _names(which):
        if name not in source.names:
            raise ValueError(
                "Expected overlays worst, random, none or names of images such as "
                f"{source.names[0]}, but got {name}"
            )


def choose(which: str, number: int, source: NamedPredictions, report: Report) -> list[int]:
    """Indices of the images to draw.

    Args:
        which: worst (by each image's own ECE), random (always the same ones), none, or the names
            of images, with commas between them.
        number: how many at most; does not limit names.
        source: the images.
        report: of `source`; it knows the worst.
    """
    index = {name: i for i, name in enumerate(source.names) if name not in source.skipped}
    if which == _NO_IMAGES or number < 1:
        return []
    if which == RANDOM:
        order = np.random.default_rng(0).permutation(len(index))
        return [list(index.values())[i] for i in sorted(order[:number])]
    names = _names(which) or [image.name for image in report.worst_images[:number]]
    return [index[name] for name in names if name in index]


def _names(which: str) -> list[str]:
    words = [] if which in (WORST, RANDOM, _NO_IMAGES) else which.split(",")
    return [word.strip() for word in words]


def draw(
    source: NamedPredictions, indices: Sequence[int], calibrators: Mapping[str, LogitMap | None]
) -> dict[str, list[Overlay]]:
    """The chosen images by name of calibrator, calibrated by each; none for classification.

    Of sigmoid outputs, the class that is calibrated worst in the image is drawn. Of a volume three
    planes are drawn, one per axis: see `worst_planes`.
    """
    drawn: dict[str, list[Overlay]] = {name: [] for name in calibrators}
    for index in indices:
        batch = next(source.parts(index))
        if batch.values.ndim == 5 and not batch.multilabel:
            image = _image(source, index)
            for plane in worst_planes(source, index):
                shown = None if image is None else _grey(plane.of(image))
                for name, calibrator in calibrators.items():
                    cut = plane.cut(source, index, calibrator)
                    drawn[name].append(_overlay(source, index, shown, cut))
        elif batch.values.ndim == 4:
            image = _image(source, index)
            for name, calibrator in calibrators.items():
                found = calibrated(batch, calibrator)
                drawn[name].append(_overlay(source, index, image, found))
    return drawn


@dataclass(frozen=True)
class Plane:
    """One plane through a volume.

    Attributes:
        axis: of (D, H, W) that it is perpendicular to.
        place: its place along that axis.
    """

    axis: int
    place: int

    def of(self, volume: np.ndarray) -> np.ndarray:
        """The plane of a (D, H, W, ...) volume."""
        return np.take(volume, self.place, self.axis)

    def cut(self, source: NamedPredictions, index: int, calibrator: LogitMap | None) -> Predictions:
        """The predictions of the plane, calibrated."""
        values, labels, name, start = [], [], "", 0
        kind: Kind = "logits"
        for part in source.parts(index):
            assert part.names is not None
            name, depth = part.names[0], part.labels.shape[1]
            place = self.place - start if self.axis == 0 else self.place
            if self.axis != 0 or 0 <= place < depth:
                scaled = calibrated(part, calibrator)
                # Copies, because a view would keep the whole part in memory.
                values.append(scaled.values.select(self.axis + 2, place).clone())
                labels.append(scaled.labels.select(self.axis + 1, place).clone())
                kind = scaled.kind
            start += depth
        return Predictions(
            [f"{name} {'zyx'[self.axis]}={self.place}"],
            kind,
            torch.cat(values, 2),
            torch.cat(labels, 1),
        )


def worst_planes(source: NamedPredictions, index: int) -> list[Plane]:
    """For each axis, the plane with the largest product of its ECE and its number of voxels."""
    errors: list[list[Tensor]] = [[], [], []]  # by axis, (planes, bins) sums of the gaps
    for part in source.parts(index):
        for axis, found in enumerate(errors):
            meter = new_meter(source, per_image=True)
            planes = replace(
                part,
                names=None,
                part=None,
                values=part.values[0].movedim(axis + 1, 0),  # (planes, C, *)
                labels=part.labels[0].movedim(axis, 0),
            )
            count_batch([meter], planes)
            gap = meter.image_sums().top_gap
            if axis == 0 or not found:
                found.append(gap)
            else:  # more rows of the same planes
                found[0] += gap
    return [
        Plane(axis, int(torch.cat(found).abs().sum(1).argmax()))
        for axis, found in enumerate(errors)
    ]


def _grey(image: np.ndarray) -> np.ndarray:
    """(H, W) numbers of any range as uint8; the lowest and the highest 1 % are clipped."""
    if image.dtype == np.uint8:
        return image
    low, high = np.percentile(image, (1, 99))
    return (255 * np.clip((image - low) / max(high - low, 1e-6), 0, 1)).astype(np.uint8)


def draw_shifts(
    clean: NamedPredictions,
    shifted: Mapping[str, NamedPredictions],
    index: int,
    calibrators: Mapping[str, LogitMap | None],
) -> Picture | None:
    """The panel of one image, clean and under shifts that kept its name and its labels.

    Args:
        clean: the images as they are.
        shifted: the same under shifts, by what rows are called.
        index: of the image in `clean`.
        calibrators: by name.

    Returns:
        None for classification.
    """
    name, labels = clean.names[index], clean[index].labels
    if labels.ndim != 3:  # or sigmoid outputs
        return None
    views = []
    for title, source in {"clean": clean, **shifted}.items():
        if name not in source.names or name in source.skipped:
            continue
        place = list(source.names).index(name)
        batch = source[place]
        if batch.labels.shape != labels.shape or (batch.labels != labels).any():
            continue
        probs = {
            method: calibrated(batch, calibrator).probs[0].float().cpu().numpy()
            for method, calibrator in calibrators.items()
        }
        views.append((title, _image(source, place), probs))
    png = shift_panel(
        views,
        labels[0].cpu().numpy(),
        palette=clean.palette,
        ignore_index=clean.ignore_index,
    )
    return Picture(name, png)


def _image(source: NamedPredictions, index: int) -> np.ndarray | None:
    try:
        return source.image(index)
    except BadFile as error:
        log.warning("drawn without its image: %s", error)
        return None


def _overlay(
    source: NamedPredictions, index: int, image: np.ndarray | None, batch: Predictions
) -> Overlay:
    assert batch.names is not None  # images are drawn by name
    meter = new_meter(source)
    count_batch([meter], batch)
    report = meter.compute()
    probs, labels = batch.probs[0].float().cpu().numpy(), batch.labels[0].cpu().numpy()
    name, class_names, palette = batch.names[0], source.class_names, source.palette
    if batch.multilabel:
        c = int(np.argmax(np.nan_to_num(report.class_ece, nan=-1.0)))
        name, class_names = f"{name}, {class_names[c]}", (f"not {class_names[c]}", class_names[c])
        palette = None  # that of the source has a colour for each class, none for its absence
        probs, labels = np.stack([1 - probs[c], probs[c]]), labels[c]
    return make_overlay(
        image,
        probs,
        labels,
        class_names=class_names,
        palette=palette,
        ignore_index=source.ignore_index,
        name=name,
        ece=report.ece,
        of=source.names[index],
    )
