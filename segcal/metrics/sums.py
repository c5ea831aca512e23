"""What a meter keeps: settings, sums over all pixels and of each image; and its state in a file."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.files import BadFile, Npz, atomic_write, check_num_classes, check_size, one_line
from segcal.pixels import resolve_ignore_index

# The fine histogram of top-label confidence p has bins of width 1/FINE_CELLS up to p = 15/16. From
# there on it has FINE_STEPS bins to each halving of q = 1 - p, because a trained network puts most
# pixels so close to 1 that bins of equal width in p would not tell them apart. All edges are exact
# in binary.
FINE_CELLS = 1024
FINE_STEPS = 64
OCTAVES = 24  # down to q = 2**-24, the last step below 1 that float32 has
_FIRST_OCTAVE = 4  # q < 2**-4 = FINE_STEPS / FINE_CELLS
FINE_BINS = (  # the last one holds 1 - 2**-24 < p <= 1
    FINE_CELLS - FINE_STEPS + (OCTAVES - _FIRST_OCTAVE) * FINE_STEPS + 1
)

# By predicted class, CLASS_STEP fine bins are one; the last one stands alone here too.
CLASS_STEP = 16
CLASS_BINS = FINE_BINS // CLASS_STEP + 1
MOST_BINS = 2**16  # more would be a mistake, and take all memory
MOST_CLASSES = 256  # for more it is not kept: it takes 2 kB per class

_MOST_CELLS = 2**20  # of a confusion matrix of a batch; with more, the cell of each pixel is listed
EDGE_RULES = ("right", "left")


def fine_edges() -> Tensor:
    """(FINE_BINS + 1,) float64 edges of the fine histogram in p, from 0 up to 1."""
    octave = torch.arange(-OCTAVES, -_FIRST_OCTAVE, dtype=torch.float64).unsqueeze(1)
    steps = torch.ldexp(1 + torch.arange(FINE_STEPS) / FINE_STEPS, octave).flatten()
    cells = torch.arange(FINE_STEPS, FINE_CELLS + 1, dtype=torch.float64) / FINE_CELLS
    q = torch.cat([torch.zeros(1, dtype=torch.float64), steps, cells])
    return 1 - q.flip(0)


def class_edges() -> Tensor:
    """(CLASS_BINS + 1,) float64 edges of the fine histogram by class."""
    edges = fine_edges()
    return torch.cat([edges[:-1:CLASS_STEP], edges[-1:]])


@functools.lru_cache(maxsize=64)
def bin_edges(num_bins: int, edge_rule: str, dtype: torch.dtype) -> Tensor:
    """(B + 1,) edges of bins (lo, hi] over [0, 1] in float32 at least; the outer ones are infinite.

    A bin [lo, hi) holds the same numbers as (lo, hi] with lo and hi one step of the dtype smaller,
    so that the comparison is the same for both rules.

    Args:
        num_bins: B.
        edge_rule: "right" for (lo, hi], "left" for [lo, hi).
        dtype: of the probabilities; k/B is rounded to it, so that a probability written as k/B
            lies on the edge whatever its precision.

    Returns:
        The same tensor for the same arguments: not to be changed.
    """
    edges = torch.arange(num_bins + 1, dtype=torch.float64) / num_bins
    edges = edges.to(dtype).to(torch.promote_types(dtype, torch.float32))
    if edge_rule == "left":
        edges = edges.nextafter(-torch.ones_like(edges))
    edges[0], edges[-1] = -torch.inf, torch.inf
    return edges


@dataclass(frozen=True)
class Settings:
    """What two meters must have in common to be added."""

    num_classes: int
    num_bins: int
    ignore_index: int  # None is replaced by the default
    edge_rule: str
    per_image: bool
    class_names: tuple[str, ...] | None
    region: str
    multilabel: bool = False
    top_only: bool = False
    raters: int = 1

    def __post_init__(self) -> None:
        classes = 1 if self.multilabel else 2
        for name, least in (("num_classes", classes), ("num_bins", 1), ("raters", 1)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, but it is {value!r}")
            object.__setattr__(self, name, int(value))  # JSON has no integers of numpy
        check_num_classes(self.num_classes, multilabel=self.multilabel)
        if self.num_bins > MOST_BINS:
            raise ValueError(f"num_bins must be at most {MOST_BINS}, but it is {self.num_bins}")
        ignored = resolve_ignore_index(
            self.ignore_index, 2 if self.multilabel else self.num_classes
        )
        object.__setattr__(self, "ignore_index", ignored)
        check_size(
            8 * self.num_classes * self.num_bins,
            f"a table of {self.num_classes} classes and {self.num_bins} bins",
        )
        if self.edge_rule not in EDGE_RULES:
            raise ValueError(f"edge_rule must be in {EDGE_RULES}, but it is {self.edge_rule!r}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"Expected {self.num_classes} class_names, but got {len(self.class_names)}"
            )

    def require_equal(self, other: Settings) -> None:
        """Raise a ValueError that names the settings that differ, if any do."""
        mine, theirs = asdict(self), asdict(other)
        differing = [
            f"{name} {mine[name]!r} and {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        ]
        if differing:
            raise ValueError(f"Expected meters of equal settings, but got {', '.join(differing)}")


class _Tensors:
    """A dataclass of tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name; the tensors themselves, not copies."""
        return dict(vars(self))


@dataclass
class Sums(_Tensors):
    """Everything the scores of a data set depend on. K classes, B bins, F fine bins, G by class.

    Counts are int64 and sums float64: exact, and exact to rounding, for any number of pixels.

    With K sigmoid outputs, each pixel is K decisions between a class and its absence. The sums of a
    class are over its own decisions; all others are over all decisions, as if they were pixels.

    The fine histogram by class has no rows for more than MOST_CLASSES classes.
    """

    class_count: Tensor  # (K, B) pixels whose p_c lies in the bin
    class_hits: Tensor  # (K, B) of those, how many have label c
    class_confidence: Tensor  # (K, B) their sum of p_c
    top_count: Tensor  # (B,) pixels whose largest probability lies in the bin
    top_hits: Tensor  # (B,) of those, how many are predicted right
    top_confidence: Tensor  # (B,) their sum of the largest probability
    confusion: Tensor  # (K, K) pixels of label (row) and prediction (column); sigmoid: (K, 2, 2)
    fine_correct: Tensor  # (F,) fine histogram of the confidence of right predictions
    fine_wrong: Tensor  # (F,) the same of wrong ones
    fine_confidence: Tensor  # (F,) sum of confidence, right and wrong
    class_fine_correct: Tensor  # (K, G) the same of the pixels predicted as class c; or (0, G)
    class_fine_wrong: Tensor  # (K, G)
    nll: Tensor  # () sum of -log p_y
    brier: Tensor  # () sum of |p - onehot(y)|^2
    images: Tensor  # () images with at least one counted pixel
    faults: Tensor  # (3,) pixels refused on an accelerator for labels, logits, probabilities

    @classmethod
    def zeros(
        cls,
        num_classes: int,
        num_bins: int,
        device: torch.device | str = "cpu",
        *,
        multilabel: bool = False,
    ) -> Sums:
        """No pixels yet; tensors that can be changed in and out of inference mode."""
        k, b = num_classes, num_bins
        by_class = (k if k <= MOST_CLASSES else 0, CLASS_BINS)
        counts: dict[str, tuple[int, ...]] = {
            **{"class_count": (k, b), "class_hits": (k, b), "top_count": (b,), "top_hits": (b,)},
            **{"confusion": (k, 2, 2) if multilabel else (k, k), "images": (), "faults": (3,)},
            **{"fine_correct": (FINE_BINS,), "fine_wrong": (FINE_BINS,)},
            **{"class_fine_correct": by_class, "class_fine_wrong": by_class},
        }
        totals: dict[str, tuple[int, ...]] = {
            **{"class_confidence": (k, b), "top_confidence": (b,), "nll": (), "brier": ()},
            "fine_confidence": (FINE_BINS,),
        }
        with torch.inference_mode(False):
            found = {n: torch.zeros(s, dtype=torch.int64, device=device) for n, s in counts.items()}
            for n, s in totals.items():
                found[n] = torch.zeros(s, dtype=torch.float64, device=device)
            return cls(**{field.name: found[field.name] for field in fields(cls)})

    def add_(self, other: Sums) -> None:
        """Add `other` in place; an empty confusion matrix adds nothing."""
        for name, tensor in self.tensors().items():
            more = getattr(other, name)
            if more.numel():
                tensor += more.to(tensor.device)

    def to(self, device: torch.device | str, *, copy: bool = False) -> Sums:
        """The sums on `device`; with `copy`, they share nothing with these."""
        with torch.inference_mode(False):
            moved = {name: t.to(device, copy=copy) for name, t in self.tensors().items()}
        return Sums(**moved)


@dataclass
class ImageSums(_Tensors):
    """The sums of each of I images that intervals over images need: kilobytes per image.

    A gap is the sum of confidence minus the number of hits in a bin; ECE needs no more.
    """

    pixels: Tensor  # (I,) int64 counted pixels; may be 0. Sigmoid outputs: (I, K), of each class
    top_gap: Tensor  # (I, B) float64
    class_gap: Tensor  # (I, K, B) float64
    intersection: Tensor  # (I, K) int32 pixels predicted right, by class
    predicted: Tensor  # (I, K) int32 pixels predicted as the class
    truth: Tensor  # (I, K) int32 pixels labelled as the class
    class_ace: Tensor  # (I, K) float64 mean |gap| / pixels of the bins that hold pixels

    @classmethod
    def of_no_image(cls, num_classes: int, num_bins: int, *, multilabel: bool) -> ImageSums:
        """No images yet."""
        k, b = num_classes, num_bins
        counts = [torch.zeros((0, k), dtype=torch.int32) for _ in range(3)]
        gaps = [torch.zeros(s, dtype=torch.float64) for s in ((0, b), (0, k, b), (0, k))]
        pixels = torch.zeros((0, k) if multilabel else 0, dtype=torch.int64)
        return cls(pixels, gaps[0], gaps[1], counts[0], counts[1], counts[2], gaps[2])

    @classmethod
    def cat(cls, blocks: Iterable[ImageSums]) -> ImageSums:
        """The images of all `blocks` (at least one), in order, on the CPU."""
        blocks = list(blocks)
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(b, name).cpu() for b in blocks]) for name in names))


class Tables(NamedTuple):
    """What is counted of a batch: sums over the pixels of R images, or of all (R = 1); all float64.

    The last axis of `classes`, `top` and `fine` is (number of pixels, Σ p).
    """

    classes: Any  # (R, K, B, 2); the number of pixels in the first bin is not filled in
    hits: Any  # (R, K, B)
    top: Any  # (R, B, 2, 2) wrong and right
    predicted: Any  # (R, K, 2) wrong and right
    fine: Any  # (F, 2, 2) wrong and right
    class_fine: Any  # (K, G, 2) wrong and right; (0, G, 2) for many classes
    confusion: Any  # (K, K); (0, 0) if cells are listed
    scores: Any  # (2,) NLL and Brier

    @classmethod
    def zeros(cls, make: Callable[[tuple[int, ...]], Any], r: int, k: int, b: int) -> Tables:
        """Empty tables of the arrays that `make` makes of a shape."""
        cells = (k, k) if k * k <= _MOST_CELLS else (0, 0)
        kept = k if k <= MOST_CLASSES else 0
        shapes = [(r, k, b, 2), (r, k, b), (r, b, 2, 2), (r, k, 2)]
        shapes += [(FINE_BINS, 2, 2), (kept, CLASS_BINS, 2), cells, (2,)]
        return cls(*map(make, shapes))

    def batch_sums(self, faults: Tensor, *, per_image: bool) -> BatchSums:
        """What the batch adds to a meter, but for the number of images.

        Args:
            faults: (3,) as in `Sums`.
            per_image: whether R is the number of images.
        """
        classes, hits, top, predicted, fine, class_fine, confusion, scores = self
        count = classes[..., 0]
        pixels = top[..., 0].sum((1, 2))  # (R,)
        count[..., 0] = pixels[:, None] - count[..., 1:].sum(2)
        whole = Sums(
            class_count=count.sum(0).long(),
            class_hits=hits.sum(0).long(),
            class_confidence=classes[..., 1].sum(0),
            top_count=top[..., 0].sum((0, 2)).long(),
            top_hits=top[:, :, 1, 0].sum(0).long(),
            top_confidence=top[..., 1].sum((0, 2)),
            confusion=confusion.long(),
            fine_correct=fine[:, 1, 0].long(),
            fine_wrong=fine[:, 0, 0].long(),
            fine_confidence=fine[..., 1].sum(1),
            class_fine_correct=class_fine[..., 1].long(),
            class_fine_wrong=class_fine[..., 0].long(),
            nll=scores[0],
            brier=scores[1],
            images=faults.new_zeros(()),
            faults=faults,
        )
        if not per_image:
            return BatchSums(whole, None)
        gap = classes[..., 1] - hits
        each = ImageSums(
            pixels=pixels.long(),
            top_gap=top[..., 1].sum(2) - top[:, :, 1, 0],
            class_gap=gap,
            intersection=predicted[..., 1].int(),
            predicted=predicted.sum(2).int(),
            truth=hits.sum(2).int(),
            class_ace=(gap.abs() / count.clamp(min=1)).sum(2) / (count > 0).sum(2).clamp(min=1),
        )
        return BatchSums(whole, each)


@dataclass
class BatchSums:
    """What one batch adds to a meter.

    With many classes a confusion matrix has more cells than a batch has pixels. The batch may then
    list its cells instead, one per pixel.
    """

    sums: Sums  # without confusion if there are cells
    images: ImageSums | None
    cells: Tensor | None = None  # (P,) label · K + prediction
    counted: Tensor | None = None  # (P,) bool, which of the cells to count

    def add_to(self, total: Sums) -> None:
        """Add to the sums of all batches."""
        if self.cells is not None and self.counted is not None:
            confusion = total.confusion.view(-1)
            cells, counted = self.cells.to(confusion.device), self.counted.to(confusion)
            confusion.index_add_(0, cells, counted)
        total.add_(self.sums)

    @classmethod
    def of_problems(cls, parts: Sequence[BatchSums]) -> BatchSums:
        """The sums of K sigmoid outputs from those of their two-class problems.

        Args:
            parts: K, each with the sums of "absent" and "present" as the two classes.
        """
        by_class = _stacked([part.sums for part in parts])  # (K, ...)
        for name, tensor in by_class.items():
            if name.startswith("class_"):
                by_class[name] = tensor[:, 1]
            elif name != "confusion":
                by_class[name] = tensor.sum(0)
        kept = [part.images for part in parts if part.images is not None]
        by_image = _stacked(kept) if kept else {}
        for name, tensor in by_image.items():
            if name == "top_gap":
                by_image[name] = tensor.sum(0)
            elif name == "pixels":
                by_image[name] = tensor.T
            else:
                by_image[name] = tensor[:, :, 1].movedim(0, 1)
        return cls(Sums(**by_class), ImageSums(**by_image) if by_image else None)

    def forget_classes(self) -> None:
        """Leave what a top class and its confidence tell; all other sums are 0, or NaN."""
        for table in (self.sums.class_count, self.sums.class_hits, self.sums.class_confidence):
            table.zero_()
        unknown = [self.sums.nll, self.sums.brier]
        if self.images is not None:
            unknown += [self.images.class_gap, self.images.class_ace]
        for sums in unknown:
            sums.fill_(torch.nan)

    def neutralise(self) -> None:
        """Make a batch with faults add nothing but the faults, without waiting for the device."""
        bad = self.sums.faults.sum() > 0
        for sums in (self.sums, self.images):
            for name, tensor in sums.tensors().items() if sums is not None else ():
                if name != "faults":
                    tensor.masked_fill_(bad, 0)
        if self.counted is not None:
            self.counted.masked_fill_(bad, False)


def _stacked(parts: Sequence[Sums] | Sequence[ImageSums]) -> dict[str, Tensor]:
    """The tensors of all parts by name, stacked: one row per part."""
    return {name: torch.stack([getattr(p, name) for p in parts]) for name in parts[0].tensors()}


def encode_settings(settings: Settings) -> Tensor:
    """The settings as a uint8 tensor."""
    return _to_bytes(json.dumps(asdict(settings)))


def _decode_settings(data: Tensor) -> Settings:
    try:
        settings = json.loads(_to_text(data))
        names = settings.pop("class_names")
        return Settings(**settings, class_names=None if names is None else tuple(map(str, names)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def write_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write the state of a meter as npz, completely or not at all."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in state.items()}
    with atomic_write(path, "wb") as file:
        np.savez(file, **arrays)


def read_state(path: str | os.PathLike[str]) -> tuple[Settings, dict[str, Tensor]]:
    """Read the settings and the state that `write_state` wrote; nothing is unpickled.

    Memory is taken for what the file holds alone, whatever sizes it states.

    Raises:
        ValueError: the file holds something else, or is damaged.
    """
    try:
        with Npz(Path(path), own=True) as arrays:
            settings = _decode_settings(torch.from_numpy(arrays["settings"]))
            for name, shape in _shapes(settings).items():
                if arrays.shape(name) != shape:
                    raise ValueError(
                        f"the settings say {settings.num_classes} classes and "
                        f"{settings.num_bins} bins, but {name} has shape {arrays.shape(name)}"
                    )
            return settings, {name: torch.from_numpy(arrays[name]) for name in arrays.keys}
    except BadFile as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None


def _shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """The shapes of the sums over all pixels, by name."""
    s = settings
    sums = Sums.zeros(s.num_classes, s.num_bins, "meta", multilabel=s.multilabel)
    return {name: tuple(tensor.shape) for name, tensor in sums.tensors().items()}


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise a ValueError unless `state` has the names, shapes and dtypes of the state `own`."""
    if set(state) != set(own):
        odd = sorted(set(state) ^ set(own))
        raise ValueError(f"Expected the state of a CalibrationMeter, but {odd} do not match")
    settings.require_equal(_decode_settings(state["settings"]))
    for name, tensor in own.items():
        # Of any length, as the number of images is.
        text = name in ("names", "groups", "settings", "changed")
        free = 1 if text or name.startswith("image.") else 0
        got = state[name]
        if (
            got.dtype != tensor.dtype
            or got.ndim != tensor.ndim
            or (got.shape[free:] != tensor.shape[free:])
        ):
            raise ValueError(
                f"Expected {name} of {tensor.dtype} {tuple(tensor.shape)}, "
                f"but got {got.dtype} {tuple(got.shape)}"
            )
    rows = {len(decode_names(state[name])) for name in ("names", "groups")}
    rows |= {len(tensor) for name, tensor in state.items() if name.startswith("image.")}
    if len(rows) > 1:
        raise ValueError(f"Expected names, groups and sums of as many images, but got {rows}")


def encode_names(names: Sequence[str]) -> Tensor:
    """Names as a uint8 tensor, each followed by a zero, so that encodings can be concatenated."""
    return _to_bytes("".join(name.replace("\0", " ") + "\0" for name in names))


def decode_names(data: Tensor) -> list[str]:
    """The inverse of `encode_names`."""
    return _to_text(data).split("\0")[:-1]


def _to_bytes(text: str) -> Tensor:
    # Python gives file names that are not UTF-8 as surrogates; they must survive.
    return torch.tensor(list(text.encode("utf-8", "surrogateescape")), dtype=torch.uint8)


def _to_text(data: Tensor) -> str:
    return bytes(data.tolist()).decode("utf-8", "surrogateescape")
