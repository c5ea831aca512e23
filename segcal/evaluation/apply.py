"""Calibrated predictions of images without labels: files for each image, and what to expect."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch.distributed as dist
from PIL import Image, ImageColor
from torch import Tensor

import segcal
from segcal import distributed
from segcal.evaluation.expected import TABLE, Expected
from segcal.evaluation.measure import calibrated, with_progress
from segcal.evaluation.overlays import grey
from segcal.evaluation.shifts import learned
from segcal.files import atomic_write, locked, remove_leftovers, write_nifti
from segcal.metrics.drift import HoldoutProfile, prediction_sums
from segcal.posthoc import Calibrator
from segcal.sources.source import Batch, Source, digest
from segcal.viz.page.numbers import data_uri, webp
from segcal.viz.style import OVER, class_palette

Output = Literal["probs", "mask", "confidence", "accept", "sets", "uncertainty", "overlay"]
OUTPUTS: tuple[Output, ...] = get_args(Output)
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
    write: Sequence[str] = ("mask", "confidence"),
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
        write: which of

            - probs: probs/NAME.npz of float32 probabilities (C, *S), which
              `segcal eval --predictions` reads once there are labels; also of sigmoid outputs.
            - mask: predictions/NAME_pred.png of class indices, 8-bit; 16-bit beyond 256 classes.
            - confidence: predictions/NAME_conf.png, 16-bit, of 65535 · max_c p_c. With the masks
              beside them, `segcal eval --predictions` reads these files too.
            - accept: accept/NAME.png, 255 where the operating point accepts a pixel, else 0.
            - sets: sets/NAME.npz with the key `sets`, bool (C, *S): the classes that a class set
              holds.
            - uncertainty: uncertainty/NAME.png, 16-bit, of 65535 · H(p) / log C, H the entropy.
            - overlay: overlay/NAME.png, the classes on the image, paler where the confidence is
              lower.

            Of volumes, mask/NAME.nii.gz, confidence/NAME.nii.gz and so on have the affine of the
            input, and fractions in float32; there are no overlays.
        profile: holdout.json, which `segcal eval` writes beside the calibrator; without it there is
            no operating point, no class set, no ATC and no drift.
        operate: which of the operating points in it, such as accuracy=0.99; the first by default.
        miss: which of the class sets in it, such as 0.1; the first by default.
        progress: show a bar; by default if stderr is a terminal.

    Raises:
        ValueError: in one line, what does not fit, or cannot be written.
    """
    unknown = [name for name in write if name not in OUTPUTS]
    if unknown or not write:
        raise ValueError(f"write takes {', '.join(OUTPUTS)}, but got {', '.join(unknown)!r}")
    if calibrator is not None and calibrator.num_classes_ != source.num_classes:
        raise ValueError(
            f"the calibrator is for {calibrator.num_classes_} classes, "
            f"but {source.name} has {source.num_classes}"
        )
    if calibrator is not None and calibrator.multilabel != source.multilabel:
        raise ValueError(f"the calibrator and {source.name} differ: one is of sigmoid outputs")
    if source.top_only:
        raise ValueError(f"{source.name} has the top class of each pixel alone: save all classes")
    if source.multilabel and set(write) != {"probs"}:
        raise ValueError("classes may overlap in sigmoid outputs: write probs, and nothing else")
    files = {name.replace("/", "_"): i for i, name in enumerate(source.names)}
    if not files or len(files) < len(source.names):
        raise ValueError(f"the images of {source.name} need names, of which no two are the same")
    if isinstance(profile, str | Path):
        profile = HoldoutProfile.load(profile)
    if profile is not None and profile.classes.shape[1] != source.num_classes:
        raise ValueError(
            f"the hold-out has {profile.classes.shape[1]} classes, "
            f"but {source.name} has {source.num_classes}"
        )
    if profile is None and (operate or miss):
        raise ValueError("operating points and class sets need the holdout.json of segcal eval")
    levels = Levels()
    if profile is not None:
        levels = Levels(profile.atc_threshold, *profile.point(operate), profile.lam(miss))
    for kind, level, option in (
        ("accept", levels.threshold, "--operate"),
        ("sets", levels.lam, "--conformal"),
    ):
        if kind in write and level is None:
            raise ValueError(
                f"{kind} needs the holdout.json of a segcal eval with {option}, in which the "
                "hold-out reaches the target"
            )
    out = Path(out)
    (out / _RECORDS).mkdir(parents=True, exist_ok=True)
    if distributed.rank() > 0:
        return _apply(source, calibrator, out, write, profile, levels, progress)
    with locked(out, wait=False):
        return _apply(source, calibrator, out, write, profile, levels, progress)


class Levels(NamedTuple):
    """What confidence is compared with; None where it is not known."""

    atc: float | None = None
    target: str = ""
    threshold: float | None = None
    lam: float | None = None


def _apply(
    source: Source,
    calibrator: Calibrator | None,
    out: Path,
    write: Sequence[str],
    profile: HoldoutProfile | None,
    levels: Levels,
    progress: bool | None,
) -> Expected:
    names = [name.replace("/", "_") for name in source.names]
    about = (segcal.__version__, learned(calibrator), levels)
    plan: list[Any] = [None]
    if distributed.rank() == 0:  # the others shall not see what is written meanwhile
        for folder in ("", _RECORDS, _PAIR, *OUTPUTS):
            remove_leftovers(out / folder)
        keys: dict[str, str] = {}
        kinds: dict[str, dict[str, str]] = {}
        known = bool(source.fingerprint())
        for index, name in enumerate(names):
            # Of its own image alone, so that more images make nothing stale.
            state = source.only([index]).fingerprint() if known else secrets.token_hex(16)
            keys[name] = digest(*about, state)
            written = _read_record(out / _RECORDS / f"{name}.json", keys[name]).get("written", {})
            kinds[name] = {k: file for k, file in written.items() if (out / file).is_file()}
        plan = [(keys, kinds)]
        stated = {"class_names": source.class_names, "ignore_index": source.ignore_index}
        stated["axes"] = "zyx"
        folders = {"probs": "probs", "mask": _PAIR, "confidence": _PAIR}
        for folder in {folders[kind] for kind in write if kind in folders}:
            with atomic_write(out / folder / "manifest.json") as file:
                json.dump(stated, file, indent=1)
    if distributed.is_distributed():
        dist.broadcast_object_list(plan)
    keys, kinds = plan[0]
    todo = [i for i, name in enumerate(names) if not set(write) <= set(kinds[name])]
    left = source if len(todo) == len(names) else source.only(todo) if todo else None
    if left is not None:
        number = {name: i for i, name in enumerate(left.names)}
        for batch in with_progress(left, progress, labelled=False):
            if calibrator is not None:
                calibrator.to(batch.values.device)
            probs = calibrated(batch, calibrator).probs.detach()
            _check(source, batch, number, write)
            sums = prediction_sums(probs, multilabel=source.multilabel)
            top = sums.pop("top")
            for name, level in (("above", levels.atc), ("accepted", levels.threshold)):
                sums[name] = (top > (math.inf if level is None else level)).sum(1)
            for row, name in enumerate(batch.names or ()):
                stem = name.replace("/", "_")
                files = _write(out, stem, probs[row], write, left, number[name], levels)
                record = {"key": keys[stem], "written": {**kinds[stem], **files}}
                record |= {name: each[row].tolist() for name, each in sums.items()}
                with atomic_write(out / _RECORDS / f"{stem}.json") as file:
                    json.dump(record, file)
            del batch, probs, sums, top  # before the next is made
    if distributed.is_distributed():
        dist.barrier()
    records, skipped = {}, list(source.skipped)
    for name, stem in zip(source.names, names, strict=True):
        if record := _read_record(out / _RECORDS / f"{stem}.json", keys[stem]):
            records[name] = record
        else:
            skipped.append(name)
    if not records:
        raise ValueError(f"none of the images of {source.name} could be used")
    class_names = source.class_names or tuple(f"class {c}" for c in range(source.num_classes))
    expected = Expected(
        tuple(records),
        tuple(class_names),
        **{key: np.array([record[key] for record in records.values()]) for key in _SUMS},
        operate=levels.target if levels.threshold is not None else "",
        profile=profile,
        multilabel=source.multilabel,
        reused=len(names) - len(todo),
        skipped=tuple(dict.fromkeys(skipped)),
    )
    if distributed.rank() == 0:
        for path, text in ((TABLE, expected.to_csv()), (SUMMARY, expected.to_json())):
            with atomic_write(out / path) as file:
                file.write(text)
        gallery = {}
        if not source.multilabel:
            number = {name: i for i, name in enumerate(source.names)}
            for i in expected.review[:_DRAWN]:
                name = expected.names[i]
                batch = source[number[name]]
                if batch.values.ndim > 3:
                    caption = f"{name}: {expected.reasons[i]}"
                    p = calibrated(batch, calibrator).probs[0].float().cpu().numpy()
                    gallery[caption] = _panel(p, source.image(number[name]), source.palette)
        expected.write_page(out / PAGE, f"{source.name}: images without labels", gallery)
    return expected


def _read_record(path: Path, key: str) -> dict[str, Any]:
    """What was written of an image with these settings; nothing if that is not known."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("key") == key else {}


def _check(source: Source, batch: Batch, number: Mapping[str, int], write: Sequence[str]) -> None:
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
) -> dict[str, str]:
    """Write the files of one image, each of them whole or not at all; their places by kind.

    Args:
        out: the folder.
        name: of the files.
        probs: (C, *S).
        write: the kinds of files.
        source: the predictions.
        index: of the image in `source`.
        levels: of operating point and class sets.
    """
    p = probs.float().cpu().numpy()
    top = p.max(0)
    files: dict[str, str] = {}
    if "probs" in write:
        files["probs"] = f"probs/{name}.npz"
        with atomic_write(out / files["probs"], "wb") as file:
            key = "sigmoid_probs" if source.multilabel else "probs"
            np.savez(file, allow_pickle=False, **{key: p})
    if "sets" in write and levels.lam is not None:
        files["sets"] = f"sets/{name}.npz"
        with atomic_write(out / files["sets"], "wb") as file:
            np.savez_compressed(file, allow_pickle=False, sets=p >= 1 - levels.lam)
    maps: dict[str, np.ndarray] = {}
    if "mask" in write:
        maps["mask"] = p.argmax(0).astype(np.uint8 if len(p) <= 256 else np.uint16)
    if "confidence" in write:
        maps["confidence"] = top
    if "accept" in write and levels.threshold is not None:
        maps["accept"] = np.uint8(255) * (top.astype(np.float64) > levels.threshold)
    if "uncertainty" in write:
        entropy = -(p * np.log(np.maximum(p, np.finfo(p.dtype).tiny))).sum(0)
        maps["uncertainty"] = entropy / np.float32(math.log(len(p)))
    if "overlay" in write:
        maps["overlay"] = _painted(p, source.image(index), source.palette)
    ending = "nii.gz" if p.ndim == 4 else "png"
    affine = source.affine(index) if p.ndim == 4 else None
    places = {"mask": f"{_PAIR}/{name}_pred", "confidence": f"{_PAIR}/{name}_conf"}
    places = {} if p.ndim == 4 else places
    for kind, values in maps.items():
        files[kind] = f"{places.get(kind, f'{kind}/{name}')}.{ending}"
        if p.ndim == 4:
            write_nifti(out / files[kind], values, np.eye(4) if affine is None else affine)
            continue
        if values.dtype == np.float32:
            values = (_SIXTEEN_BITS * values.clip(0, 1)).round().astype(np.uint16)
        with atomic_write(out / files[kind], "wb") as file:
            Image.fromarray(values).save(file, format="png")
    return files


def _panel(probs: np.ndarray, image: np.ndarray | None, palette: np.ndarray | None) -> str:
    """The data URI of an image, its classes, and where the confidence is low.

    Of a volume it is the plane with the lowest mean confidence.

    Args:
        probs: (C, H, W) or (C, D, H, W).
        image: (h, w, 3) uint8, or (D, H, W) or (D, H, W, 3) of any numbers; None for grey.
        palette: (C, 3) uint8.
    """
    if probs.ndim == 4:
        worst = int(probs.max(0).mean((1, 2)).argmin())
        probs, image = probs[:, worst], None if image is None else grey(image[worst])
    if image is not None and image.ndim == 2:
        image = np.repeat(image[..., None], 3, 2)
    height, width = probs.shape[1:]
    size = (_WIDTH, max(round(_WIDTH * height / width), 1))
    ground = np.full((height, width, 3), 236, np.uint8)
    if image is not None:
        ground = np.asarray(Image.fromarray(image).resize((width, height)))
    doubt = np.minimum(2 * (1 - probs.max(0)), 1)[..., None]
    pale = 0.5 * ground.mean(2, keepdims=True) + 0.5 * 255
    low = (1 - doubt) * pale + doubt * np.array(ImageColor.getrgb(OVER))
    panels = [_painted(probs, ground, palette), low.round().astype(np.uint8)]
    panels = panels if image is None else [ground, *panels]
    shown = Image.new("RGB", (len(panels) * (_WIDTH + 8) - 8, size[1]), "white")
    for place, panel in enumerate(panels):
        shown.paste(Image.fromarray(panel).resize(size), (place * (_WIDTH + 8), 0))
    return data_uri(webp(shown, 85), "image/webp")


def _painted(
    probs: np.ndarray, image: np.ndarray | None, palette: np.ndarray | None = None
) -> np.ndarray:
    """(H, W, 3) uint8: the predicted classes on an image, paler where the confidence is lower.

    Args:
        probs: (C, H, W).
        image: (h, w, 3) uint8; None for grey.
        palette: (C, 3) uint8.
    """
    palette = class_palette(len(probs)) if palette is None else palette
    ground = np.full((*probs.shape[1:], 3), 236, np.uint8)
    if image is not None:
        ground = np.asarray(Image.fromarray(image).resize(probs.shape[:0:-1]))
    opacity = _OPACITY * probs.max(0)[..., None]
    mixed = (1 - opacity) * ground + opacity * palette[probs.argmax(0)]
    return mixed.round().astype(np.uint8)
