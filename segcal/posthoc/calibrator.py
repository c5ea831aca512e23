"""The base class of all calibrators: fitting with its checks, learned values, saving."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor, nn

from segcal import distributed
from segcal.files import atomic_write
from segcal.posthoc.registry import require_multilabel
from segcal.posthoc.stream import Stream, Survey

if TYPE_CHECKING:
    from typing_extensions import Self

CALIBRATOR_FORMAT = "segcal.posthoc/1"


class Calibrator(nn.Module):
    """A map from logits to calibrated logits, fitted on a hold-out.

    calibrator = TemperatureScaling().fit(batches)
    probs = calibrator(logits).softmax(1)

    The hold-out is read as a stream, batch after batch, so memory does not grow with its pixels. A
    network that makes the batches runs again in each pass. Under torch.distributed each rank reads
    its own share (`indices[rank::world]`, without repeats), and all ranks learn the same values.

    Learned values end in an underscore. They are buffers or parameters, so a fitted calibrator moves,
    and is exported, with the model it belongs to. Every calibrator has

        num_classes_:  C.
        nll_before_, nll_after_: mean NLL (nats) without and with the calibrator on the validation
            pixels: the whole hold-out for one temperature, else images that were not fitted on.
        improved_: whether that was an improvement. If not, the calibrator is the identity.
        passes_: how often the batches were read.

    Args:
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs, and labels (N, K, *S) of 0, 1 or the ignore
            index. The calibrated probabilities are then calibrator(logits).sigmoid().
    """

    name: ClassVar[str]  # the short name, key of `CALIBRATORS`
    reads_images: ClassVar[bool] = False  # whether images beside the logits help it

    num_classes_: int
    nll_before_: float
    nll_after_: float
    improved_: bool
    passes_: int

    def __init__(
        self, *, ignore_index: int = 255, sync: bool = True, multilabel: bool = False
    ) -> None:
        super().__init__()
        if multilabel:
            require_multilabel(self.name)
        self.multilabel = multilabel
        self.ignore_index = ignore_index
        self.sync = sync

    def fit(self, batches: Iterable[Any]) -> Self:
        """Learn from a hold-out, and return self.

        Args:
            batches: a re-iterable (list, DataLoader, …) of (logits, labels), of shapes
                (N, C, *S) and (N, *S), or of (logits, labels, images).

        Raises:
            ValueError: not a re-iterable; probabilities instead of logits; logits that are not
                finite; no valid pixel or only one class. What was learned before is kept.
        """
        stream = Stream(
            batches, ignore_index=self.ignore_index, sync=self.sync, multilabel=self.multilabel
        )
        with torch.inference_mode(False), torch.no_grad():
            survey, before, after = self._fit(stream)
        self.passes_ = stream.passes
        self.nll_before_, self.nll_after_ = before, after
        self.improved_ = after < before
        if not self.improved_:
            self._start(survey.num_classes, survey.image_channels)
            self._warn(
                f"it would take the NLL of the hold-out from {before:.6g} to {after:.6g}; "
                "logits are left as they are"
            )
        return self

    def forward(self, logits: Tensor, images: Tensor | None = None) -> Tensor:
        """Calibrated logits: their softmax gives the calibrated probabilities.

        Args:
            logits: (N, C, *S) of any floating dtype; the result has the same shape and dtype.
            images: (N, channels, *), read by calibrators that were fitted with images.
        """
        self._require_fitted()
        if logits.ndim < 2 or logits.shape[1] != self.num_classes_:
            raise ValueError(
                f"Expected logits of shape (N, {self.num_classes_}, *S), "
                f"but got {tuple(logits.shape)}"
            )
        return self._transform(logits, images)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted calibrator, as safetensors; `segcal.posthoc.load` reads it."""
        self._require_fitted()
        metadata = {
            "format": CALIBRATOR_FORMAT,
            "calibrator": self.name,
            "options": json.dumps(self._options()),
            "learned": json.dumps(self.numbers()),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        content = safetensors.torch.save(tensors, metadata)
        with atomic_write(path, "wb") as file:
            file.write(content)

    def _options(self) -> dict[str, Any]:
        """The arguments that make a calibrator like this one; each is kept under its own name."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

    def numbers(self) -> dict[str, Any]:
        """The learned values that are plain numbers, by name."""
        return {name: value for name, value in vars(self).items() if name.endswith("_")}

    def extra_repr(self) -> str:
        """The numbers learned."""
        scalars = {name: t.item() for name, t in self.named_buffers() if not t.ndim}
        return ", ".join(
            f"{name}={value:.6g}" for name, value in (scalars | self.numbers()).items()
        )

    @abstractmethod
    def _start(self, num_classes: int, image_channels: int) -> None:
        """Make the learned values, as the identity."""

    @abstractmethod
    def _fit(self, stream: Stream) -> tuple[Survey, float, float]:
        """Learn; return what the survey found, and the mean NLL before and after."""

    @abstractmethod
    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        """`forward`, once its input is checked."""

    def _require_positive(self, *options: str) -> None:
        for option in options:
            if not getattr(self, option) > 0:
                raise ValueError(f"Expected {option} > 0, but got {getattr(self, option)}")

    def _require_fitted(self) -> None:
        if not hasattr(self, "num_classes_"):
            raise ValueError(f"Expected a fitted {type(self).__name__}: call fit(batches) first")

    def _warn(self, what: str) -> None:
        if distributed.rank() == 0:
            warnings.warn(f"{type(self).__name__}: {what}", stacklevel=3)
