"""What a meter keeps: settings, sums over all pixels and of each image; and its state in a file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.files import check_num_classes, check_size, one_line
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
MOST_CELLS = 2**20  # of the confusion matrix of a batch; one with more cells is sparse
EDGE_RULES = ("right", "left")

# Tensors by name. Counts are int64 and sums float64: exact, and exact to rounding, for any number
# of pixels.
Sums = dict[str, Tensor]
_FLOATS = {"class_confidence", "top_confidence", "fine_confidence", "nll", "brier"}


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

    A bin [lo, hi) holds the same numbers as (lo, hi] with lo and hi one step of the dtype smaller.
    Edges are rounded to `dtype`, that of the probabilities, so that a probability written as k/B
    lies on the edge.
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


def sum_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Everything the scores of a data set depend on, by name. K classes, B bins.

    Of K sigmoid outputs, a pixel is K decisions: the sums of a class are over its own decisions,
    all others over all decisions.
    """
    k, b = settings.num_classes, settings.num_bins
    return {
        "class_count": (k, b),  # pixels whose p_c lies in the bin
        "class_hits": (k, b),  # of those, how many have label c
        "class_confidence": (k, b),  # their sum of p_c
        "top_count": (b,),  # pixels whose largest probability lies in the bin
        "top_hits": (b,),  # of those, how many are predicted right
        "top_confidence": (b,),  # their sum of the largest probability
        "confusion": (k, 2, 2) if settings.multilabel else (k, k),  # label (row) and prediction
        "fine_correct": (FINE_BINS,),  # fine histogram of the confidence of right predictions
        "fine_wrong": (FINE_BINS,),  # the same of wrong ones
        "fine_confidence": (FINE_BINS,),  # sum of confidence, right and wrong
        "class_fine_correct": (k, CLASS_BINS),  # the same of the pixels predicted as c
        "class_fine_wrong": (k, CLASS_BINS),
        "nll": (),  # sum of -log p_y
        "brier": (),  # sum of |p - onehot(y)|^2
        "images": (),  # images with at least one counted pixel
        "faults": (3,),  # pixels refused on an accelerator for labels, logits, probabilities
    }


def no_pixels(settings: Settings) -> Sums:
    """The sums of no pixels, which can be changed in and out of inference mode."""
    with torch.inference_mode(False):
        return {
            name: torch.zeros(shape, dtype=_dtype(name))
            for name, shape in sum_shapes(settings).items()
        }


def no_images(settings: Settings) -> Sums:
    """The sums of no images; rows of I images are kilobytes each, and all that intervals need.

    A gap is the sum of confidence minus the number of hits in a bin; ECE needs no more.
    """
    k, b = settings.num_classes, settings.num_bins
    pixels = (0, k) if settings.multilabel else (0,)
    return {
        "pixels": torch.zeros(pixels, dtype=torch.int64),  # (I,) or, of each class, (I, K)
        "top_gap": torch.zeros((0, b), dtype=torch.float64),  # (I, B)
        "class_gap": torch.zeros((0, k, b), dtype=torch.float64),  # (I, K, B)
        "intersection": torch.zeros((0, k), dtype=torch.int32),  # (I, K) right, by class
        "predicted": torch.zeros((0, k), dtype=torch.int32),  # (I, K) predicted as the class
        "truth": torch.zeros((0, k), dtype=torch.int32),  # (I, K) labelled as the class
        # (I, K) mean |gap| / pixels of the bins that hold pixels
        "class_ace": torch.zeros((0, k), dtype=torch.float64),
    }


def add_(total: Sums, more: Sums) -> None:
    """Add in place."""
    for name, tensor in total.items():
        tensor += more[name].to(tensor.device)


def moved(sums: Sums, device: torch.device | str, *, copy: bool = False) -> Sums:
    """The sums on a device; with `copy`, they share nothing with these."""
    with torch.inference_mode(False):
        return {name: tensor.to(device, copy=copy) for name, tensor in sums.items()}


class BatchSums(NamedTuple):
    """What one batch adds to a meter."""

    sums: Sums  # as `sum_shapes` names them
    images: Sums | None  # as `no_images` names them


class Tables(NamedTuple):
    """What a pass counts of a batch, all in float64. R rows: one for each image, or one for all.

    The last axis of `classes`, `top` and `fine` is (number of pixels, Σ p).
    """

    classes: Any  # (R, K, B, 2); the number of pixels in the first bin is not filled in
    hits: Any  # (R, K, B)
    top: Any  # (R, B, 2, 2) wrong and right
    predicted: Any  # (R, K, 2) wrong and right
    fine: Any  # (F, 2, 2) wrong and right
    class_fine: Any  # (K, G, 2) wrong and right
    confusion: Any  # (K, K); (0, 0) for many classes
    scores: Any  # (2,) NLL and Brier

    @classmethod
    def zeros(cls, make: Callable[[tuple[int, ...]], Any], images: int, s: Settings) -> Tables:
        """Empty tables of the arrays that `make` makes of a shape."""
        r, k, b = images if s.per_image else 1, s.num_classes, s.num_bins
        cells = (k, k) if k * k <= MOST_CELLS else (0, 0)
        shapes = [(r, k, b, 2), (r, k, b), (r, b, 2, 2), (r, k, 2)]
        shapes += [(FINE_BINS, 2, 2), (k, CLASS_BINS, 2), cells, (2,)]
        return cls(*map(make, shapes))

    def batch_sums(self, faults: Tensor, s: Settings) -> BatchSums:
        """What the batch adds to a meter, but for the number of images."""
        classes, hits, top, predicted, fine, class_fine, confusion, scores = self
        count = classes[..., 0]
        pixels = top[..., 0].sum((1, 2))  # (R,)
        count[..., 0] = pixels[:, None] - count[..., 1:].sum(2)
        whole = {
            "class_count": count.sum(0).long(),
            "class_hits": hits.sum(0).long(),
            "class_confidence": classes[..., 1].sum(0),
            "top_count": top[..., 0].sum((0, 2)).long(),
            "top_hits": top[:, :, 1, 0].sum(0).long(),
            "top_confidence": top[..., 1].sum((0, 2)),
            "confusion": confusion.long(),
            "fine_correct": fine[:, 1, 0].long(),
            "fine_wrong": fine[:, 0, 0].long(),
            "fine_confidence": fine[..., 1].sum(1),
            "class_fine_correct": class_fine[..., 1].long(),
            "class_fine_wrong": class_fine[..., 0].long(),
            "nll": scores[0],
            "brier": scores[1],
            "images": faults.new_zeros(()),
            "faults": faults,
        }
        gap = classes[..., 1] - hits
        each = {
            "pixels": pixels.long(),
            "top_gap": top[..., 1].sum(2) - top[:, :, 1, 0],
            "class_gap": gap,
            "intersection": predicted[..., 1].int(),
            "predicted": predicted.sum(2).int(),
            "truth": hits.sum(2).int(),
            "class_ace": (gap.abs() / count.clamp(min=1)).sum(2) / (count > 0).sum(2).clamp(min=1),
        }
        if s.top_only:  # what a top class and its confidence do not tell
            for name in ("class_count", "class_hits", "class_confidence"):
                whole[name].zero_()
            for sums in (whole["nll"], whole["brier"], each["class_gap"], each["class_ace"]):
                sums.fill_(torch.nan)
        return BatchSums(whole, each if s.per_image else None)


def join_problems(parts: Sequence[BatchSums]) -> BatchSums:
    """The sums of K sigmoid outputs from those of "absent" and "present", two classes for each."""

    def stacked(sums: Sequence[Sums]) -> Sums:
        return {name: torch.stack([part[name] for part in sums]) for name in sums[0]}

    whole = stacked([part.sums for part in parts])  # (K, ...)
    for name, tensor in whole.items():
        if name.startswith("class_"):
            whole[name] = tensor[:, 1]
        elif name != "confusion":
            whole[name] = tensor.sum(0)
    kept = [part.images for part in parts if part.images is not None]
    if not kept:
        return BatchSums(whole, None)
    each = stacked(kept)  # (K, I, ...)
    for name, tensor in each.items():
        if name == "top_gap":
            each[name] = tensor.sum(0)
        else:
            each[name] = tensor.T if name == "pixels" else tensor[:, :, 1].movedim(0, 1)
    return BatchSums(whole, each)


def encode_about(
    settings: Settings,
    names: Sequence[str],
    groups: Sequence[str],
    *,
    synced: bool = False,
    changed: int | None = None,
) -> Tensor:
    """What the state of a meter holds besides sums, as the uint8 tensor of a JSON text."""
    about = {"settings": asdict(settings), "names": names, "groups": groups}
    text = json.dumps({**about, "synced": synced, "changed": changed})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def read_about(state: Mapping[str, Tensor]) -> tuple[Settings, dict[str, Any]]:
    """The inverse of `encode_about`; a ValueError if sums of the state do not fit the settings."""
    try:
        about = json.loads(bytes(state["about"].tolist()))
        classes = about["settings"].pop("class_names")
        classes = None if classes is None else tuple(map(str, classes))
        settings = Settings(**about.pop("settings"), class_names=classes)
        for text in ("names", "groups"):
            about[text] = [str(name) for name in about[text]]
        about["changed"] = None if about["changed"] is None else int(about["changed"])
        rows = len(about["names"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"Expected the state of a meter, but {one_line(error)}") from None
    expected = {name: (shape, _dtype(name)) for name, shape in sum_shapes(settings).items()}
    for name, tensor in no_images(settings).items():
        expected[f"image.{name}"] = (rows, *tensor.shape[1:]), tensor.dtype
    odd = sorted(set(state) ^ {*expected, "about"}) or ["groups"] * (len(about["groups"]) != rows)
    if odd:
        raise ValueError(f"Expected the state of a meter, but {', '.join(odd)} does not fit")
    for name, (shape, dtype) in expected.items():
        if state[name].shape != shape or state[name].dtype != dtype:
            raise ValueError(
                f"the settings say {settings.num_classes} classes and {settings.num_bins} bins, "
                f"and there are {rows} images, but {name} has shape {tuple(state[name].shape)}"
            )
    return settings, about


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name in _FLOATS else torch.int64
