"""Objects of an evaluation: their calibrator, their thresholds, and pictures of the worst."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from segcal import posthoc
from segcal.evaluation.measure import Groups, Watch
from segcal.evaluation.overlays import grey
from segcal.metrics.objects import ObjectCounter, ObjectRule
from segcal.metrics.report import ObjectReport
from segcal.metrics.scores import SCORES, Array
from segcal.metrics.triage import choose_threshold
from segcal.posthoc import NONE, Calibrator
from segcal.sources.source import Batch, Source
from segcal.viz.overlay import Tile, draw_crops

if TYPE_CHECKING:
    from segcal.evaluation.holdout import Choice

log = logging.getLogger(__name__)


def fit_objects(method: str, images: Sequence[tuple[Array, Array]]) -> Calibrator:
    """The fitted map from the confidence of an object to the probability that it is real.

    `object_probability(calibrator)` applies it.

    Args:
        method: ts, beta or isotonic; all are monotone.
        images: for each image the (n,) confidences of its objects, such as the IoU that SAM
            predicts for its masks, and whether each is real.
    """
    images = [image for image in images if len(image[1])]
    real = np.concatenate([np.zeros(0, bool), *(hits for _, hits in images)])
    if real.all() or not real.any():
        kind = "real" if real.any() else "false"
        raise ValueError(
            f"objects cannot be calibrated: all {len(real)} of the hold-out are {kind}"
        )
    calibrator: Calibrator = posthoc.CALIBRATORS[method](sync=False)
    pairs = [
        (_logits(sure), torch.from_numpy(np.array(hits, np.int64))[None]) for sure, hits in images
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(pairs)
    for warning in caught:
        log.warning("objects: %s", warning.message)
    return calibrator


def object_probability(calibrator: Calibrator) -> Callable[[Array], Array]:
    """The fitted map of (n,) confidences."""
    return lambda confidence: calibrator.predict_proba(_logits(confidence))[0, 1].numpy()


def _logits(confidence: Array) -> torch.Tensor:
    """(1, 2, n) logits of "false" and "real", whose softmax gives the confidence."""
    z = torch.from_numpy(np.array(confidence, np.float64)).logit(1e-7)
    return torch.stack([-z / 2, z / 2])[None]


def new_counter(rule: ObjectRule, source: Source) -> ObjectCounter:
    """A counter of the objects in the predictions of `source`."""
    kind = source.num_classes, source.ignore_index
    return ObjectCounter(rule, *kind, multilabel=source.multilabel)


def watch_objects(
    counter: ObjectCounter, reports: Callable[[], tuple[ObjectReport, ...]] = tuple
) -> Watch:
    """The watch of a counter; `reports` makes what it adds to `Report.objects`."""

    def update(batch: Batch, groups: Groups) -> None:
        assert batch.labels is not None
        counter.update(batch.probs, batch.labels, batch.names, groups)

    return Watch(update, counter.sync, lambda report: replace(report, objects=reports()))


def object_reports(
    counter: ObjectCounter, choice: Choice | None, num_bins: int, resamples: int
) -> tuple[ObjectReport, ...]:
    """The report of the objects as they are, and after their calibrator, if there is one.

    `choice` is what was chosen on the objects of a hold-out: their calibrator, and thresholds.
    """
    maps: dict[str, Callable[[Array], Array] | None] = {NONE: None}
    if choice is not None and choice.of_objects is not None:
        maps[choice.of_objects.name] = object_probability(choice.of_objects)
    reports = []
    for name, confidence in maps.items():
        report = counter.compute(confidence, name=name, num_bins=num_bins, resamples=resamples)
        if choice is not None and choice.objects is not None:
            held = choice.objects.compute(confidence, name=name, resamples=0)
            thresholds = {t: choose_threshold(held.fine, t) for t in choice.object_targets}
            points = (counter.point(str(t), x, held, confidence) for t, x in thresholds.items())
            report = replace(report, points=tuple(points))
        reports.append(report)
    return tuple(reports)


def object_note(objects: Sequence[ObjectReport]) -> str:
    """How many objects are shown and are real, and how sure the network is of them."""
    share, whole = SCORES["accuracy"].text, objects[0].whole
    if not whole.predicted:
        return f"No object is shown in place of {whole.truth:,}."
    sure = [f"{share(of.whole.confidence)} after {of.calibration}" for of in objects[1:]]
    return (
        f"{whole.predicted:,} objects are shown in place of {whole.truth:,}, and "
        f"{share(whole.precision)} of them are real. Their mean confidence is "
        f"{', '.join([share(whole.confidence), *sure])}."
    )


def draw_objects(counter: ObjectCounter, source: Source) -> bytes | None:
    """The most confident false objects and the largest missed ones, in one picture."""
    place = {name: i for i, name in enumerate(source.names)}
    tiles: list[list[Tile]] = []
    for crops in (counter.false, counter.missed):
        tiles.append([])
        for crop in crops:
            image = source.image(place[crop.image]) if crop.image in place else None
            if image is not None and crop.plane is not None:
                image = grey(image[crop.plane])
            tiles[-1].append((crop, None if image is None else image[crop.box]))
    return draw_crops(*tiles) if any(tiles) else None
