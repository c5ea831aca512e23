"""Overlays: which images to draw, and the panels of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from segcal.evaluation.measure import count_batch, new_meter
from segcal.files import BadFile
from segcal.metrics import Report
from segcal.sources.source import Batch, LogitMap, Source
from segcal.viz.overlay import Overlay, make_overlay

log = logging.getLogger(__name__)
RULES = ("worst", "random", "none")  # instead of names, with commas between them
_SHOWN_SHIFTS = 4  # each is as large in the page as a drawn image


def require_images(which: str, source: Source) -> None:
    """Raise if `which` (see `choose`) names images that `source` does not have."""
    for name in () if which in RULES else map(str.strip, which.split(",")):
        if name not in source.names:
            example = f" such as {source.names[0]}" if source.names else ""
            raise ValueError(
                f"overlays are {', '.join(RULES)}, or names of images{example}, but not {name}"
            )


def draw_overlays(
    which: str,
    number: int,
    source: Source,
    shifted: Mapping[str, Source],
    calibrators: Mapping[str, Mapping[str, LogitMap | None]],
    report: Report,
) -> dict[str, list[Overlay]]:
    """Some images, and one of them under shifts, by name of calibrator; see `evaluate_source`.

    `calibrators` are by shift ("" for clean images) and name; `report` knows the worst images.
    """
    drawn = draw(source, choose(which, number, source, report), calibrators[""])
    which = "random" if which == "worst" else which  # in the worst images, a shift does little
    for index in choose(which, min(number, 1), source, report):
        for method, some in draw_shifts(source, shifted, index, calibrators).items():
            drawn[method] += some
    return drawn


def choose(which: str, number: int, source: Source, report: Report) -> list[int]:
    """Indices of the images to draw; names are not limited to a number."""
    index = {name: i for i, name in enumerate(source.names) if name not in source.skipped}
    if which == "none" or number < 1:
        return []
    if which == "random":
        order = np.random.default_rng(0).permutation(len(index))
        return [list(index.values())[i] for i in sorted(order[:number])]
    worst = [image.name for image in report.worst_images[:number]]
    names = worst if which == "worst" else map(str.strip, which.split(","))
    return [index[name] for name in names if name in index]


def draw(
    source: Source, indices: list[int], calibrators: Mapping[str, LogitMap | None]
) -> dict[str, list[Overlay]]:
    """The chosen images by name of calibrator, calibrated by each; none for classification.

    Of sigmoid outputs, the class that is calibrated worst in the image is drawn. Of a volume three
    planes are drawn, one per axis: see `worst_planes`.
    """
    drawn: dict[str, list[Overlay]] = {name: [] for name in calibrators}
    for index in indices:
        batch = source[index]
        if source.raters > 1 and batch.labels is not None:  # the labels of the first are drawn
            batch = replace(batch, labels=batch.labels[0])
        volume = batch.values.ndim == 5
        if batch.values.ndim < 4 or (volume and batch.multilabel):
            continue
        try:
            image = source.image(index)
        except BadFile as error:
            log.warning("drawn without its image: %s", error)
            image = None
        planes = worst_planes(source, batch) if volume else []
        for name, calibrator in calibrators.items():
            found = batch.calibrated(calibrator)
            if not volume:
                drawn[name].append(_overlay(source, index, image, found))
            for axis, place in planes:
                cut = None if image is None else grey(np.take(image, place, axis))
                drawn[name].append(_overlay(source, index, cut, _plane(found, axis, place)))
    return drawn


def worst_planes(source: Source, batch: Batch) -> list[tuple[int, int]]:
    """For each axis of a (1, C, D, H, W) volume, (axis, place) of the plane that adds most to ECE.

    That is the plane with the largest product of its ECE and its number of voxels.
    """
    assert batch.labels is not None
    planes = []
    for axis in range(3):
        meter = new_meter(source, per_image=True)
        cut = replace(
            batch,
            names=None,
            values=batch.values[0].movedim(axis + 1, 0),  # (planes, C, *)
            labels=batch.labels[0].movedim(axis, 0),
            spread=None,
        )
        count_batch([meter], cut)
        planes.append((axis, int(meter.image_sums()["top_gap"].abs().sum(1).argmax())))
    return planes


def _plane(batch: Batch, axis: int, place: int) -> Batch:
    """One plane of a volume, perpendicular to an axis of (D, H, W)."""
    assert batch.labels is not None and batch.names is not None
    return replace(
        batch,
        names=[f"{batch.names[0]} {'zyx'[axis]}={place}"],
        values=batch.values.select(axis + 2, place),
        labels=batch.labels.select(axis + 1, place),
        spread={k: v.select(axis + 1, place) for k, v in (batch.spread or {}).items()} or None,
    )


def grey(image: np.ndarray) -> np.ndarray:
    """(H, W) numbers of any range as uint8; the lowest and the highest 1 % are clipped."""
    if image.dtype == np.uint8:
        return image
    low, high = np.percentile(image, (1, 99))
    return (255 * np.clip((image - low) / max(high - low, 1e-6), 0, 1)).astype(np.uint8)


def draw_shifts(
    clean: Source,
    shifted: Mapping[str, Source],
    index: int,
    calibrators: Mapping[str, Mapping[str, LogitMap | None]],
) -> dict[str, list[Overlay]]:
    """One image, clean and under some of the shifts; of a corruption only the middle severity."""
    kinds: dict[str, list[str]] = {}
    for shift in shifted:
        kind, _, value = shift.partition(":")
        kinds.setdefault(kind if value.isdecimal() else shift, []).append(shift)
    chosen = [sorted(same)[len(same) // 2] for same in kinds.values()]
    drawn: dict[str, list[Overlay]] = {method: [] for method in calibrators[""]}
    name = clean.names[index]
    sources = {"clean": clean, **{shift: shifted[shift] for shift in chosen[:_SHOWN_SHIFTS]}}
    for shift, source in sources.items() if shifted else ():
        if name in source.names and name not in source.skipped:
            maps = calibrators.get(shift, calibrators[""])
            found = draw(source, [list(source.names).index(name)], maps)
            for method, some in found.items():
                drawn[method] += [replace(o, name=f"{o.name}, {shift}", of="") for o in some]
    return drawn


def _overlay(source: Source, index: int, image: np.ndarray | None, batch: Batch) -> Overlay:
    assert batch.names is not None and batch.labels is not None  # images are drawn by name
    meter = new_meter(source)
    count_batch([meter], batch)
    report = meter.compute()
    probs, labels = batch.probs[0].float().cpu().numpy(), batch.labels[0].cpu().numpy()
    name, class_names, palette = batch.names[0], source.class_names, source.palette
    information = None
    if batch.spread is not None:
        information = batch.spread["mutual_information"][0].cpu().numpy()
    if batch.multilabel:
        c = int(np.argmax(np.nan_to_num(report.class_ece, nan=-1.0)))
        name, class_names = f"{name}, {class_names[c]}", (f"not {class_names[c]}", class_names[c])
        palette = None  # that of the source has a colour for each class, none for its absence
        probs, labels = np.stack([1 - probs[c], probs[c]]), labels[c]
        information = None if information is None else information[c]
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
        information=information,
        top_only=source.top_only,
    )
