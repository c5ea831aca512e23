"""What all calibrators share: the guard of a fit, choices between fits, saving and loading."""

from __future__ import annotations

import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from segcal import distributed, posthoc
from segcal.files import atomic_write
from segcal.posthoc.holdout import LARGEST, Holdout, PixelSample, PixelSampler, flat

if TYPE_CHECKING:
    from typing_extensions import Self

CALIBRATOR_FORMAT = "segcal.posthoc/2"
MAX_PIXELS = 100_000
_BLOCK_PIXELS = 1 << 14  # mapped at once
_ROUNDING = 1e-12  # of the NLL: a change that small is none


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
        self.improved_ = after < (1 - _ROUNDING) * before
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
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        options = {name: value for name, value in public.items() if not name.endswith("_")}
        del options["training"]  # of nn.Module
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

    def _start(self, num_classes: int, image_channels: int = 0) -> None:
        """Make the learned values, as the identity."""
        self.num_classes_ = num_classes
        for name, value in self._identity(num_classes, image_channels).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    @abstractmethod
    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        """The learned values by name, as they are when logits stay as they are."""

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
        with torch.device("meta"):  # takes no memory, whatever sizes the file states
            calibrator._start(learned["num_classes_"], learned.get("image_channels_", 0))
        known = {*calibrator.numbers(), "nll_before_", "nll_after_", "improved_", "passes_"}
        for key, value in learned.items():
            if key not in known or not isinstance(value, int | float):
                raise ValueError(f"it has learned {key} = {value!r}")
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


class SampledCalibrator(Calibrator):
    """A calibrator that is fitted on a sample of the hold-out, and judged on images of it.

    The images of the sample are cut into three parts (a single image into three parts of its
    rows). The calibrator learns from two of them and is judged by its NLL on the third, for each
    of the three. If the NLL is below that of the logits as they are, it learns from all images; if
    not, it is the identity. What it has to choose, such as a penalty, it chooses by the same NLL:
    the strongest penalty (or the fewest epochs) whose NLL is as good as the least.
    """

    _as_good: ClassVar[float] = 1.001  # times the least NLL: no difference
    _choices: int = 1  # how many there are, the safest first

    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        sampler = self._sampler(holdout)
        holdout.survey(sampler)
        sample = sampler.finish()
        self._start(holdout.num_classes, holdout.image_channels)
        self.to(sample.x.device)
        before = after = float(sample.nll(sample.x))
        if len(folds := sample.fold.unique()) > 1:
            parts = [self._try(sample[sample.fold != f], sample[sample.fold == f]) for f in folds]
            nlls = [sum(nll) for nll in zip(*parts, strict=True)]
            choice = next(i for i, nll in enumerate(nlls) if nll <= self._as_good * min(nlls))
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

    def _try(self, fitting: Any, validation: Any) -> list[float]:
        """Σ of the NLL of `validation` after learning from `fitting`, by choice."""
        nlls = []
        for choice in range(self._choices):
            self._learn(fitting, choice)
            nlls.append(self._nll(validation))
        return nlls

    @abstractmethod
    def _sampler(self, holdout: Holdout) -> Any:
        """What is shown each batch and then has the sample, with x, labels, fold and nll(x)."""

    @abstractmethod
    def _learn(self, sample: Any, choice: int) -> None:
        """Learn from a sample, with one of the choices."""

    @abstractmethod
    def _nll(self, sample: Any) -> float:
        """Σ of the NLL of the calibrated sample."""


class PixelCalibrator(SampledCalibrator):
    """A map from the log-probabilities of a pixel to calibrated logits, fitted on a sample.

    One pass over the batches draws the sample: each valid pixel has the same chance, and neither
    batches nor ranks change it. A hold-out of up to `max_pixels` is used whole.
    `SampledCalibrator` says how the fit is judged; an NLL within 0.1 % of the least is as good.

    Args:
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        **options: of `Calibrator`.
    """

    def __init__(self, *, max_pixels: int = MAX_PIXELS, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.max_pixels = max_pixels
        self.seed = seed
        self._require_positive("max_pixels")

    def _sampler(self, holdout: Holdout) -> PixelSampler:
        return PixelSampler(holdout, self.max_pixels, self.seed)

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        x = flat(logits).to(torch.promote_types(logits.dtype, torch.float32))
        plain, masked = without_masks(x if self.multilabel else x.log_softmax(1))
        mapped = torch.where(masked, -torch.inf, self._map(plain)).to(logits.dtype)
        if self.keeps_mask and not self.multilabel:  # rounding may have made ties
            top, best = x.argmax(1, keepdim=True), mapped.amax(1, keepdim=True)
            kinds = torch.finfo(mapped.dtype)
            above = best + best.abs() * kinds.eps + kinds.tiny
            lost = mapped.argmax(1, keepdim=True) != top
            mapped = mapped.scatter(1, top, torch.where(lost, above, mapped.gather(1, top)))
        return mapped.reshape(logits.shape)

    def _nll(self, sample: PixelSample) -> float:
        mapped = [self._map(part[None])[0] for part in sample.x.split(_BLOCK_PIXELS, 1)]
        return sample.nll(torch.cat(mapped, 1))

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
