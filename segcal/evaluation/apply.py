"""Calibrated predictions of images without labels, and what to expect of them.

    expected accuracy     mean of max_c p_c
    expected IoU of c     Σ_{ŷ=c} p_c / (n_{ŷ=c} + Σ_{ŷ≠c} p_c)
    expected Dice of c    2 Σ_{ŷ=c} p_c / (n_{ŷ=c} + Σ p_c)

They are right as far as the calibration is: labels alone can show that it is.
"""

from __future__ import annotations

import csv
import io
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import segcal
from segcal import distributed
from segcal.evaluation.evaluate import calibrated, with_progress
from segcal.evaluation.shifts import learned
from segcal.files import atomic_write, locked
from segcal.posthoc import Calibrator
from segcal.sources.source import Batch, Source, digest
from segcal.viz.style import class_palette

Output = Literal["probs", "mask", "confidence", "uncertainty", "overlay"]
OUTPUTS: tuple[Output, ...] = get_args(Output)
EXPECTED = "expected.csv"
_RECORDS = "done"  # folder of a JSON file for each image whose files are written
_SIXTEEN_BITS = 2**16 - 1
_OPACITY = 0.7  # of the colour of a class where the network is certain


@dataclass(frozen=True, eq=False)
class Expected:
    """What calibrated probabilities promise for M images; properties follow the formulas above.

    Attributes:
        names: of the images.
        class_names: C names.
        pixels: (M,) pixels; of C sigmoid outputs, C times as many.
        confidence: (M,) sums over pixels of max_c p_c.
        predicted: (M, C) n_{ŷ=c}.
        inside: (M, C) Σ_{ŷ=c} p_c.
        outside: (M, C) Σ_{ŷ≠c} p_c.
        reused: how many of the images had been written before.
        skipped: names of images that were left out.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    pixels: NDArray[np.int64]
    confidence: NDArray[np.float64]
    predicted: NDArray[np.int64]
    inside: NDArray[np.float64]
    outside: NDArray[np.float64]
    reused: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """Expected accuracy of all pixels."""
        return float(self.confidence.sum() / self.pixels.sum())

    @property
    def image_accuracy(self) -> NDArray[np.float64]:
        """(M,) expected accuracy of each image."""
        return self.confidence / self.pixels

    @property
    def class_iou(self) -> NDArray[np.float64]:
        """(C,) expected IoU over all images; NaN for a class that is predicted nowhere."""
        return _iou(self.predicted.sum(0), self.inside.sum(0), self.outside.sum(0))

    @property
    def image_class_iou(self) -> NDArray[np.float64]:
        """(M, C) expected IoU in each image; NaN for a class that is not predicted in it."""
        return _iou(self.predicted, self.inside, self.outside)

    @property
    def class_dice(self) -> NDArray[np.float64]:
        """(C,) expected Dice over all images; NaN for a class that is predicted nowhere."""
        iou = self.class_iou
        return 2 * iou / (1 + iou)

    @property
    def miou(self) -> float:
        """Mean expected IoU of the classes that are predicted anywhere; NaN if none is."""
        return _mean(self.class_iou)

    @property
    def review(self) -> list[int]:
        """The numbers of the images, the lowest expected accuracy first."""
        return np.argsort(self.image_accuracy, kind="stable").tolist()

    def to_csv(self) -> str:
        """All images together, and each image, the one to look at first on top.

        `weakest_class` is the class with the lowest expected IoU in the image.
        """
        file = io.StringIO()
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["image", "pixels", "expected_accuracy", "expected_miou", "weakest_class"]
            + [f"expected_iou:{name}" for name in self.class_names]
        )
        rows = [("(all images)", int(self.pixels.sum()), self.accuracy, self.class_iou)]
        each = self.image_class_iou
        for i in self.review:
            rows.append((self.names[i], int(self.pixels[i]), self.image_accuracy[i], each[i]))
        for name, pixels, accuracy, iou in rows:
            seen = np.isfinite(iou)
            weakest = self.class_names[int(np.nanargmin(iou))] if seen.any() else ""
            shares = [accuracy, _mean(iou), *iou]
            text = ["" if math.isnan(share) else f"{share:.6f}" for share in shares]
            table.writerow([name, pixels, *text[:2], weakest, *text[2:]])
        return file.getvalue()

    def describe(self) -> str:
        """The same in a few lines, for a terminal."""
        order = np.argsort(self.class_iou, kind="stable")[: np.isfinite(self.class_iou).sum()]
        classes = ", ".join(f"{self.class_names[c]} {self.class_iou[c]:.1%}" for c in order[:8])
        first = ", ".join(f"{self.names[i]} {self.image_accuracy[i]:.1%}" for i in self.review[:5])
        return (
            f"expected accuracy {self.accuracy:.2%}, expected mIoU {self.miou:.2%} "
            f"of {len(self.names)} images, as far as the calibration holds for them\n"
            f"lowest expected IoU: {classes}\n"
            f"review first: {first}"
        )


def _mean(iou: NDArray[np.float64]) -> float:
    known = iou[np.isfinite(iou)]
    return float(known.mean()) if len(known) else math.nan


def _iou(
    predicted: NDArray[np.int64], inside: NDArray[np.float64], outside: NDArray[np.float64]
) -> NDArray[np.float64]:
    empty = np.full(inside.shape, np.nan)
    return np.divide(inside, predicted + outside, out=empty, where=predicted > 0)


def apply(
    source: Source,
    calibrator: Calibrator | None,
    out: str | Path,
    write: Sequence[str] = ("mask", "confidence"),
    *,
    progress: bool | None = None,
) -> Expected:
    """Write calibrated predictions of every image, and what to expect of them.

    Images whose files were written with the same settings are not computed again, so that a call
    that was stopped goes on where it was. Under torch.distributed each process writes its share,
    and all return what is expected of all images.

    Args:
        source: a network or saved predictions; labels are not looked at. Its images have names.
        calibrator: fitted on a hold-out of the same network; None for the network as it is.
        out: folder, made if missing. `write` names the folders of files in it, NAME.npz or
            NAME.png for each image; expected.csv has the table of `Expected`.
        write: which of

            - probs: float32 probabilities (C, H, W), which `segcal eval --predictions` reads once
              there are labels; also of volumes and of sigmoid outputs.
            - mask: 8-bit PNG of class indices; 16-bit beyond 256 classes.
            - confidence: 16-bit PNG of 65535 · max_c p_c.
            - uncertainty: 16-bit PNG of 65535 · H(p) / log C, H the entropy.
            - overlay: the classes on the image, in paler colours where the confidence is lower.
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
    if source.multilabel and set(write) != {"probs"}:
        raise ValueError("classes may overlap in sigmoid outputs: write probs, and nothing else")
    files = {name.replace("/", "_"): i for i, name in enumerate(source.names)}
    if not files or len(files) < len(source.names):
        raise ValueError(f"the images of {source.name} need names, of which no two are the same")
    out = Path(out)
    for name in (_RECORDS, *write):
        (out / name).mkdir(parents=True, exist_ok=True)
    if distributed.rank() > 0:
        return _apply(source, calibrator, out, write, progress)
    with locked(out, wait=False):
        return _apply(source, calibrator, out, write, progress)


def _apply(
    source: Source,
    calibrator: Calibrator | None,
    out: Path,
    write: Sequence[str],
    progress: bool | None,
) -> Expected:
    names = [name.replace("/", "_") for name in source.names]
    about = (segcal.__version__, learned(calibrator))
    plan: list[Any] = [None]
    if distributed.rank() == 0:  # the others shall not see what is written meanwhile
        keys, kinds, known = {}, {}, bool(source.fingerprint())
        for index, name in enumerate(names):
            # Of its own image alone, so that more images make nothing stale.
            state = source.only([index]).fingerprint() if known else secrets.token_hex(16)
            keys[name] = digest(*about, state)
            record = _read_record(out / _RECORDS / f"{name}.json", keys[name])
            kinds[name] = [k for k in record.get("written", ()) if _file(out, k, name).is_file()]
        plan = [(keys, kinds)]
        if "probs" in write:
            stated = {"class_names": source.class_names, "ignore_index": source.ignore_index}
            with atomic_write(out / "probs" / "manifest.json") as file:
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
            probs = calibrated(batch, calibrator).probs
            _check(source, batch, number, write)
            for row, name in enumerate(batch.names or ()):
                stem = name.replace("/", "_")
                p = probs[row].detach()
                image = left.image(number[name]) if "overlay" in write else None
                _write(out, stem, p, write, source, image)
                found = {"key": keys[stem], "written": sorted({*kinds[stem], *write})}
                record = found | _sums(p, multilabel=source.multilabel)
                with atomic_write(out / _RECORDS / f"{stem}.json") as file:
                    json.dump(record, file)
            del batch, probs, p  # before the next is made
    if distributed.is_distributed():
        dist.barrier()
    expected = _collect(source, out, keys, reused=len(names) - len(todo))
    if distributed.rank() == 0:
        with atomic_write(out / EXPECTED) as file:
            file.write(expected.to_csv())
    return expected


def _file(out: Path, kind: str, name: str) -> Path:
    return out / kind / f"{name}{'.npz' if kind == 'probs' else '.png'}"


def _read_record(path: Path, key: str) -> Mapping[str, Any]:
    """What was written of an image with these settings; nothing if that is not known."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("key") == key else {}


def _check(source: Source, batch: Batch, number: Mapping[str, int], write: Sequence[str]) -> None:
    if any(name not in number for name in batch.names or ("",)):
        raise ValueError(f"a file of {source.name} has several rows: save one image in a file")
    if batch.values.ndim != 4 and set(write) != {"probs"}:
        what = "volumes" if batch.values.ndim == 5 else "single classes, not masks"
        raise ValueError(f"{source.name} predicts {what}, of which only probs can be written")


@torch.inference_mode()
def _sums(probs: Tensor, *, multilabel: bool) -> dict[str, Any]:
    """The numbers of `Expected` for (C, *S) probabilities of one image."""
    classes = len(probs)
    p = probs.reshape(classes, -1)  # (C, P)
    if multilabel:
        chosen = p >= 0.5
        top = torch.maximum(p, 1 - p).flatten().double()
        predicted = chosen.sum(1)
        inside = (p * chosen).sum(1, dtype=torch.float64)
    else:
        top, index = p.max(0)
        top = top.double()
        predicted = index.bincount(minlength=classes)
        inside = index.bincount(top, minlength=classes)
    outside = p.sum(1, dtype=torch.float64) - inside
    return {
        "pixels": len(top),
        "confidence": top.sum().item(),
        "predicted": predicted.tolist(),
        "inside": inside.tolist(),
        "outside": outside.clamp_min(0).tolist(),
    }


def _write(
    out: Path,
    name: str,
    probs: Tensor,
    write: Sequence[str],
    source: Source,
    image: np.ndarray | None,
) -> None:
    """Write the files of one image, (C, *S) probabilities, each of them whole or not at all."""
    p = probs.float().cpu().numpy()
    if "probs" in write:
        with atomic_write(_file(out, "probs", name), "wb") as file:
            key = "sigmoid_probs" if source.multilabel else "probs"
            np.savez(file, allow_pickle=False, **{key: p})
    pictures: dict[str, np.ndarray] = {}
    if "mask" in write:
        pictures["mask"] = p.argmax(0).astype(np.uint8 if len(p) <= 256 else np.uint16)
    if "confidence" in write:
        pictures["confidence"] = _sixteen_bits(p.max(0))
    if "uncertainty" in write:
        entropy = -(p * np.log(np.maximum(p, np.finfo(p.dtype).tiny))).sum(0)
        pictures["uncertainty"] = _sixteen_bits(entropy / math.log(len(p)))
    if "overlay" in write:
        palette = class_palette(len(p)) if source.palette is None else source.palette
        ground = np.full((*p.shape[1:], 3), 236, np.uint8)
        if image is not None:
            ground = np.asarray(Image.fromarray(image).resize(p.shape[:0:-1]))
        opacity = _OPACITY * p.max(0)[..., None]
        mixed = (1 - opacity) * ground + opacity * palette[p.argmax(0)]
        pictures["overlay"] = mixed.round().astype(np.uint8)
    for kind, pixels in pictures.items():
        with atomic_write(_file(out, kind, name), "wb") as file:
            Image.fromarray(pixels).save(file, format="png")


def _sixteen_bits(shares: np.ndarray) -> np.ndarray:
    return (_SIXTEEN_BITS * shares.clip(0, 1)).round().astype(np.uint16)


def _collect(source: Source, out: Path, keys: Mapping[str, str], *, reused: int) -> Expected:
    """The records of all images."""
    records, skipped = {}, list(source.skipped)
    for name in source.names:
        stem = name.replace("/", "_")
        if record := _read_record(out / _RECORDS / f"{stem}.json", keys[stem]):
            records[name] = record
        else:
            skipped.append(name)
    if not records:
        raise ValueError(f"none of the images of {source.name} could be used")
    columns = ("pixels", "confidence", "predicted", "inside", "outside")
    arrays = {key: np.array([record[key] for record in records.values()]) for key in columns}
    class_names = source.class_names or tuple(f"class {c}" for c in range(source.num_classes))
    return Expected(
        tuple(records),
        tuple(class_names),
        **arrays,
        reused=reused,
        skipped=tuple(dict.fromkeys(skipped)),
    )
