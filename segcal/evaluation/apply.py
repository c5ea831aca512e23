"""Calibrated predictions of images without labels: files for each image, and what to expect."""

from __future__ import annotations

import copy
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageColor
from torch import Tensor

import segcal
from segcal import distributed
from segcal.evaluation.expected import TABLE, Expected
from segcal.evaluation.folder import file_name
from segcal.evaluation.measure import with_progress
from segcal.evaluation.overlays import grey
from segcal.files import atomic_write, locked, remove_leftovers, write_nifti
from segcal.metrics.drift import HoldoutProfile, prediction_sums
from segcal.metrics.uncertainty import entropy
from segcal.posthoc import Calibrator
from segcal.sources.members import learned
from segcal.sources.source import Batch, Source, digest
from segcal.viz.page.numbers import data_uri, webp
from segcal.viz.style import OVER, class_palette
from segcal.viz.tables import tell_apart

OUTPUTS = {
    "probs": "probs/NAME.npz of float32 probabilities (C, *S)",
    "mask": "predictions/NAME_pred.png of class indices; of a sigmoid output 1 where p ≥ 1/2",
    "confidence": "predictions/NAME_conf.png of max_c p_c; of a sigmoid output of p or 1 - p",
    "accept": "accept/NAME.png, 255 where the operating point accepts a pixel, else 0",
    "sets": "sets/NAME.npz of `sets`, bool (C, *S): the classes that a class set holds",
    "uncertainty": "uncertainty/NAME.png of H(p) / log C, where H is the entropy",
    "overlay": "overlay/NAME.png: the classes on the image, paler where confidence is lower",
}
SUMMARY, PAGE = "expected.json", "report.html"
_PAIR = "predictions"  # folder of masks and confidence, which `segcal eval --predictions` reads
_RECORDS = "done"  # folder of a JSON file for each image whose files are written
_SUMS = ("pixels", "confidence", "predicted", "inside", "outside", "bins", "above", "accepted")
_SIXTEEN_BITS = 2**16 - 1
_DRAWN, _WIDTH = 6, 400  # images on the page, and pixels of each panel
_OPACITY = 0.7  # of the colour of a class where the network is certain


def apply(
    source: Source,
    calibrator: Calibrator | None,
    out: str | Path,
    write: Sequence[str] | str = ("mask", "confidence"),
    *,
    profile: HoldoutProfile | str | Path | None = None,
    operate: str | None = None,
    miss: str | None = None,
    progress: bool | None = None,
) -> Expected:
    """Write calibrated predictions of every image, and what to expect of them.

    Images whose files were written with the same settings are not computed again, so that a call
    that was stopped goes on where it was. Under torch.distributed each process writes its share,
    and all return what is expected of all images.

    Args:
        source: a network or saved predictions; labels are not looked at. Its images have names.
        calibrator: fitted on a hold-out of the same network; None for the network as it is.
        out: folder, made if missing. `write` names the files in it; expected.csv, expected.json
            and report.html say what `Expected` knows.
        write: which of `OUTPUTS`. Fractions are PNG files of 16 bits, of 65535 · value. Of volumes
            there are NIfTI files with the affine of the input, and no overlays. Of sigmoid outputs
            there is a folder for each class, and no sets and overlays.
        profile: holdout.json, which `segcal eval` writes beside the calibrator; without it there is
            no operating point, no class set, no ATC and no drift.
        operate: which of the operating points in it, such as accuracy=0.99; the first by default.
        miss: which of the class sets in it, such as 0.1; the first by default.
        progress: show a bar; by default if stderr is a terminal.
    """
    write = write.split(",") if isinstance(write, str) else write
    if isinstance(profile, str | Path):
        profile = HoldoutProfile.load(profile)
    _check(source, calibrator, profile, write)
    source = _named(source, profile)
    levels = _levels(profile, operate, miss, write)
    out, first = Path(out), distributed.rank() == 0
    (out / _RECORDS).mkdir(parents=True, exist_ok=True)
    with locked(out, wait=False) if first else nullcontext():
        if first:
            remove_leftovers(out)
        plan = [_written(source, out, (segcal.__version__, learned(calibrator), levels))]
        if distributed.is_distributed():  # the others shall not see what is written meanwhile
            dist.broadcast_object_list(plan)
        records = plan[0]
        todo = [
            i for i, name in enumerate(source.names) if not {*write} <= {*records[name]["written"]}
        ]
        left = source if len(todo) == len(records) else source.only(todo) if todo else None
        number = {} if left is None else {name: i for i, name in enumerate(left.names)}
        for batch in () if left is None else with_progress(left, progress, labelled=False):
            assert left is not None
            if calibrator is not None:
                calibrator.to(batch.values.device)
            probs = batch.calibrated(calibrator).probs.detach()
            _check_batch(left, batch, number, write)
            sums = prediction_sums(probs, multilabel=source.multilabel)
            top = sums.pop("top")
            for name, level in (("above", levels.atc), ("accepted", levels.threshold)):
                sums[name] = sums["confidence"] * math.nan  # where there is no threshold
                if level is not None:
                    sums[name] = (top > level).sum(1)
            for row, name in enumerate(batch.names or ()):
                record = records[name]
                files = _write(out, _stem(name), probs[row], write, left, number[name], levels)
                record["written"] |= files
                record |= {key: each[row].tolist() for key, each in sums.items()}
                with atomic_write(_record(out, name)) as file:
                    json.dump(record, file)
            del batch, probs, sums, top  # before the next is made
        if distributed.is_distributed():
            dist.barrier()
        known = {name: _read_record(_record(out, name), r["key"]) for name, r in records.items()}
        known = {name: record for name, record in known.items() if record}
        if not known:
            raise ValueError(f"none of the images of {source.name} could be used")
        skipped = [*source.skipped, *(name for name in records if name not in known)]
        expected = Expected.of(
            {key: np.array([record[key] for record in known.values()]) for key in _SUMS},
            names=tuple(known),
            class_names=tuple(source.class_names),
            operate=levels.target if levels.threshold is not None else "",
            profile=profile,
            multilabel=source.multilabel,
            reused=len(records) - len(todo),
            skipped=tuple(dict.fromkeys(skipped)),
        )
        if first:
            _write_manifests(source, out)
            for path, text in ((TABLE, expected.to_csv()), (SUMMARY, expected.to_json())):
                with atomic_write(out / path) as file:
                    file.write(text)
            title = f"{source.name}: images without labels"
            gallery = _gallery(source, calibrator, expected)
            expected.write_page(out / PAGE, title, gallery, _palette(source))
    return expected


class Levels(NamedTuple):
    """What confidence is compared with; None where it is not known."""

    atc: float | None = None
    target: str = ""
    threshold: float | None = None
    lam: float | None = None


def _levels(
    profile: HoldoutProfile | None, operate: str | None, miss: str | None, write: Sequence[str]
) -> Levels:
    if profile is None and (operate or miss):
        raise ValueError("operating points and class sets need the holdout.json of segcal eval")
    levels = Levels()
    if profile is not None:
        levels = Levels(profile.atc_threshold, *profile.point(operate), profile.lam(miss))
    needed = {"accept": ("--operate", levels.threshold), "sets": ("--conformal", levels.lam)}
    for kind, (option, level) in needed.items():
        if kind in write and level is None:
            raise ValueError(
                f"{kind} needs the holdout.json of a segcal eval with {option}, in which the "
                "hold-out reaches the target"
            )
    return levels


def _check(
    source: Source,
    calibrator: Calibrator | None,
    profile: HoldoutProfile | None,
    write: Sequence[str],
) -> None:
    unknown = [name for name in write if name not in OUTPUTS]
    if unknown or not write:
        raise ValueError(f"write takes {', '.join(OUTPUTS)}, but got {', '.join(unknown)!r}")
    for what, classes in (
        ("calibrator", calibrator and calibrator.num_classes_),
        ("hold-out", profile and profile.classes.shape[1]),
    ):
        if classes not in (None, source.num_classes):
            raise ValueError(
                f"the {what} has {classes} classes, but {source.name} has {source.num_classes}"
            )
    if calibrator is not None and calibrator.multilabel != source.multilabel:
        raise ValueError(f"the calibrator and {source.name} differ: one is of sigmoid outputs")
    if source.top_only:
        raise ValueError(f"{source.name} has the top class of each pixel alone: save all classes")
    if source.multilabel and {"sets", "overlay"} & {*write}:
        raise ValueError("classes may overlap in sigmoid outputs: there are no sets and overlays")
    if not source.names or len({*map(_stem, source.names)}) < len(source.names):
        raise ValueError(f"the images of {source.name} need names, of which no two are the same")


def _named(source: Source, profile: HoldoutProfile | None) -> Source:
    """The source with the class names of the hold-out, where it has none of its own."""
    plain = tuple(f"class {c}" for c in range(source.num_classes))
    if tuple(source.class_names) in ((), plain):
        source = copy.copy(source)
        source.class_names = (profile and profile.class_names) or plain
    return source


def _stem(name: str) -> str:
    """The name of an image in names of files."""
    return name.replace("/", "_")


def _record(out: Path, name: str) -> Path:
    return out / _RECORDS / f"{_stem(name)}.json"


def _palette(source: Source) -> np.ndarray:
    return class_palette(source.num_classes) if source.palette is None else source.palette


def _written(source: Source, out: Path, settings: Any) -> dict[str, dict[str, Any]]:
    """By image, the key of its record, and the files by kind that an earlier call wrote."""
    records = {}
    known = bool(source.fingerprint())
    for index, name in enumerate(source.names):
        # Of its own image alone, so that more images make nothing stale.
        state = source.only([index]).fingerprint() if known else secrets.token_hex(16)
        key = digest(*settings, state)
        files = _read_record(_record(out, name), key).get("written", {})
        there = {
            kind: some for kind, some in files.items() if all((out / f).is_file() for f in some)
        }
        records[name] = {"key": key, "written": there}
    return records


def _write_manifests(source: Source, out: Path) -> None:
    """What `segcal eval --predictions` needs to know of the files."""
    stated = {"class_names": source.class_names, "ignore_index": source.ignore_index}
    for folder in ("probs", _PAIR):
        if (out / folder).is_dir():
            with atomic_write(out / folder / "manifest.json") as file:
                json.dump({**stated, "axes": "zyx"}, file, indent=1)


def _gallery(source: Source, calibrator: Calibrator | None, expected: Expected) -> dict[str, str]:
    """Pictures of the first images to review, by caption; none of classification."""
    gallery = {}
    for i in expected.review[:_DRAWN] if not source.multilabel else ():
        index = list(source.names).index(expected.names[i])
        batch = source[index]
        if batch.values.ndim > 3:
            p = batch.calibrated(calibrator).probs[0].float().cpu().numpy()
            caption = f"{expected.names[i]}: {expected.reasons[i]}"
            gallery[caption] = _panel(p, source.image(index), _palette(source))
    return gallery


def _read_record(path: Path, key: str) -> dict[str, Any]:
    """What was written of an image with these settings; nothing if that is not known."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("key") == key else {}


def _check_batch(
    source: Source, batch: Batch, number: Mapping[str, int], write: Sequence[str]
) -> None:
    if any(name not in number for name in batch.names or ("",)):
        raise ValueError(f"a file of {source.name} has several rows: save one image in a file")
    if batch.values.ndim < 4 and set(write) != {"probs"}:
        raise ValueError(f"{source.name} predicts single classes: write probs, and nothing else")
    if batch.values.ndim == 5 and "overlay" in write:
        raise ValueError(f"{source.name} predicts volumes, of which there are no overlays")


def _write(
    out: Path,
    name: str,
    probs: Tensor,
    write: Sequence[str],
    source: Source,
    index: int,
    levels: Levels,
) -> dict[str, list[str]]:
    """Write the files of the image at `index`, from its (C, *S) probabilities; places by kind."""
    p = probs.float().cpu().numpy()
    whole, parts = {name: p}, {name: p}
    if source.multilabel:  # each class is a problem of two
        folders = tell_apart([file_name(of) for of in source.class_names])
        parts = {f"{of}/{name}": np.stack([1 - q, q]) for of, q in zip(folders, p, strict=True)}
    keys = {"probs": "sigmoid_probs" if source.multilabel else "probs", "sets": "sets"}
    files: dict[str, list[str]] = {}
    for kind in write:
        files[kind] = []
        for stem, q in (whole if kind in keys else parts).items():
            place = f"{kind}/{stem}"
            if p.ndim < 4 and not source.multilabel and kind in ("mask", "confidence"):
                place = f"{_PAIR}/{stem}_{'pred' if kind == 'mask' else 'conf'}"
            path = out / f"{place}.{'npz' if kind in keys else 'nii.gz' if p.ndim == 4 else 'png'}"
            values = _values(kind, q, source, index, levels)
            if path.suffix == ".gz":
                affine = source.affine(index)
                write_nifti(path, values, np.eye(4) if affine is None else affine)
            else:
                with atomic_write(path, "wb") as file:
                    if kind in keys:
                        save = np.savez_compressed if kind == "sets" else np.savez
                        save(file, allow_pickle=False, **{keys[kind]: values})
                    else:
                        if values.dtype.kind == "f":
                            values = (_SIXTEEN_BITS * values.clip(0, 1)).round().astype(np.uint16)
                        Image.fromarray(values).save(file, format="png")
            files[kind].append(path.relative_to(out).as_posix())
    return files


def _values(kind: str, p: np.ndarray, source: Source, index: int, levels: Levels) -> np.ndarray:
    """What a file of (C, *S) probabilities holds; of a sigmoid output, C is 2."""
    if kind == "sets":
        return p >= 1 - (levels.lam or 0.0)
    if kind == "mask":
        chosen = p[1] >= p[0] if source.multilabel else p.argmax(0)
        return chosen.astype(np.uint8 if len(p) <= 256 else np.uint16)
    if kind == "confidence":
        return p.max(0)
    if kind == "accept":
        return np.uint8(255) * (p.max(0).astype(np.float64) > (levels.threshold or 0.0))
    if kind == "uncertainty":
        return entropy(torch.from_numpy(p)[None])[0].numpy() / math.log(len(p))
    return _painted(p, source.image(index), _palette(source)) if kind == "overlay" else p


def _panel(probs: np.ndarray, image: np.ndarray | None, palette: np.ndarray) -> str:
    """The data URI of an image, its classes, and where the confidence is low.

    Of (C, D, H, W) probabilities of a volume it is the plane with the lowest mean confidence.
    """
    if probs.ndim == 4:
        worst = int(probs.max(0).mean((1, 2)).argmin())
        probs, image = probs[:, worst], None if image is None else grey(image[worst])
    ground = _ground(probs, image)
    doubt = np.minimum(2 * (1 - probs.max(0)), 1)[..., None]
    pale = 0.5 * ground.mean(2, keepdims=True) + 0.5 * 255
    low = (1 - doubt) * pale + doubt * np.array(ImageColor.getrgb(OVER))
    panels = [_painted(probs, image, palette), low.round().astype(np.uint8)]
    panels = panels if image is None else [ground, *panels]
    height = max(round(_WIDTH * ground.shape[0] / ground.shape[1]), 1)
    shown = Image.new("RGB", (len(panels) * (_WIDTH + 8) - 8, height), "white")
    for place, panel in enumerate(panels):
        shown.paste(Image.fromarray(panel).resize((_WIDTH, height)), (place * (_WIDTH + 8), 0))
    return data_uri(webp(shown, 85), "image/webp")


def _painted(probs: np.ndarray, image: np.ndarray | None, palette: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8: the predicted classes on an image, paler where the confidence is lower."""
    opacity = _OPACITY * probs.max(0)[..., None]
    mixed = (1 - opacity) * _ground(probs, image) + opacity * palette[probs.argmax(0)]
    return mixed.round().astype(np.uint8)


def _ground(probs: np.ndarray, image: np.ndarray | None) -> np.ndarray:
    """(H, W, 3) uint8: the image in the size of (C, H, W) probabilities, or plain grey."""
    if image is None:
        return np.full((*probs.shape[1:], 3), 236, np.uint8)
    return np.asarray(Image.fromarray(image).convert("RGB").resize(probs.shape[:0:-1]))
