"""Predictions that any framework saved: their format, their manifest, and a folder of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from segcal import distributed, settings
from segcal.files import (
    BadFile,
    Nifti,
    Npz,
    check_num_classes,
    check_size,
    image_size,
    is_nifti,
    npy_shape,
    read_confidence,
    read_mask,
    read_npy,
    read_rgb,
    read_yaml,
    reading,
    utf8,
    visible,
)
from segcal.pixels import check_batch, flatten, resolve_ignore_index
from segcal.sources.members import pooled
from segcal.sources.source import KINDS, Batch, Kind, Source, digest, resize

MANIFESTS = ("manifest.yaml", "manifest.yml", "manifest.json")  # JSON is YAML too
NIFTI = (".nii.gz", ".nii")
SAMPLES = "samples"  # the key of (M, C, ...) predictions of M members, in .npz files
TOP, CONFIDENCE = "_pred.png", "_conf.png"  # endings of the two files of a top-1 prediction
_SUFFIXES = (".npz", ".npy", *NIFTI)
_LISTED = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"


@dataclass(frozen=True)
class PredictionFormat:
    """What a folder of predictions holds.

    Attributes:
        kind: logits or probs of a softmax, sigmoid_logits or sigmoid_probs; null: the key of each
            .npz says it. NAME_pred.png and NAME_conf.png are top1, whatever is stated.
        layout: chw for (C, H, W) and (C, D, H, W), hwc for (H, W, C) and (D, H, W, C).
        axes: the order of the axes of volumes in .npz and .npy files: zyx for (D, H, W) as
            SimpleITK and nnU-Net have them, xyz as nibabel has them. Null: where labels or
            predictions beside them are NIfTI, their shape decides if only one order fits.
        labels: folder of the labels, NAME.png, NAME.npy or NAME.nii.gz, or a list of such folders,
            one for each rater; null: in each .npz as `labels`. Of sigmoids, NAME.npy, NAME.nii.gz
            or CLASS/NAME.png, a folder for each of `class_names`.
        images: folder of the images to draw on, NAME.jpg, NAME.png or NAME.nii.gz; null: in each
            .npz as `image`, or no image at all.
        num_classes: null: as many as the first readable file has.
        class_names: null: class 0, class 1, ...
        ignore_index: the label that is not counted; null: 255, or -100 if 255 is a class.
        align_corners: how predictions that are smaller than their labels are resized to them;
            see `torch.nn.functional.interpolate`.
        group: regular expression; images in whose names it finds the same text, such as the patient
            of a slice, are one unit of intervals.
    """

    kind: Kind | None = None
    layout: Literal["chw", "hwc"] = "chw"
    axes: Literal["xyz", "zyx"] | None = None
    labels: Path | tuple[Path, ...] | None = None
    images: Path | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    ignore_index: int | None = None
    align_corners: bool = False
    group: str = ""

    def __post_init__(self) -> None:
        if self.num_classes is not None:
            check_num_classes(self.num_classes, multilabel=(self.kind or "").startswith("sigmoid"))
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(map(utf8, self.class_names)))
            if self.num_classes not in (None, len(self.class_names)):
                raise ValueError(
                    f"class_names are {len(self.class_names)} names, "
                    f"but num_classes is {self.num_classes}"
                )
        for name in ("labels", "images"):
            stated = getattr(self, name)
            for folder in stated if isinstance(stated, tuple) else [stated]:
                if folder is not None and not folder.is_dir():
                    raise ValueError(f"{name} must be a folder, but {folder} is not one")

    @property
    def label_folders(self) -> tuple[Path, ...]:
        """The folder of the labels of each rater; none if labels are in the files."""
        labels = self.labels or ()
        return labels if isinstance(labels, tuple) else (labels,)


class PredictionFolder(Source):
    """Predictions and labels in files, in the order of their names.

    Indexing reads and checks one file, and keeps nothing of it. Iterating reads this process's
    share of the files, the next one while the current one is evaluated. Whatever is wrong with a
    file raises `BadFile`: one line that names it.

    Args:
        path: the folder, or a single file.
        skip_bad: when iterating, leave out files that cannot be used, and list them in `skipped`.
        labelled: False reads no labels; predictions have the size of their image, if that is known.
        **stated: fields of `PredictionFormat`; they override those in the folder's manifest.
    """

    num_images: int
    stored = True

    def __init__(
        self, path: str | Path, *, skip_bad: bool = False, labelled: bool = True, **stated: Any
    ) -> None:
        self.path, self.skip_bad, self.skipped = Path(path), skip_bad, {}
        self.labelled = labelled
        self.top_only = self.path.is_dir() and any(self.path.glob(f"*{TOP}"))
        resolved = self.path.resolve()
        self.name = utf8(resolved.stem if self.path.is_file() else resolved.name)
        self._files = self._list()
        self.names = [utf8(_stem(file)) for file in self._files]
        where, manifest = _manifest(self.path)
        stated = {name: value for name, value in stated.items() if value is not None}
        self.format = settings.read(PredictionFormat, [(where, manifest), ("", stated)])
        folders = ", ".join(map(str, self.format.label_folders)) or "null"
        self.group = self.format.group
        self.config = f"predictions: {self.path}\nlabels: {folders}\n"
        kind, shape, self.pools, self.raters = self._first()
        self.multilabel = kind.startswith("sigmoid_")
        self.num_images = len(self._files) * (shape[0] if len(shape) == 2 else 1)
        last = len(shape) <= 2 or self.format.layout == "hwc"
        names = self.format.class_names or ()
        self.num_classes = (
            len(names) or self.format.num_classes or (shape[-1] if last else shape[0])
        )
        self.class_names = names or tuple(f"class {c}" for c in range(self.num_classes))
        classes = 2 if self.multilabel else self.num_classes
        self.ignore_index = resolve_ignore_index(self.format.ignore_index, classes)

    def _list(self) -> list[Path]:
        """The files, by name."""
        path = self.path
        if path.is_file():
            if not path.name.endswith(_SUFFIXES):
                raise ValueError(f"predictions are {_LISTED} files, but {path} is none")
            return [path]
        if not path.is_dir():
            raise ValueError(f"there is no folder of predictions at {path}")
        files = [file for file in visible(path) if file.name.endswith((*_SUFFIXES, TOP))]
        if not files:
            raise ValueError(
                f"there are no predictions in {path}: no {_LISTED} files, nor NAME{TOP} with "
                f"NAME{CONFIDENCE}"
            )
        other = [file for file in files if not file.name.endswith(TOP)]
        if self.top_only and other:
            raise ValueError(
                f"{path} holds NAME{TOP} and {other[0].name}: use one kind in a folder"
            )
        by_name: dict[str, Path] = {}
        for file in files:
            first = by_name.setdefault(_stem(file), file)
            if first != file:
                raise ValueError(f"{first} and {file} have one name: remove one of them")
        return files

    def only(self, indices: Sequence[int]) -> PredictionFolder:
        """The same folder with some of its files."""
        part = copy.copy(self)
        part.skipped = {}
        part._files = [self._files[i] for i in indices]
        part.names = [self.names[i] for i in indices]
        part.num_images = self.num_images * len(indices) // max(len(self._files), 1)
        return part

    def fingerprint(self) -> str:
        """A digest of the format and of the files: their names, sizes and times."""
        files = [*self._files]
        for folder in (*self.format.label_folders, self.path) if self.labelled else ():
            files += sorted(folder.rglob("*"))  # nothing where the path is a file
        about = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        return digest(settings.to_dict(self.format), self.skip_bad, about)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[Batch]:
        self.skipped = {}
        indices = range(distributed.rank(), len(self), distributed.world_size())
        batches = filter(None, map(self._unless_bad, indices))
        with ThreadPoolExecutor(1) as reader:  # reads the next batch while this one is counted
            coming = [reader.submit(next, batches, None)]
            while (batch := coming.pop().result()) is not None:
                coming = [reader.submit(next, batches, None)]
                yield batch
                del batch  # two batches are in memory at most

    def _unless_bad(self, index: int) -> Batch | None:
        try:
            return self[index]
        except BadFile as error:
            if not self.skip_bad:
                raise
            self.skipped[self.names[index]] = str(error)
            return None

    def __getitem__(self, index: int) -> Batch:
        kind, members, labels, _ = self._read(index)
        name = self.names[index]
        rows = len(members[0])
        names = [name] if rows == 1 else [f"{name}:{row}" for row in range(rows)]
        with reading(self._files[index]):
            checked = (self._checked(kind, values, labels) for values in members)
            return pooled(Batch(names, kind, x, y if self.labelled else None) for x, y in checked)

    def image(self, index: int) -> np.ndarray | None:
        """What to draw a file's predictions on, at the size of its labels; None without an image.

        (H, W, 3) uint8 RGB, or of a volume (D, H, W) or (D, H, W, 3) of any numbers.
        """
        image = self._image(index)
        if image is None:
            return None
        _, (values, *_), labels, flipped = self._read(index)
        size = labels.shape[labels.ndim - values.ndim + 2 :]
        if len(size) == 3:
            if flipped and self.format.images is None:
                image = image.transpose(2, 1, 0, *range(3, image.ndim))
            if image.shape[:3] != size:
                raise BadFile(
                    f"{self.names[index]}: the image has the shape {image.shape}, "
                    f"but the labels have {tuple(size)}"
                )
            return image
        return np.asarray(Image.fromarray(image).resize((size[1], size[0])))

    def affine(self, index: int) -> np.ndarray | None:
        """(4, 4) of the image, or of the NIfTI file of the predictions or beside them."""
        found = self._volume(self._files[index])
        return None if found is None else found.affine

    def _volume(self, file: Path) -> Nifti | None:
        """The NIfTI file that says where the predictions in `file` are, if there is one."""
        for folder in filter(None, (self.format.images, file.parent)):
            for name in (_stem(file), f"{_stem(file)}_0000"):  # nnU-Net's name of an image
                for suffix in NIFTI:
                    if (path := folder / f"{name}{suffix}").is_file():
                        return Nifti(path)
        return None

    def _image(self, index: int) -> np.ndarray | None:
        """The image as it is stored."""
        file = self._files[index]
        if self.format.images is not None:
            suffixes = (".jpg", ".jpeg", ".png", *NIFTI)
            path = _sibling(file, self.format.images, suffixes, "image")
            return Nifti(path).read() if is_nifti(path) else read_rgb(path)
        if file.suffix != ".npz":
            return None
        with Npz(file) as arrays:
            image = arrays["image"] if "image" in arrays.keys else None
            if image is None or len(self._values_in(file, arrays)[1]) == 4:
                return image
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise BadFile(
                f"{file}: image must be (H, W, 3) of dtype uint8, "
                f"but is {image.shape} of {image.dtype}"
            )
        return image

    def _first(self) -> tuple[Kind, tuple[int, ...], bool, int]:
        """Of the first readable file: kind and shape of values, whether of members, and raters."""
        reason: BadFile | None = None
        for file in self._files:
            try:
                with ExitStack() as stack:
                    arrays = stack.enter_context(Npz(file)) if file.suffix == ".npz" else None
                    kind, shape, _ = self._values_in(file, arrays)
                    pools = arrays is not None and self._key(file, arrays)[0] == SAMPLES
                    raters = max(len(self.format.label_folders), 1)
                    if arrays is not None and not self.format.labels and "labels" in arrays.keys:
                        labels = arrays.shape("labels")
                        axes = len(shape) - (not kind.startswith("sigmoid_"))
                        raters = max(labels[0], 1) if len(labels) == axes + 1 else 1
                    return kind, shape, pools, raters if self.labelled else 1
            except BadFile as error:
                reason = reason or error
        assert reason is not None  # there is at least one file
        raise reason

    def _read(self, index: int) -> tuple[Kind, list[np.ndarray], np.ndarray, bool]:
        """The kind, the values of each member and the labels, and whether x, y, z became z, y, x.

        Members are in files with the key `samples`; other files have one.
        """
        file = self._files[index]
        with ExitStack() as stack:
            arrays = stack.enter_context(Npz(file)) if file.suffix == ".npz" else None
            kind, shape, read_values = self._values_in(file, arrays)
            if not self.labelled:
                sketch, beside = self._placeholder(file, kind, shape)
                read_labels = partial(np.asarray, sketch)
            elif arrays is not None and not self.format.labels and "labels" in arrays.keys:
                sketch, beside = np.broadcast_to(np.uint8(0), arrays.shape("labels")), False
                read_labels = partial(arrays.__getitem__, "labels")
            else:
                if not self.format.labels:
                    raise BadFile(f"{file}: there are no labels in it, and no folder of labels")
                folders = self.format.label_folders
                found = [self._labels_beside(file, folder) for folder in folders]
                each, beside = [labels for labels, _ in found], found[0][1]
                if any(labels.shape != each[0].shape for labels in each):
                    raise BadFile(f"{file}: the labels of the raters differ in size")
                sketch = each[0] if self.raters == 1 else np.stack(each)
                read_labels = partial(np.asarray, sketch)
            nifti = is_nifti(file), beside
            with reading(file):
                # Shapes are checked before gigabytes are unpacked, on arrays that take no memory.
                self._of_raters(kind, np.broadcast_to(np.float32(0), shape), sketch, nifti)
                values, labels = read_values(), read_labels()
                members = values if values.ndim > len(shape) else values[None]
                given = [self._of_raters(kind, member, labels, nifti) for member in members]
                return kind, [values for values, _, _ in given], *given[0][1:]

    def _values_in(
        self, file: Path, arrays: Npz | None
    ) -> tuple[Kind, tuple[int, ...], Callable[[], np.ndarray]]:
        """The kind and the shape of a file's values, and what reads them."""
        if self.top_only:
            classes = self.format.num_classes or len(self.format.class_names or ())
            if not classes:
                raise ValueError(
                    f"the files in {self.path} do not say how many classes there are: state "
                    "num_classes or class_names"
                )
            width, height = image_size(file)
            return "top1", (classes, height, width), partial(_read_top, file, classes)
        if arrays is not None:
            key, kind = self._key(file, arrays)
            shape = arrays.shape(key)
            if key == SAMPLES:
                if len(shape) < 2 or not shape[0]:
                    raise BadFile(f"{file}: samples must be (M, C, ...), but are {shape}")
                shape = shape[1:]
            return kind, shape, partial(arrays.__getitem__, key)
        if self.format.kind is None:
            ending = file.name.removeprefix(_stem(file))
            raise BadFile(f"{file}: say what {ending} files hold: kind={' or kind='.join(KINDS)}")
        if is_nifti(file):
            volume = Nifti(file)
            return self.format.kind, volume.shape, volume.read
        return self.format.kind, npy_shape(file), partial(read_npy, file)

    def _key(self, file: Path, arrays: Npz) -> tuple[str, Kind]:
        """The key of the values in a .npz, stated or the one there is, and what they are."""
        stated = self.format.kind
        if SAMPLES in arrays.keys and not any(key in arrays.keys for key in KINDS):
            return SAMPLES, stated or "probs"
        found = [key for key in KINDS if key in arrays.keys and stated in (None, key)]
        if len(found) != 1:
            wanted = f"the key {stated}" if stated else f"one key of {', '.join(KINDS)}"
            listed = ", ".join(arrays.keys) or "none"
            raise BadFile(f"{file}: expected {wanted}, but got {listed}")
        return found[0], found[0]

    def _labels_beside(self, file: Path, folder: Path) -> tuple[np.ndarray, bool]:
        """The labels of `file` from a file in `folder`, and whether that is NIfTI."""
        whole = [folder / f"{_stem(file)}{suffix}" for suffix in (".npy", *NIFTI)]
        if self.multilabel and not any(path.is_file() for path in whole):
            if self.format.class_names is None:
                raise BadFile(
                    f"{file}: expected {whole[0]}, or class_names and a mask "
                    f"{folder / 'CLASS' / _stem(file)}.png for each"
                )
            paths = [_sibling(file, folder / n, (".png",), "label") for n in self.class_names]
            sizes = [image_size(path) for path in paths]
            for path, size in zip(paths, sizes, strict=True):
                if size != sizes[0]:
                    raise BadFile(f"{path} has the size {size}, but {paths[0]} has {sizes[0]}")
            return np.stack([read_mask(path) for path in paths]), False
        path = _sibling(file, folder, (".png", ".npy", *NIFTI), "label")
        if is_nifti(path):
            return whole_numbers(Nifti(path).read(), path), True
        return (read_npy(path) if path.suffix == ".npy" else read_mask(path)), False

    def _placeholder(
        self, file: Path, kind: Kind, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, bool]:
        """Zeros in place of labels, of the size of the image or else of the values; as NIfTI?"""
        nifti = is_nifti(file)
        if len(shape) <= 2:
            size = shape if kind.startswith("sigmoid_") else shape[:-1]
            return np.zeros(size, np.uint8), nifti
        chw = self.format.layout == "chw"
        size, classes = (shape[1:], shape[0]) if chw else (shape[:-1], shape[-1])
        if self.format.images is not None and len(size) == 2:
            image = _sibling(file, self.format.images, (".jpg", ".jpeg", ".png"), "image")
            size = image_size(image)[::-1]
        elif self.format.images is not None and len(size) == 3:
            found = self._volume(file)
            size, nifti = (size, nifti) if found is None else (found.shape[-3:], True)
        full = (classes, *size) if kind.startswith("sigmoid_") else size
        return np.zeros(full, np.uint8), nifti

    def _of_raters(
        self, kind: Kind, values: np.ndarray, labels: np.ndarray, nifti: tuple[bool, bool]
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """As `_arranged`; labels of several raters become (R, N, *S) or (R, N, C, *S)."""
        if self.raters == 1:
            return self._arranged(kind, values, labels, nifti)
        if not labels.ndim or len(labels) != self.raters:
            raise ValueError(
                f"expected the labels of {self.raters} raters, but got {labels.shape}: all files "
                "must have as many"
            )
        if len(labels) == self.num_classes and (labels.sum(0) == 1).all():
            raise ValueError("the labels are one-hot: save labels.argmax(0) instead")
        each = [self._arranged(kind, values, one, nifti) for one in labels]
        return each[0][0], np.stack([arranged for _, arranged, _ in each]), each[0][2]

    def _arranged(
        self, kind: Kind, values: np.ndarray, labels: np.ndarray, nifti: tuple[bool, bool]
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """(N, C, *s) values and (N, *S) or (N, C, *S) labels, as views, and whether axes turned.

        `nifti` says whether the values, and the labels, are from a NIfTI file.
        """
        shapes = values.shape, labels.shape
        sigmoid = kind.startswith("sigmoid_")
        chw = self.format.layout == "chw" or kind == "top1"
        if values.ndim in (3, 4):  # one map or volume
            classes_first = values if chw else np.moveaxis(values, -1, 0)
            if sigmoid and len(classes_first) == 1 and labels.ndim == values.ndim - 1:
                labels = labels[None]
            fits = labels.ndim == values.ndim - (not sigmoid)
            fits = fits and (not sigmoid or len(labels) == len(classes_first))
            if fits and values.ndim == 3:
                self._check_layout(values.shape, labels.shape[-2:])
            values, labels = classes_first[None], labels[None]
        elif sigmoid:
            fits = values.ndim in (1, 2) and labels.shape == values.shape
            values, labels = np.atleast_2d(values), np.atleast_2d(labels)
        elif values.ndim == 1:
            fits = labels.size == 1
            values, labels = values[None], labels.reshape(-1)
        else:
            fits = values.ndim == 2 and labels.shape == values.shape[:1]
        if not fits:
            raise ValueError(
                f"{kind} of shape {shapes[0]} do not fit labels of shape {shapes[1]} with layout "
                f"{self.format.layout}: docs/predictions.md lists the shapes"
            )
        if values.shape[1] != self.num_classes:
            raise ValueError(f"expected {self.num_classes} classes, but got {values.shape[1]}")
        if sigmoid != self.multilabel:
            raise ValueError(f"the other files do not hold {kind}: use one kind in a folder")
        mixed = nifti[0] != nifti[1]
        flipped = values.ndim == 5 and self._is_xyz(values.shape[2:], labels.shape[-3:], mixed)
        if flipped and not nifti[0]:  # NIfTI files are read as z, y, x already
            values = np.moveaxis(values, (-3, -2, -1), (-1, -2, -3))
        if flipped and not nifti[1]:
            labels = np.moveaxis(labels, (-3, -2, -1), (-1, -2, -3))
        if values.ndim > 3:
            small, size = values.shape[2:], labels.shape[labels.ndim - values.ndim + 2 :]
            if any(t < s for s, t in zip(small, size, strict=True)):
                raise ValueError(
                    f"the {kind} {small} are larger than their labels {size}: labels are never "
                    f"shrunk, so resize the {kind} before saving"
                )
            classes = values.shape[1]
            check_size(4 * classes * math.prod(size), f"{classes} x {size} {kind}")
        return values, labels, flipped

    def _is_xyz(self, values: tuple[int, ...], labels: tuple[int, ...], mixed: bool) -> bool:
        """Whether volumes in .npz and .npy files have their axes as x, y, z."""
        if self.format.axes is not None or not mixed:
            return self.format.axes == "xyz"
        zyx, xyz = values == labels, values[::-1] == labels
        if not zyx and not xyz:  # smaller predictions
            zyx, xyz = _same_aspect(values, labels), _same_aspect(values[::-1], labels)
        if zyx and xyz:
            raise ValueError(
                f"the shape {values} fits NIfTI as x, y, z and as z, y, x: state axes xyz (as "
                "nibabel has them) or zyx (as SimpleITK and nnU-Net have them)"
            )
        return xyz

    def _check_layout(self, values: tuple[int, ...], labels: tuple[int, ...]) -> None:
        """Refuse an array whose shape only makes sense in the layout that was not stated."""
        layout = self.format.layout
        wanted = "hwc" if layout == "chw" else "chw"
        sizes = {"chw": values[1:], "hwc": values[:2]}
        if self.format.num_classes or _same_aspect(sizes[layout], labels):
            return
        if _same_aspect(sizes[wanted], labels):
            raise ValueError(
                f"the shape {values} fits labels {labels} only as layout {wanted}, not {layout}: "
                f"state layout {wanted}, or num_classes to read it as it is"
            )

    def _checked(self, kind: Kind, values: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        """(N, C, *S) values, logits of float32 at least, and int64 labels, that can be counted."""
        if values.dtype.kind != "f":
            raise ValueError(f"{kind} must be of a floating dtype, but are {values.dtype}")
        if labels.dtype.kind not in "biu":
            raise ValueError(f"labels must be of an integer dtype, but are {labels.dtype}")
        # torch takes up to 8 bytes, in the machine's order.
        native = np.dtype(np.float64) if values.dtype.itemsize > 8 else values.dtype
        x = torch.from_numpy(values.astype(native.newbyteorder("="), copy=False))
        y = torch.from_numpy(labels.astype(np.int64))
        stored = x.dtype
        if kind.endswith("logits"):  # numpy would take eight times as long
            x = x.to(torch.promote_types(stored, torch.float32))
        size = tuple(y.shape[y.ndim - x.ndim + 2 :])
        each = y if self.raters > 1 else [y]  # the labels of each rater
        if kind == "top1":
            if x.shape[2:] != size:
                raise ValueError(
                    f"it has {tuple(x.shape[2:])} pixels, but its labels have {size}: save the "
                    "predicted class and its confidence at the size of the labels"
                )
            missing = (x.sum(1) == 0).flatten(1)
            if any((flatten(x, one, self.ignore_index).valid & missing).any() for one in each):
                raise ValueError(f"a predicted class is not in 0..{x.shape[1] - 1}")
            return x, y
        if x.ndim > 3 and x.shape[2:] != size:
            x = resize(x, size, align_corners=self.format.align_corners)
            # Probabilities keep their dtype: it says how far from 1 rounding may take their sum.
            x = x.to(stored) if kind.endswith("probs") else x
        probs = kind.endswith("probs")
        for one in each:
            check_batch(x, one, self.ignore_index, probs=probs, multilabel=self.multilabel)
        return x, y


def _manifest(path: Path) -> tuple[str, dict[str, Any]]:
    """What errors about the manifest of a folder begin with, and what it states."""
    found = [path / name for name in MANIFESTS if (path / name).exists()]
    if not found:
        return "", {}
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1].name} are two manifests: remove one")
    stated = read_yaml(found[0])
    if stated is None:  # only comments
        return "", {}
    if not isinstance(stated, dict):
        raise ValueError(f"{found[0]}: a manifest is `key: value` pairs")
    for key in {"labels", "images"} & stated.keys():
        if isinstance(stated[key], str):
            stated[key] = path / stated[key]
        elif isinstance(stated[key], list):
            stated[key] = [path / folder for folder in map(str, stated[key])]
    return f"{found[0]}: ", stated


def _stem(file: Path) -> str:
    """The name of a file without its ending, which may be .nii.gz or _pred.png."""
    ending = next((e for e in (".nii.gz", TOP) if file.name.endswith(e)), file.suffix)
    return file.name.removesuffix(ending)


def _read_top(file: Path, classes: int) -> np.ndarray:
    """(C, H, W) float32: the confidence at the predicted class, and 0 elsewhere.

    A confidence of 0 becomes 1e-30, so that the predicted class still has the largest number. All
    are 0 where the predicted class is none of the C.
    """
    beside = file.with_name(_stem(file) + CONFIDENCE)
    predicted, confidence = read_mask(file).astype(np.int64), read_confidence(beside)
    if predicted.shape != confidence.shape:
        raise BadFile(f"{beside} has the size {confidence.shape}, but {file} {predicted.shape}")
    known = (predicted >= 0) & (predicted < classes)
    values = np.zeros((classes, *predicted.shape), np.float32)
    place = np.where(known, predicted, 0)[None]
    np.put_along_axis(values, place, np.where(known, confidence.clip(1e-30), 0)[None], 0)
    return values


def whole_numbers(labels: np.ndarray, path: Path) -> np.ndarray:
    """Labels of an integer dtype, from a file whose format may hold them as fractions."""
    if labels.dtype.kind != "f":
        return labels
    rounded = labels.round()
    if not np.array_equal(labels, rounded):
        raise BadFile(f"{path}: labels must be whole numbers, but some are fractions")
    return rounded.astype(np.int32)


def _sibling(file: Path, folder: Path, suffixes: tuple[str, ...], what: str) -> Path:
    """The file in `folder` that belongs to `file`."""
    for suffix in suffixes:
        path = folder / f"{_stem(file)}{suffix}"
        if path.is_file():
            return path
    raise BadFile(f"{file}: its {what} {_stem(file)}{{{','.join(suffixes)}}} is not in {folder}")


def _same_aspect(size: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether one factor takes `size` to `target`, give or take a pixel of rounding in `size`."""
    least = max(t / (s + 1) for s, t in zip(size, target, strict=True))
    most = min(t / max(s - 1, 0.5) for s, t in zip(size, target, strict=True))
    return least <= most
