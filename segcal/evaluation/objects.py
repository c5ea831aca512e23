"""Objects of an evaluation: their calibrator, their thresholds, and pictures of the worst."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from segcal import posthoc
from segcal.evaluation.overlays import grey
from segcal.metrics.objects import ObjectCounter
from segcal.metrics.report import ObjectReport
from segcal.metrics.scores import SCORES, Array
from segcal.metrics.triage import Target, choose_threshold
from segcal.posthoc import NONE, Calibrator
from segcal.sources.source import Source
from segcal.viz.overlay import Tile, draw_crops

log = logging.getLogger(__name__)


def fit_objects(method: str, images: Sequence[tuple[Array, Array]]) -> Calibrator:
    """The fitted map from the confidence of an object to the probability that it is real.

    `object_probability(calibrator)` applies it. As every fit, it is judged on images that it was
    not fitted on, and is the identity where it would make their NLL worse.

    Args:
        method: ts, beta or isotonic; all are monotone.
        images: for each image the (n,) confidences of its objects, such as the IoU that SAM
            predicts for its masks, and whether each is real.
    """
    real = np.concatenate([np.zeros(0, bool), *(hits for _, hits in images)])
    if real.all() or not real.any():
        kind = "real" if len(real) and real.all() else "false"
        raise ValueError(
            f"objects cannot be calibrated: all {len(real)} of the hold-out are {kind}"
        )
    calibrator: Calibrator = posthoc.CALIBRATORS[method](sync=False)
    pairs = [
        (_logits(confidence), torch.from_numpy(np.array(hits, np.int64))[None])
        for confidence, hits in images
        if len(hits)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(pairs)
    for warning in caught:
        log.warning("objects: %s", warning.message)
    return calibrator


def object_probability(calibrator: Calibrator) -> Callable[[Array], Array]:
    """The fitted map of (n,) confidences."""

    def probability(confidence: Array) -> Array:
        found: Array = calibrator.predict_proba(_logits(confidence))[0, 1].numpy()
        return found

    return probability


def _logits(confidence: Array) -> torch.Tensor:
    """(1, 2, n) logits of "false" and "real", whose softmax gives the confidence."""
    z = torch.from_numpy(np.array(confidence, np.float64)).logit(1e-7)
    return torch.stack([-z / 2, z / 2])[None]


def object_reports(
    test: ObjectCounter,
    holdout: ObjectCounter | None,
    calibrator: Calibrator | None,
    targets: Sequence[Target],
    *,
    num_bins: int,
    resamples: int,
) -> tuple[ObjectReport, ...]:
    """The report of the objects as they are, and after their calibrator, if there is one.

    Args:
        test: the objects to report.
        holdout: the objects that thresholds are chosen on.
        calibrator: of `fit_objects`.
        targets: precisions that thresholds shall reach.
        num_bins: bins of confidence.
        resamples: resamples over the images, for intervals; 0 for none.
    """
    maps: dict[str, Callable[[Array], Array] | None] = {NONE: None}
    if calibrator is not None:
        maps[calibrator.name] = object_probability(calibrator)
    reports = []
    for name, confidence in maps.items():
        report = test.compute(confidence, name=name, num_bins=num_bins, resamples=resamples)
        points = []
        for target in targets:
            assert holdout is not None
            chosen_on = holdout.compute(confidence, name=name, resamples=0)
            threshold = choose_threshold(chosen_on.fine, target)
            points.append(test.point(str(target), threshold, chosen_on, confidence))
        reports.append(replace(report, points=tuple(points)))
    return tuple(reports)


def object_note(objects: Sequence[ObjectReport]) -> str:
    """How many objects are shown and are real, and how sure the network is of them."""
    share, whole = SCORES["accuracy"].text, objects[0].whole
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
