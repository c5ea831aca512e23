"""What all calibrators share: reading a hold-out, the guard of a fit, saving and loading."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from segcal import distributed, posthoc
from segcal.files import atomic_write
from segcal.pixels import Pixels, countable, flatten

if TYPE_CHECKING:
    from typing_extensions import Self

CALIBRATOR_FORMAT = "segcal.posthoc/2"
MAX_PIXELS = 100_000
LARGEST = 1e30  # a logit below its negative, such as float32's least or -inf, masks its class
_BLOCK_PIXELS = 1 << 14  # mapped at once
_AS_GOOD = 1.001  # times the least NLL: no difference, so the first such choice is taken
_FOLDS = 3  # parts of the hold-out, each of which validates a fit on the others
T = TypeVar("T")


class Calibrator(nn.Module):
    """A map from logits to calibrated logits, fitted on a hold-out.

    calibrator = TemperatureScaling().fit(logits, labels)
    probs = calibrator.predict_proba(logits)

    The hold-out may be a stream that is read batch after batch, so memory does not grow with its
    pixels. A network that makes the batches runs again in each pass. Under torch.distributed each
    rank reads its own share (`indices[rank::world]`, without repeats), and all ranks learn the
    same values.

    A constant that is added to all logits of a pixel changes no probability, and no calibrated
    probability either: logits and their own log-probabilities fit the same map.

    Learned values end in an underscore. They are buffers or parameters, so a fitted calibrator
    moves, and is exported, with the model it belongs to. Every calibrator has

        num_classes_: C.
        nll_before_, nll_after_: mean NLL (nats) of the hold-out without and with the calibrator:
            one temperature as it is, other maps on images that they were not fitted on.
        improved_: whether that was an improvement. If not, the calibrator is the identity.
        passes_: how often the batches were read.

    Args:
        ignore_index: the label that means "do not count this pixel"; by default 255 for up to 255
            classes and -100 for more.
        sync: fit on the hold-out of all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs, and labels (N, K, *S) of 0, 1 or the ignore
            index.
    """

    name: ClassVar[str]  # the short name, key of `METHODS`
    reads_images: ClassVar[bool] = False  # whether images beside the logits help it
    keeps_mask: ClassVar[bool] = False  # whether the predicted class never changes

    num_classes_: int
    nll_before_: float
    nll_after_: float
    improved_: bool
    passes_: int

    def __init__(
        self, *, ignore_index: int | None = None, sync: bool = True, multilabel: bool = False
    ) -> None:
        super().__init__()
        if multilabel and not posthoc.METHODS[self.name].multilabel:
            able = [name for name, method in posthoc.METHODS.items() if method.multilabel]
            raise ValueError(
                f"{self.name} does not calibrate sigmoid outputs (multilabel=True); "
                f"choose from {', '.join(able)}"
            )
        self.ignore_index = ignore_index
        self.sync = sync
        self.multilabel = multilabel

    def fit(
        self,
        batches: Iterable[Any] | Tensor,
        labels: Tensor | None = None,
        images: Tensor | None = None,
    ) -> Self:
        """Learn from a hold-out, and return self.

        Args:
            batches: logits (N, C, *S) with their `labels`, or, without `labels`, a re-iterable
                (list, DataLoader, …) of (logits, labels) or (logits, labels, images). A list of
                N names may come last: images of one name, such as slices of a patient, are never
                on both sides when a fit is checked on images that it has not seen.
            labels: (N, *S).
            images: (N, channels, *), for calibrators that read images.

        Raises:
            ValueError: not a re-iterable; probabilities instead of logits; logits that are not
                finite; no valid pixel or only one class. What was learned before is kept.
        """
        if labels is not None:
            batches = [(batches, labels) if images is None else (batches, labels, images)]
        holdout = Holdout(
            batches, ignore_index=self.ignore_index, sync=self.sync, multilabel=self.multilabel
        )
        with torch.inference_mode(False), torch.no_grad():
            before, after = self._fit(holdout)
        self.passes_ = holdout.passes
        self.nll_before_, self.nll_after_ = before, after
        self.improved_ = after < before
        if not self.improved_:
            self._start(holdout.num_classes, holdout.image_channels)
            self._warn(
                f"the fit takes the NLL of the hold-out from {before:.6g} to {after:.6g}; "
                "logits are left as they are"
            )
        return self

    def forward(self, logits: Tensor, images: Tensor | None = None) -> Tensor:
        """Calibrated logits: their softmax (or sigmoid) gives the calibrated probabilities.

        Args:
            logits: (N, C, *S) of any floating dtype; the result has the same shape and dtype.
            images: (N, channels, *), read by calibrators that were fitted with images.
        """
        self._require_fitted()
        if logits.ndim < 2 or logits.shape[1] != self.num_classes_:
            raise ValueError(
                f"{type(self).__name__} was fitted on logits (N, {self.num_classes_}, *S), "
                f"but got {tuple(logits.shape)}"
            )
        return self._transform(logits, images) if self.improved_ else logits

    def predict_proba(self, logits: Tensor, images: Tensor | None = None) -> Tensor:
        """Calibrated probabilities (N, C, *S) of logits (N, C, *S)."""
        calibrated = self(logits, images)
        return calibrated.sigmoid() if self.multilabel else calibrated.softmax(1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted calibrator as safetensors; `segcal.load_calibrator` reads it."""
        self._require_fitted()
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Calibrator)]
        names = {name for kind in kinds for name in inspect.signature(kind).parameters}
        options = {name: getattr(self, name) for name in sorted(names - {"options"})}
        metadata = {
            "format": CALIBRATOR_FORMAT,
            "calibrator": self.name,
            "options": json.dumps(options),
            "learned": json.dumps(self.numbers()),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with atomic_write(path, "wb") as file:
            file.write(safetensors.torch.save(tensors, metadata))

    def numbers(self) -> dict[str, Any]:
        """The learned values that are plain numbers, by name."""
        return {name: value for name, value in vars(self).items() if name.endswith("_")}

    def extra_repr(self) -> str:
        """The learned numbers."""
        learned = {name: t.item() for name, t in self.named_buffers() if not t.ndim}
        learned |= self.numbers()
        texts = (
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in learned.items()
        )
        return ", ".join(texts) or "not fitted"

    @abstractmethod
    def _start(self, num_classes: int, image_channels: int) -> None:
        """Make the learned values, as the identity."""

    @abstractmethod
    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        """Learn; return the mean NLL before and after."""

    @abstractmethod
    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        """`forward` of checked input."""

    def _require_positive(self, *options: str) -> None:
        for option in options:
            if not getattr(self, option) > 0:
                raise ValueError(f"{option} must be > 0, but got {getattr(self, option)}")

    def _require_fitted(self) -> None:
        if not hasattr(self, "improved_"):
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call fit first")

    def _warn(self, what: str) -> None:
        if distributed.rank() == 0:
            warnings.warn(f"{type(self).__name__}: {what}", stacklevel=3)


def load_calibrator(path: str | os.PathLike[str]) -> Calibrator:
    """The fitted calibrator that `Calibrator.save` wrote, on the CPU.

    Nothing in the file is run: it holds tensors, and the name of one of `METHODS`.

    Raises:
        ValueError: the file is no saved calibrator; the message names it.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != CALIBRATOR_FORMAT:
            raise ValueError(f"its format is {metadata.get('format')}, not {CALIBRATOR_FORMAT}")
        if metadata.get("calibrator") not in posthoc.METHODS:
            raise ValueError(f"its calibrator is {metadata.get('calibrator')!r}")
        kind = posthoc.CALIBRATORS[metadata["calibrator"]]
        calibrator: Calibrator = kind(**json.loads(metadata.get("options", "{}")))
        learned = json.loads(metadata.get("learned", "{}"))
        known = {key for base in kind.__mro__ for key in vars(base).get("__annotations__", ())}
        for key, value in learned.items():
            if key not in known or not key.endswith("_") or not isinstance(value, int | float):
                raise ValueError(f"it has learned {key} = {value!r}")
        with torch.device("meta"):  # takes no memory, whatever sizes the file states
            calibrator._start(learned["num_classes_"], learned.get("image_channels_", 0))
        for key in calibrator.state_dict().keys() & tensors.keys():
            expected, found = calibrator.state_dict()[key], tensors[key]
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                raise ValueError(f"its {key} is {found.dtype} {tuple(found.shape)}")
            if not found.isfinite().all():
                raise ValueError(f"its {key} is not finite")
        calibrator.load_state_dict(tensors, assign=True)
        vars(calibrator).update(learned)
        calibrator._require_fitted()
        return calibrator
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{os.fspath(path)} is no saved calibrator: {reason}") from None


@dataclass(frozen=True, eq=False)
class HoldoutBatch:
    """One batch of a hold-out.

    Attributes:
        logits: (N, C, *S) as given.
        images: (N, channels, *) as given, or None.
        groups: N names of what the images belong to, or None.
        pixels: logits and labels, flat; K sigmoid outputs are folded into two-class problems.
    """

    logits: Tensor
    images: Tensor | None
    groups: Sequence[str] | None
    pixels: Pixels

    @property
    def values(self) -> Tensor:
        """(N, C, L) logits."""
        return self.logits.flatten(2) if self.logits.ndim > 2 else self.logits.unsqueeze(2)

    @property
    def labels(self) -> Tensor:
        """(N, 1, L) labels, or (N, K, L) of sigmoid outputs; -1 where ignored."""
        n, length = len(self.logits), self.values.shape[2]
        known = self.pixels.target.masked_fill(~self.pixels.valid, -1)
        return known.reshape(n, -1, length) if n else known.new_zeros(0, 1, length)


class Holdout:
    """A hold-out that can be read again and again, by all ranks together.

    Attributes:
        passes: how often it was read.
        num_classes: C, known after `survey`.
        image_channels: of the images beside the logits, 0 without; known after `survey`.
        count: the valid labels of all ranks; known after `survey`.
    """

    num_classes: int
    image_channels: int
    count: int

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        ignore_index: int | None = None,
        sync: bool = True,
        multilabel: bool = False,
    ) -> None:
        if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
            raise ValueError(
                "fit reads the batches more than once: pass a list or a DataLoader, "
                f"not a {type(batches).__name__}"
            )
        self.passes = 0
        self.multilabel = multilabel
        self.ranks = distributed.world_size() if sync else 1
        self.rank = distributed.rank() if sync else 0
        self._batches = batches
        self._ignore_index = ignore_index

    def __iter__(self) -> Iterator[HoldoutBatch]:
        self.passes += 1
        for given in self._batches:
            item, groups = given, None
            if isinstance(given, Sequence) and len(given) > 2 and isinstance(given[-1], list):
                *item, groups = given
            if (
                isinstance(item, Tensor)
                or not isinstance(item, Sequence)
                or len(item) not in (2, 3)
                or not all(isinstance(part, Tensor) for part in item)
            ):
                found = [type(part).__name__ for part in item] if isinstance(item, Sequence) else ""
                raise ValueError(
                    "fit takes logits and labels, or batches of (logits, labels) or (logits, "
                    f"labels, images) tensors, but a batch is {found or type(item).__name__}"
                )
            logits, labels = countable(item[0].detach(), item[1])
            pixels = flatten(logits, labels, self._ignore_index, multilabel=self.multilabel)
            images = item[2].detach() if len(item) == 3 else None
            if groups is not None and len(groups) != len(logits):
                raise ValueError(f"Expected {len(logits)} groups, but got {len(groups)}")
            yield HoldoutBatch(logits, images, groups, pixels)

    def survey(self, visit: Callable[[HoldoutBatch], None]) -> None:
        """The first pass: check everything, and show every batch to `visit`.

        A fault on one rank is an error on all, so that none of them waits for the others.

        Raises:
            ValueError: logits that are not finite, or are probabilities; labels out of range;
                no valid pixel, or only one class of them.
        """
        fault, shapes, logits_like = "", set(), False
        counts: dict[int, int] = {}
        try:
            for batch in self:
                channels = 0 if batch.images is None else batch.images.shape[1]
                shapes.add((batch.logits.shape[1], channels))
                pixels, valid = batch.pixels, batch.pixels.valid
                if outside := int(pixels.out_of_range):
                    raise ValueError(f"{outside} labels are neither classes nor the ignore index")
                low, high = pixels.dense.aminmax(dim=1)  # (N, L)
                if bad := int((~((low >= -LARGEST) & (high <= LARGEST)) & valid).sum()):  # NaN too
                    raise ValueError(
                        f"{bad} pixels of a batch have logits of NaN, infinity or past "
                        f"{LARGEST:g}; fit on finite logits whose classes are not masked"
                    )
                for label, count in enumerate(pixels.target[valid].bincount().tolist()):
                    counts[label] = counts.get(label, 0) + count
                logits_like = logits_like or not self._like_probabilities(pixels, low, high)
                visit(batch)
        except ValueError as error:
            fault = str(error)
        everyone = self.everyone((fault, shapes, counts, logits_like))
        for fault, *_ in everyone:
            if fault:
                raise ValueError(fault)
        found = sorted(set().union(*(shapes for _, shapes, _, _ in everyone)))
        if not found:
            raise ValueError("The hold-out has no batches of (logits, labels)")
        if len(found) > 1:
            listed = " and ".join(f"{c} classes with {i} image channels" for c, i in found)
            raise ValueError(f"All batches must have the same classes and images, but got {listed}")
        self.num_classes, self.image_channels = found[0]
        total = sum((Counter(counts) for _, _, counts, _ in everyone), Counter())
        self.count = total.total()
        if not total:
            raise ValueError("The hold-out has no valid pixels: all of it is ignored")
        if len(total) == 1:
            raise ValueError(
                f"The hold-out must have at least 2 classes, but all {self.count} valid pixels "
                f"are of class {next(iter(total))}"
            )
        if not any(logits_like for *_, logits_like in everyone):
            function, inverse = ("sigmoid", "logit") if self.multilabel else ("softmax", "log")
            raise ValueError(
                "The logits look like probabilities: all are in 0..1"
                + ("" if self.multilabel else " and sum to 1 over the classes")
                + f"; pass the network's output before the {function}, or "
                f"probabilities.{inverse}()"
            )

    def total(self, terms: Callable[[Pixels], Tensor]) -> Tensor:
        """Σ of terms(pixels) over all pixels and ranks, on the CPU: one more pass."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in self:
            total = total + terms(batch.pixels).cpu()
            count += int(batch.pixels.valid.sum())
        everyone = self.everyone((total, count))
        if (count := sum(count for _, count in everyone)) != self.count:
            raise ValueError(
                f"The hold-out must have the same {self.count} pixels whenever it is read, "
                f"but it has {count} in pass {self.passes}"
            )
        return sum((total for total, _ in everyone), torch.zeros((), dtype=torch.float64))

    def everyone(self, value: T) -> list[T]:
        """The `value` of each rank; of this one alone without `sync`."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def _like_probabilities(self, pixels: Pixels, low: Tensor, high: Tensor) -> bool:
        """Whether the valid pixels could all be probabilities, once rounded to half precision."""
        if self.multilabel:
            found = (pixels.dense[:, 1] >= 0) & (pixels.dense[:, 1] <= 1)
        else:
            found = (low >= 0) & (high <= 1.01)
            if found.any():
                found &= (pixels.dense.sum(1, dtype=torch.float64) - 1).abs() < 0.01
        return bool((found | ~pixels.valid).all())


class Sample:
    """Rows drawn at random from a hold-out, at most `size` of all ranks.

    Every image has random numbers, seeded with its labels, and the rows with the smallest numbers
    are drawn. So neither the order of the images, nor batches, nor ranks change the sample. Images
    of equal labels are told apart by their order.
    """

    def __init__(self, holdout: Holdout, size: int, seed: int) -> None:
        self._holdout = holdout
        self.size = size
        self._seed = seed
        self._seen: Counter[bytes] = Counter()
        self._rows: list[tuple[Tensor, ...]] = []  # (numbers, images, *columns) on the CPU or GPU
        self._held = 0
        self.limit = torch.inf  # rows with larger numbers are not drawn

    def numbers(self, batch: HoldoutBatch, length: int) -> tuple[Tensor, Tensor]:
        """(N, length) numbers in 0..1 for the rows of each image, and (N, 2) keys.

        The keys are of the image, and of its group.
        """
        images = []
        for labels in batch.labels.cpu().numpy():
            digest = blake2b(labels.tobytes(), digest_size=16).digest()
            before, self._seen[digest] = self._seen[digest], self._seen[digest] + 1
            twin = before * self._holdout.ranks + self._holdout.rank if before else 0
            digest += str(twin).encode()
            images.append(int.from_bytes(blake2b(digest, digest_size=7).digest(), "big"))
        generator, numbers = torch.Generator(), torch.zeros(len(images), length).double()
        for image, row in zip(images, numbers, strict=True):
            row.uniform_(generator=generator.manual_seed((image + self._seed) % 2**63))
        groups = images
        if batch.groups is not None:
            hashes = (blake2b(name.encode(), digest_size=7).digest() for name in batch.groups)
            groups = [int.from_bytes(key, "big") for key in hashes]
        return numbers, torch.tensor([images, groups], dtype=torch.int64).T

    def offer(self, numbers: Tensor, images: Tensor, *columns: Tensor) -> None:
        """Take in rows: their numbers, their (rows, 2) keys, and what is wanted of them."""
        self._rows.append((numbers, images, *columns))
        self._held += len(numbers)
        if self._held > 1.25 * self.size:
            self._keep_smallest(self.size)

    def finish(self) -> tuple[Tensor, ...]:
        """(fold, *columns) of the rows of all ranks, in the order of their numbers.

        fold (rows,) is the part of the hold-out, 0..2, that a row belongs to. Rows of one group
        belong to one fold; of one image, if there is only one group; any, if only one image.
        """
        self._keep_smallest(self.size)
        own = self._rows[0][0].cpu() if self._held else torch.zeros(0, dtype=torch.float64)
        least = torch.cat(self._holdout.everyone(own)).sort().values[: self.size]
        self._keep_smallest(int((own <= least[-1]).sum()))
        columns = self._rows[0] if self._held else ()
        if self._holdout.ranks > 1:
            device = columns[0].device if columns else torch.device("cpu")
            shares = self._holdout.everyone(tuple(column.cpu() for column in columns))
            columns = tuple(torch.cat(c).to(device) for c in zip(*filter(len, shares), strict=True))
        numbers, keys, *wanted = columns
        order = numbers.argsort(stable=True)
        place = torch.arange(len(order), device=order.device)
        for key in (keys[order, 0], keys[order, 1]):  # of images, of groups
            kinds, found = key.unique(return_inverse=True)
            place = found if len(kinds) > 1 else place
        return place % _FOLDS, *(column[order] for column in wanted)

    def _keep_smallest(self, count: int) -> None:
        if not self._held:
            return
        numbers, *columns = (torch.cat(column) for column in zip(*self._rows, strict=True))
        order = numbers.argsort(stable=True)[:count]
        self._rows = [(numbers[order], *(column[order] for column in columns))]
        self._held = len(order)
        if self._held == self.size:
            self.limit = float(numbers[order[-1]])


@dataclass(frozen=True, eq=False)
class PixelSample:
    """P pixels that were drawn from the hold-out of all ranks.

    Attributes:
        x: (C, P) float64 log-probabilities, or (K, P) logits of K sigmoid outputs.
        labels: (P,) classes; of sigmoid outputs (K, P) of 0, 1 or -1 for ignored labels.
        fold: (P,) the part of the hold-out that the pixel's image belongs to.
    """

    x: Tensor
    labels: Tensor
    fold: Tensor

    def __getitem__(self, index: Tensor) -> PixelSample:
        return PixelSample(self.x[:, index], self.labels[..., index], self.fold[index])

    @property
    def pixels(self) -> Pixels:
        """Logits and labels, flat: (1, C, P), or folded (K, 2, P)."""
        multilabel = self.labels.ndim == 2
        return flatten(self.x[None], self.labels[None], -1, multilabel=multilabel)

    def nll(self, logits: Tensor) -> float:
        """Σ over the labels of the NLL of calibrated logits (C, P) or (K, P)."""
        if self.labels.ndim == 1:
            return float(cross_entropy(logits[None], self.labels[None], reduction="sum"))
        known = self.labels >= 0
        y = self.labels[known].to(logits)
        return float(binary_cross_entropy_with_logits(logits[known], y, reduction="sum"))


class PixelSampler:
    """Draws at most `size` valid pixels, all with equal chance, from the batches it is shown.

    With K sigmoid outputs, a pixel is valid if any of its labels is, and is drawn with all.
    """

    def __init__(self, holdout: Holdout, size: int, seed: int) -> None:
        self._sample = Sample(holdout, size, seed)
        self._multilabel = holdout.multilabel

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        values, labels = batch.values, batch.labels
        numbers, images = self._sample.numbers(batch, values.shape[2])
        numbers = numbers.masked_fill((labels < 0).all(1).cpu(), torch.inf)
        limit = min(self._sample.limit, _smallest(numbers, self._sample.size))
        n, at = (numbers < torch.inf).logical_and_(numbers <= limit).nonzero(as_tuple=True)
        i, j = n.to(values.device), at.to(values.device)
        x = values[i, :, j].double()  # (p, C)
        x = x if self._multilabel else x.log_softmax(1)
        self._sample.offer(numbers[n, at].to(x.device), images[n].to(x.device), x, labels[i, :, j])

    def finish(self) -> PixelSample:
        """The sample of all ranks."""
        fold, x, labels = self._sample.finish()
        labels = labels.T.contiguous() if self._multilabel else labels[:, 0]
        return PixelSample(x.T.contiguous(), labels, fold)


def _smallest(numbers: Tensor, count: int) -> float:
    """The largest of the `count` smallest numbers."""
    return float(numbers.flatten().kthvalue(count).values) if numbers.numel() > count else torch.inf


class PixelCalibrator(Calibrator):
    """A map from the log-probabilities of a pixel to calibrated logits, fitted on a sample.

    One pass over the batches draws the sample: each valid pixel has the same chance, and neither
    batches nor ranks change it. A hold-out of up to `max_pixels` is used whole.

    The images are cut into three parts (a single image into three parts of its pixels). The
    calibrator learns from two of them and is judged by its NLL on the third, for each of the
    three. If the NLL is below that of the logits as they are, it learns from all images; if not,
    it is the identity. What it has to choose, such as a penalty, it chooses by the same NLL: the
    strongest penalty (or the fewest epochs) whose NLL is within 0.1 % of the least.

    Args:
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        **options: of `Calibrator`.
    """

    def __init__(
        self,
        *,
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.max_pixels = max_pixels
        self.seed = seed
        self._require_positive("max_pixels")

    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        sampler = PixelSampler(holdout, self.max_pixels, self.seed)
        holdout.survey(sampler)
        sample = sampler.finish()
        self._start(holdout.num_classes, holdout.image_channels)
        self.to(sample.x.device)
        before = after = sample.nll(sample.x)
        if len(folds := sample.fold.unique().tolist()) > 1:
            parts = [self._try(sample[sample.fold != f], sample[sample.fold == f]) for f in folds]
            nlls = [sum(nll) for nll in zip(*parts, strict=True)]
            choice = next(i for i, nll in enumerate(nlls) if nll <= _AS_GOOD * min(nlls))
            after = nlls[choice]
            if after < before:
                self._learn(sample, choice)
        before, after = (nll / int((sample.labels >= 0).sum()) for nll in (before, after))
        # Ranks with other hardware or more threads may round differently: the first one's values.
        state = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        state, numbers, scores = holdout.everyone((state, self.numbers(), (before, after)))[0]
        self.load_state_dict(state)
        vars(self).update(numbers)
        return scores

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        x = wide.flatten(2) if wide.ndim > 2 else wide.unsqueeze(2)
        plain, masked = without_masks(x if self.multilabel else x.log_softmax(1))
        mapped = torch.where(masked, -torch.inf, self._map(plain)).to(logits.dtype)
        if self.keeps_mask:  # rounding may have made ties
            top, best = x.argmax(1, keepdim=True), mapped.amax(1, keepdim=True)
            kinds = torch.finfo(mapped.dtype)
            above = best + best.abs() * kinds.eps + kinds.tiny
            lost = mapped.argmax(1, keepdim=True) != top
            mapped = mapped.scatter(1, top, torch.where(lost, above, mapped.gather(1, top)))
        return mapped.reshape(logits.shape)

    def _nll(self, sample: PixelSample) -> float:
        """Σ of the NLL of the calibrated sample."""
        mapped = [self._map(part[None])[0] for part in sample.x.split(_BLOCK_PIXELS, 1)]
        return sample.nll(torch.cat(mapped, 1))

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        """Σ of the NLL of `validation` after learning from `fitting`, by choice, safest first."""
        self._learn(fitting, 0)
        return [self._nll(validation)]

    @abstractmethod
    def _learn(self, sample: PixelSample, choice: int) -> None:
        """Learn from a sample, with one of the choices of `_try`."""

    @abstractmethod
    def _map(self, x: Tensor) -> Tensor:
        """Calibrated logits (N, C, L) of log-probabilities (N, C, L) in float32 or float64.

        Of K sigmoid outputs, x are the logits themselves.
        """


def without_masks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, C, …) whose masked classes have the least other logit of the pixel instead.

    Calibrators that mix the logits of a pixel would mix -inf into all of them.

    Returns:
        The logits, and a bool of their shape: where a class is masked, by -inf or float32's least.
    """
    masked = x <= -LARGEST
    least = x.masked_fill(masked, torch.inf).amin(1, keepdim=True)
    return torch.where(masked, least.clamp(max=LARGEST), x), masked
