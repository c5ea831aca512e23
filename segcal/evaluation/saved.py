"""Predictions that any framework saved: their format, their manifest, and a folder of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from segcal import distributed
from segcal.evaluation.sources import KINDS, Kind, Predictions, VolumePart, is_sigmoid, resize
from segcal.files import (
    BadFile,
    Nifti,
    Npz,
    check_num_classes,
    check_size,
    image_size,
    is_nifti,
    naming,
    npy_shape,
    read_mask,
    read_npy,
    read_rgb,
    read_slabs,
    read_yaml,
    utf8,
    visible,
)
from segcal.pixels import Pixels, flatten, is_distribution

Layout = Literal["chw", "hwc"]
MANIFESTS = ("manifest.yaml", "manifest.yml", "manifest.json")  # JSON is YAML too

_CHOICES = {"kind": KINDS, "layout": ("chw", "hwc")}
_TYPES: dict[str, type] = {
    "kind": str,
    "layout": str,
    "labels": str,
    "images": str,
    "num_classes": int,
    "class_names": list,
    "ignore_index": int,
    "align_corners": bool,
}


@dataclass(frozen=True)
class PredictionFormat:
    """What a folder of predictions holds.

    Attributes:
        kind: logits or probs of a softmax, sigmoid_logits or sigmoid_probs; None: the key of each
            .npz says it.
        layout: chw for (C, H, W) and (C, D, H, W), hwc for (H, W, C) and (D, H, W, C).
        labels: folder of the labels, NAME.png, NAME.npy or NAME.nii.gz; None: in each .npz as
            `labels`. Of sigmoids, NAME.npy, NAME.nii.gz or CLASS/NAME.png, a folder for each of
            `class_names`.
        images: folder of the images to draw on, NAME.jpg, NAME.png or NAME.nii.gz; None: in each
            .npz as `image`, or no image at all.
        num_classes: None: as many as the first readable file has.
        class_names: None: class 0, class 1, ...
        ignore_index: label that is not counted; None: 255, or -100 if 255 is a class.
        align_corners: how predictions that are smaller than their labels are resized to them;
            see `torch.nn.functional.interpolate`.
    """

    kind: Kind | None = None
    layout: Layout = "chw"
    labels: Path | None = None
    images: Path | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    ignore_index: int | None = None
    align_corners: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"Expected {name} to be {' or '.join(choices)}, but got {value!r}")
        if self.num_classes is not None:
            check_num_classes(self.num_classes, multilabel=is_sigmoid(self.kind))
        if self.class_names is not None and self.num_classes not in (None, len(self.class_names)):
            raise ValueError(
                f"Expected class_names to be {self.num_classes} names, as num_classes says, "
                f"but got {len(self.class_names)}"
            )
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(map(utf8, self.class_names)))
        for name in ("labels", "images"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise ValueError(f"Expected {name} to be a folder, but {folder} is not one")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The fields of `PredictionFormat` that the manifest in `folder` states; {} without one."""
    paths = [folder / name for name in MANIFESTS if (folder / name).is_file()]
    if not paths:
        return {}
    path = paths[0]
    if len(paths) > 1:
        raise ValueError(f"Expected one manifest, but got {path} and {paths[1].name}")
    stated = read_yaml(path)
    if not isinstance(stated, dict):
        raise ValueError(f"{path}: Expected `key: value` pairs, but got {type(stated).__name__}")
    for key, value in stated.items():
        if key not in _TYPES:
            raise ValueError(f"{path}: Expected keys among {', '.join(_TYPES)}, but got {key!r}")
        if type(value) is not _TYPES[key]:
            raise ValueError(
                f"{path}: Expected {key} to be of type {_TYPES[key].__name__}, but got {value!r}"
            )
    for key in ("labels", "images"):
        if key in stated:
            stated[key] = folder / stated[key]
    if "class_names" in stated:
        stated["class_names"] = tuple(map(str, stated["class_names"]))
    return stated


NIFTI = (".nii.gz", ".nii")
_SUFFIXES = (".npz", ".npy", *NIFTI)
_LABEL_SUFFIXES = (".png", ".npy", *NIFTI)
_LISTED = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
_MAX_FACTOR = 256  # a side is resized by; no network needs more, and a few bytes could ask for it
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", *NIFTI)
_WHOLE_VOXELS = 2**27  # numbers that a volume may have to be read whole, 512 MiB of float32
_PART_VOXELS = 2**23  # numbers in a part of a larger one


class OpenPrediction(NamedTuple):
    """A file of predictions that is open.

    Attributes:
        kind: what its values are.
        shape: reads the shape of its values.
        values: reads its values.
        slabs: reads those of a volume, in parts of so many slices.
        labels: reads the labels, from this file or another one.
    """

    kind: Kind
    shape: Callable[[], tuple[int, ...]]
    values: Callable[[], np.ndarray]
    slabs: Callable[[int], Iterator[np.ndarray]]
    labels: Callable[[], np.ndarray]


class PredictionFolder:
    """Predictions and labels in files, in the order of their names: a `NamedPredictions`.

    Indexing reads and checks one file, and keeps nothing of it. Iterating reads this process's
    share of the files, the next one while the current one is evaluated. Whatever is wrong with a
    file raises `BadFile`: one line that names it.

    Args:
        path: the folder, or a single file.
        skip_bad: when iterating, leave out files that cannot be used, and list them in `skipped`.
        **stated: fields of `PredictionFormat`; they override those in the folder's manifest.
    """

    palette: np.ndarray | None = None

    def __init__(self, path: str | Path, *, skip_bad: bool = False, **stated: Any) -> None:
        self.path, self.skip_bad = Path(path), skip_bad
        self.skipped: dict[str, str] = {}
        self._files = self._list()
        self.names: Sequence[str] = [utf8(_stem(file)) for file in self._files]
        manifest = read_manifest(self.path) if self.path.is_dir() else {}
        with naming(self.path):
            self.format = PredictionFormat(**{**manifest, **stated})

    def _list(self) -> list[Path]:
        """The files, by name."""
        path = self.path
        if path.is_file():
            if not path.name.endswith(_SUFFIXES):
                raise ValueError(f"Expected predictions as {_LISTED}, but got {path}")
            return [path]
        if not path.is_dir():
            raise ValueError(f"Expected a folder of predictions, but {path} does not exist")
        files = [file for file in visible(path) if file.name.endswith(_SUFFIXES)]
        if not files:
            raise ValueError(f"Expected {_LISTED} files of predictions, but {path} has none")
        by_name: dict[str, Path] = {}
        for file in files:
            first = by_name.setdefault(_stem(file), file)
            if first != file:
                raise ValueError(f"Expected one file per name, but got {first} and {file}")
        return files

    def shard(self, number: int, count: int) -> PredictionFolder:
        """Every `count`-th file from file `number` on: what one of `count` machines evaluates."""
        part = copy.copy(self)
        part.skipped = {}
        part._files, part.names = self._files[number::count], self.names[number::count]
        return part

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[Predictions]:
        self.skipped = {}
        indices = range(distributed.rank(), len(self), distributed.world_size())
        batches = (batch for index in indices for batch in self._usable_parts(index))
        with ThreadPoolExecutor(1) as reader:  # reads the next batch while this one is counted
            coming = [reader.submit(next, batches, None)]
            while (batch := coming.pop().result()) is not None:
                coming = [reader.submit(next, batches, None)]
                yield batch
                del batch  # two batches are in memory at most

    def _usable_parts(self, index: int) -> Iterator[Predictions]:
        """A file's predictions; nothing if it is bad and such files are left out."""
        try:
            parts = self.parts(index)
            first = next(parts)
            if first.part is not None and self.skip_bad:
                for _ in parts:  # what is counted cannot be taken back: look at all of it first
                    pass
                parts = self.parts(index)
                first = next(parts)
        except BadFile as error:
            if not self.skip_bad:
                raise
            self.skipped[self.names[index]] = str(error)
            return
        yield first
        del first
        yield from parts

    @cached_property
    def _first(self) -> tuple[Kind, tuple[int, ...]]:
        """The kind and the shape of the values in the first readable file."""
        reason: BadFile | None = None
        for file in self._files:
            try:
                with self._open(file) as found:
                    return found.kind, found.shape()
            except BadFile as error:
                reason = reason or error
        assert reason is not None  # there is at least one file
        raise reason

    @property
    def num_classes(self) -> int:
        """C: as stated, else what the first readable file has."""
        if self.format.class_names is not None:
            return len(self.format.class_names)
        if self.format.num_classes is not None:
            return self.format.num_classes
        shape = self._first[1]
        return shape[0] if len(shape) > 2 and self.format.layout == "chw" else shape[-1]

    @property
    def multilabel(self) -> bool:
        """Whether the predictions are of sigmoid outputs."""
        return is_sigmoid(self.format.kind or self._first[0])

    @property
    def num_images(self) -> int:
        """How many images there are, if all files hold as many as the first readable one."""
        shape = self._first[1]
        return len(self) * (shape[0] if len(shape) == 2 else 1)

    @property
    def class_names(self) -> tuple[str, ...]:
        """C names."""
        return self.format.class_names or tuple(f"class {c}" for c in range(self.num_classes))

    @property
    def ignore_index(self) -> int:
        """The label that is not counted."""
        if self.format.ignore_index is not None:
            return self.format.ignore_index
        return 255 if self.num_classes <= 255 else -100

    def __getitem__(self, index: int) -> Predictions:
        with self._open(self._files[index]) as found:
            return self._whole(index, found)

    def _whole(self, index: int, found: OpenPrediction) -> Predictions:
        """All that a file holds."""
        values, labels = found.values(), found.labels()
        with naming(self._files[index]):
            x, y = self._checked(found.kind, values, labels)
        one = len(x) == 1
        name = self.names[index]
        names = [name] if one else [f"{name}:{row}" for row in range(len(x))]
        return Predictions(names, found.kind, x, y)

    def parts(self, index: int) -> Iterator[Predictions]:
        """What indexing gives; a volume that is large, as parts of some slices, one at a time."""
        with self._open(self._files[index]) as found:
            shape = found.shape()
            if len(shape) == 4 and math.prod(shape) > _WHOLE_VOXELS:
                yield from self._parts_of_volume(index, found)
                return
            whole = self._whole(index, found)
        yield whole

    def _parts_of_volume(self, index: int, found: OpenPrediction) -> Iterator[Predictions]:
        file, kind, shape = self._files[index], found.kind, found.shape()
        if self.format.layout != "chw":
            raise BadFile(f"{file}: Expected a volume this large as (C, D, H, W), layout chw")
        depth = max(1, _PART_VOXELS // (shape[0] * math.prod(shape[2:])))
        slabs, labels = found.slabs(depth), found.labels()
        with naming(file):
            if is_sigmoid(kind) and shape[0] == 1 and labels.ndim == 3:
                labels = labels[None]
            expected = shape if is_sigmoid(kind) else shape[1:]
            if labels.shape != expected:
                raise ValueError(f"Expected labels of shape {expected}, but got {labels.shape}")
            whole = torch.from_numpy(labels)[None]
        for number, values in enumerate(slabs):
            part = VolumePart(whole, number * depth)
            with naming(file):
                there = labels[..., part.start : part.start + values.shape[1], :, :]
                x, y = self._checked(kind, values, there)
            yield Predictions([self.names[index]], kind, x, y, part=part)
            del x, y, values

    def image(self, index: int) -> np.ndarray | None:
        """What to draw a file's predictions on, at the size of its labels; None without an image.

        (H, W, 3) uint8 RGB, or of a volume (D, H, W) or (D, H, W, 3) of any numbers.
        """
        image = self._image(index)
        if image is None:
            return None
        found = next(self.parts(index))
        size = found.values.shape[2:] if found.part is None else found.part.labels.shape[-3:]
        if len(size) == 3:
            if image.shape[:3] != size:
                raise BadFile(
                    f"{self.names[index]}: Expected an image of shape {tuple(size)}, "
                    f"but got {image.shape}"
                )
            return image
        return np.asarray(Image.fromarray(image).resize((size[1], size[0])))

    def _image(self, index: int) -> np.ndarray | None:
        """The image as it is stored."""
        file = self._files[index]
        if self.format.images is not None:
            path = _sibling(file, self.format.images, _IMAGE_SUFFIXES, "image")
            return Nifti(path).read() if is_nifti(path) else read_rgb(path)
        if file.suffix != ".npz":
            return None
        with Npz(file) as arrays:
            image = arrays["image"] if "image" in arrays.keys else None
            if image is None or len(arrays.shape(self._npz_key(file, arrays)[0])) == 4:
                return image
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise BadFile(
                f"{file}: Expected image of shape (H, W, 3) and dtype uint8, "
                f"but got {image.shape} of {image.dtype}"
            )
        return image

    @contextmanager
    def _open(self, file: Path) -> Iterator[OpenPrediction]:
        """Open a file of predictions; what it holds is read inside the block."""
        beside = partial(self._labels_beside, file)
        if is_nifti(file):
            kind, volume = self._stated_kind(file), Nifti(file)
            yield OpenPrediction(kind, lambda: volume.shape, volume.read, volume.slabs, beside)
        elif file.suffix == ".npy":
            yield OpenPrediction(
                self._stated_kind(file),
                shape=partial(npy_shape, file),
                values=partial(read_npy, file),
                slabs=partial(read_slabs, file, None),
                labels=beside,
            )
        else:
            with Npz(file) as arrays:
                key, kind = self._npz_key(file, arrays)
                inside = self.format.labels is None and "labels" in arrays.keys
                yield OpenPrediction(
                    kind,
                    shape=lambda: arrays.shape(key),
                    values=lambda: arrays[key],
                    slabs=partial(read_slabs, file, key),
                    labels=(lambda: arrays["labels"]) if inside else beside,
                )

    def _stated_kind(self, file: Path) -> Kind:
        if self.format.kind is None:
            raise BadFile(
                f"{file}: Expected kind={' or kind='.join(KINDS)} to be stated for "
                f"{file.name.removeprefix(_stem(file))} files"
            )
        return self.format.kind

    def _npz_key(self, file: Path, arrays: Npz) -> tuple[str, Kind]:
        """The key of the values in a .npz, stated or the one there is, and what they are."""
        stated = self.format.kind
        found = [key for key in KINDS if key in arrays.keys and stated in (None, key)]
        if len(found) != 1:
            wanted = f"the key {stated}" if stated else f"one key of {', '.join(KINDS)}"
            listed = ", ".join(arrays.keys) or "none"
            raise BadFile(f"{file}: Expected {wanted}, but got {listed}")
        return found[0], found[0]

    def _labels_beside(self, file: Path) -> np.ndarray:
        """The labels of `file`, from a file of their own."""
        if self.format.labels is None:
            raise BadFile(f"{file}: Expected labels in it or a labels folder to be stated")
        folder = self.format.labels
        whole = [folder / f"{_stem(file)}{suffix}" for suffix in (".npy", *NIFTI)]
        if self.multilabel and not any(path.is_file() for path in whole):
            return np.stack([read_mask(path) for path in self._class_masks(file, folder)])
        path = _sibling(file, folder, _LABEL_SUFFIXES, "label")
        if is_nifti(path):
            return whole_numbers(Nifti(path).read(), path)
        return read_npy(path) if path.suffix == ".npy" else read_mask(path)

    def _class_masks(self, file: Path, folder: Path) -> list[Path]:
        """The mask of each class that belongs to `file`; they have one size."""
        if self.format.class_names is None:
            raise BadFile(
                f"{file}: Expected {folder / _stem(file)}.npy, or class_names and a mask "
                f"{folder / 'CLASS' / _stem(file)}.png for each, but got neither"
            )
        paths = [
            _sibling(file, folder / name, (".png",), "label") for name in self.format.class_names
        ]
        sizes = [image_size(path) for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            if size != sizes[0]:
                raise BadFile(f"{path}: Expected the size {sizes[0]} of {paths[0]}, but got {size}")
        return paths

    def _checked(self, kind: Kind, values: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        """(N, C, *S) values and (N, *S) labels of one size, which can be counted."""
        x, y = self._batch(kind, values, labels)
        if x.shape[1] != self.num_classes:
            raise ValueError(f"Expected {self.num_classes} classes, but got {x.shape[1]}")
        if is_sigmoid(kind) != self.multilabel:
            raise ValueError(f"Expected the kind of the other files, but got {kind}")
        if x.ndim > 3 and x.shape[2:] != y.shape[y.ndim - x.ndim + 2 :]:
            x = _resize(x, kind, y, align_corners=self.format.align_corners)
        _check_values(flatten(x, y, self.ignore_index, multilabel=self.multilabel), kind)
        return x, y

    def _batch(self, kind: Kind, values: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        """(N, C, *S) values, logits of at least float32, and (N, *S) int64 labels."""
        if values.dtype.kind != "f":
            raise ValueError(f"Expected {kind} of a floating dtype, but got {values.dtype}")
        if labels.dtype.kind not in "biu":
            raise ValueError(f"Expected labels of an integer dtype, but got {labels.dtype}")
        if is_sigmoid(kind):
            values, labels = self._sigmoid_batch(kind, values, labels)
        elif values.ndim in (3, 4) and labels.ndim == values.ndim - 1:
            if values.ndim == 3:
                self._check_layout(values.shape, labels.shape)
            values = (values if self.format.layout == "chw" else np.moveaxis(values, -1, 0))[None]
            labels = labels[None]
        elif values.ndim == 1 and labels.size == 1:
            values, labels = values[None], labels.reshape(1)
        elif values.ndim != 2 or labels.shape != values.shape[:1]:
            axes = "C, H, W" if self.format.layout == "chw" else "H, W, C"
            raise ValueError(
                f"Expected {kind} of shape ({axes}) with labels (H, W), the same of volumes with "
                f"D before H, (N, C) with (N,), or (C,) with (), but got {values.shape} with "
                f"{labels.shape}"
            )
        # torch takes up to 8 bytes, in the machine's order.
        native = np.dtype(np.float64) if values.dtype.itemsize > 8 else values.dtype
        dense = torch.from_numpy(values.astype(native.newbyteorder("="), copy=False))
        if kind in ("logits", "sigmoid_logits"):  # numpy would take eight times as long
            dense = dense.to(torch.promote_types(dense.dtype, torch.float32))
        return dense, torch.from_numpy(labels.astype(np.int64))

    def _sigmoid_batch(
        self, kind: Kind, values: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N, K, *S) values and (N, K, *S) labels, whatever their sizes in S."""
        chw = self.format.layout == "chw"
        spatial = values.ndim in (3, 4)
        k = values.shape[0 if chw and spatial else -1] if values.ndim else 0
        if spatial and labels.shape[:1] == (k,) and labels.ndim == values.ndim:
            if values.ndim == 3:
                self._check_layout(values.shape, labels.shape[1:])
        elif spatial and labels.ndim == values.ndim - 1 and k == 1:
            labels = labels[None]
        elif values.ndim not in (1, 2) or labels.shape != values.shape:
            axes = "K, H, W" if chw else "H, W, K"
            raise ValueError(
                f"Expected {kind} of shape ({axes}) with labels (K, H, W), the same of volumes "
                "with D before H, or (N, K) or (K,) with labels of the same shape, but got "
                f"{values.shape} with {labels.shape}"
            )
        if values.ndim < 3:
            return np.atleast_2d(values), np.atleast_2d(labels)
        return (values if chw else np.moveaxis(values, -1, 0))[None], labels[None]

    def _check_layout(self, values: tuple[int, ...], labels: tuple[int, ...]) -> None:
        """Refuse an array whose shape only makes sense in the layout that was not stated."""
        as_chw, as_hwc = values[1:], values[:2]
        stated, other = (as_chw, as_hwc) if self.format.layout == "chw" else (as_hwc, as_chw)
        if self.format.num_classes or _same_aspect(stated, labels):
            return
        if _same_aspect(other, labels):
            wanted = "hwc" if self.format.layout == "chw" else "chw"
            raise ValueError(
                f"Expected layout {self.format.layout}, but shape {values} fits labels {labels} "
                f"only as {wanted}; state layout {wanted}, or num_classes to read it as it is"
            )


def _stem(file: Path) -> str:
    """The name of a file without its ending, which may be .nii.gz."""
    return file.name.removesuffix(".nii.gz") if file.name.endswith(".nii.gz") else file.stem


def whole_numbers(labels: np.ndarray, path: Path) -> np.ndarray:
    """Labels of an integer dtype, from a file whose format may hold them as fractions."""
    if labels.dtype.kind != "f":
        return labels
    rounded = labels.round()
    if not np.array_equal(labels, rounded):
        raise BadFile(f"{path}: Expected labels that are whole numbers, but got fractions")
    return rounded.astype(np.int32)


def _sibling(file: Path, folder: Path, suffixes: tuple[str, ...], what: str) -> Path:
    """The file in `folder` that belongs to `file`."""
    for suffix in suffixes:
        path = folder / f"{_stem(file)}{suffix}"
        if path.is_file():
            return path
    raise BadFile(f"{file}: Expected its {what} {_stem(file)}{{{','.join(suffixes)}}} in {folder}")


def _same_aspect(size: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether one factor takes `size` to `target`, give or take a pixel of rounding in `size`."""
    least = max(t / (s + 1) for s, t in zip(size, target, strict=True))
    most = min(t / max(s - 1, 0.5) for s, t in zip(size, target, strict=True))
    return least <= most


def _resize(values: Tensor, kind: Kind, labels: Tensor, *, align_corners: bool) -> Tensor:
    """(1, C, *s) values at the size of (1, *S) or (1, C, *S) labels, by linear interpolation."""
    size = tuple(labels.shape[labels.ndim - values.ndim + 2 :])
    if any(t < s for s, t in zip(values.shape[2:], size, strict=True)):
        raise ValueError(
            f"Expected labels at least as large as the {kind}, {tuple(values.shape[2:])}, "
            f"but got {size}; labels are never shrunk, so resize the {kind} before saving"
        )
    if max(t / s for s, t in zip(values.shape[2:], size, strict=True)) > _MAX_FACTOR:
        raise ValueError(
            f"Expected {kind} to be resized by a factor of at most {_MAX_FACTOR}, "
            f"but got {tuple(values.shape[2:])} for labels {size}"
        )
    check_size(4 * values.shape[1] * math.prod(size), f"{values.shape[1]} x {size} {kind}")
    wide = resize(values, size, align_corners=align_corners)
    # Probabilities keep their dtype: it says how far from 1 rounding may take their sum.
    return wide if kind in ("logits", "sigmoid_logits") else wide.to(values.dtype)


def _check_values(pixels: Pixels, kind: Kind) -> None:
    """Raise if valid pixels have values that are not finite, or not probabilities."""
    values, valid = pixels.dense, pixels.valid  # (N, C, L), (N, L)
    if kind == "probs":
        good = is_distribution(values, 1)
    elif kind == "sigmoid_probs":
        good = (values[:, 1] >= 0) & (values[:, 1] <= 1)
    else:
        good = values.amin(1).isfinite() & values.amax(1).isfinite()
    bad = int((valid & ~good).sum())
    if bad:
        what = {"probs": "probabilities (0 to 1, sum 1)", "sigmoid_probs": "probabilities (0 to 1)"}
        raise ValueError(
            f"Expected {what.get(kind, 'finite logits')}, "
            f"but {bad} of {int(valid.sum())} pixels have others"
        )
