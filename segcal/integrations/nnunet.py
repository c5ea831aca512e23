"""nnU-Net v2: what it predicts as saved predictions, and a trainer with a calibrated loss.

nnUNetv2_predict -i imagesTs -o OUT -d DATASET -c 3d_fullres --save_probabilities
segcal eval --predictions OUT --format nnunet --labels labelsTs

nnUNetv2_train -tr nnUNetTrainerMDCA finds the trainer by name in any file of the folder that the
environment variable nnUNet_extTrainer names, such as one with these two lines:

from segcal.integrations.nnunet import mdca_trainer
nnUNetTrainerMDCA = mdca_trainer()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from segcal.files import BadFile, Nifti, Npz, read_yaml, reading
from segcal.integrations import missing
from segcal.losses import build_loss
from segcal.sources.saved import NIFTI, Kind, PredictionFolder, whole_numbers

log = logging.getLogger(__name__)
KEY = "probabilities"
DATASET, VALIDATION = "dataset.json", "validation"
_ROUNDING = 2e-3  # how far from 1 sums of probabilities may be that once were float16
_SAME_PLACE = 1e-3  # millimetres
_MOST_OTHER = 0.5  # share of foreground voxels that may differ between argmax and segmentation


class NnunetFolder(PredictionFolder):
    """The output folder of `nnUNetv2_predict --save_probabilities`, with the true labels.

    Or what `nnUNetv2_train --npz` predicted for the cases that a fold was not trained on: the
    folder fold_X/validation, or that of the trainer, which stands for all its folds together.

    CASE.npz holds the probabilities, CASE.nii.gz the segmentation. The .pkl files beside them are
    never opened. Names of the classes and the ignore label come from dataset.json. The outputs of
    a network that was trained on regions are sigmoids.

    Args:
        path: the folder.
        labels: folder of the true labels, CASE.nii.gz; not with labelled=False.
        **stated: labelled, skip_bad, and other fields of `PredictionFormat`. The folder `images`
            holds CASE_0000.nii.gz.
    """

    def __init__(self, path: str | Path, *, labels: Path | None = None, **stated: Any) -> None:
        if labels is None and stated.get("labelled", True):
            raise ValueError(f"{path}: the format nnunet needs --labels, the folder of true labels")
        path = Path(path)
        dataset = path / DATASET
        if path.name == VALIDATION and not dataset.is_file():
            dataset = path.parent.parent / DATASET  # in the folder of the trainer
        known, self._regions, self._ignored = _read_dataset(dataset)
        kind = "sigmoid_probs" if self._regions else "probs"
        known |= {key: value for key, value in stated.items() if value is not None}
        super().__init__(path, **{**known, "axes": "zyx", "kind": kind, "labels": labels})

    def _list(self) -> list[Path]:
        folds = sorted(self.path.glob(f"fold_[0-9]*/{VALIDATION}"))  # fold_all holds out nothing
        found = [file for folder in folds or [self.path] for file in folder.glob("*.npz")]
        files = sorted((f for f in found if f.name[0] != "."), key=lambda file: file.name)
        if not files:
            raise ValueError(
                f"there are no .npz files in {self.path}: predict with --save_probabilities, or "
                "train with --npz"
            )
        for file, other in pairwise(files):
            if file.name == other.name:
                raise ValueError(f"{file} and {other} have one name: remove one of them")
        return files

    def _key(self, file: Path, arrays: Npz) -> tuple[str, Kind]:
        if KEY not in arrays.keys:
            raise BadFile(f"{file}: the key {KEY} is not among {', '.join(arrays.keys)}")
        assert self.format.kind is not None
        return KEY, self.format.kind

    def _labels_beside(self, file: Path, folder: Path) -> tuple[np.ndarray, bool]:
        found = _nifti(file, folder)
        if found is None:
            raise BadFile(f"{file}: its label {file.stem}.nii.gz is not in {folder}")
        labels = whole_numbers(found.read(), file)
        if not self._regions:
            return labels, True
        inside = np.stack([np.isin(labels, region) for region in self._regions]).astype(np.uint8)
        if self._ignored is not None:
            inside[:, labels == self._ignored] = self.ignore_index
        return inside, True

    def _values_in(
        self, file: Path, arrays: Npz | None
    ) -> tuple[Kind, tuple[int, ...], Callable[[], np.ndarray]]:
        kind, shape, read = super()._values_in(file, arrays)

        def values() -> np.ndarray:
            stored = read()
            self._check_place(file, None if self._regions else stored)
            with reading(file):
                return stored if self._regions else _completed(stored, file)

        return kind, shape, values

    def _check_place(self, file: Path, values: np.ndarray | None) -> None:
        """Refuse labels that lie elsewhere than the predictions."""
        segmented, true = (_nifti(file, f) for f in (file.parent, self.format.label_folders[0]))
        if true is None or segmented is None:
            return  # labels of another format, or the segmentation is gone: shapes are checked
        same = np.allclose(segmented.affine, true.affine, atol=_SAME_PLACE)
        if segmented.shape != true.shape or not same:
            raise BadFile(
                f"{file}: its segmentation and its labels lie elsewhere: "
                f"{_geometry(segmented)}, and {_geometry(true)}"
            )
        if values is None:
            return
        mask, predicted = whole_numbers(segmented.read(), file), values.argmax(0)
        if mask.shape != predicted.shape:
            raise BadFile(
                f"{file}: its probabilities have the shape {predicted.shape}, but its segmentation "
                f"has {mask.shape}"
            )
        found = (mask > 0) | (predicted > 0)
        other = float((mask != predicted)[found].mean()) if found.any() else 0.0
        if other > _MOST_OTHER:  # such as axes that were flipped when the mask was written
            raise BadFile(
                f"{file}: its segmentation is not where the probabilities are largest in "
                f"{100 * other:.0f} % of the foreground: are axes flipped?"
            )

    def _image(self, index: int) -> np.ndarray | None:
        if self.format.images is None:
            return None
        found = _nifti(Path(f"{self.names[index]}_0000"), self.format.images)
        if found is None:
            raise BadFile(f"{self.names[index]}_0000.nii.gz is not in {self.format.images}")
        return found.read()


def _read_dataset(path: Path) -> tuple[dict[str, Any], list[list[int]], int | None]:
    """Fields of `PredictionFormat`, the labels of each region, and the ignored label, as stated."""
    if not path.is_file():
        return {}, [], None
    with reading(path):
        stated = read_yaml(path)  # JSON is YAML too
        labels = stated.get("labels") if isinstance(stated, Mapping) else None
        if not isinstance(labels, Mapping):
            raise ValueError("there are no labels by name in it")
        ignored = labels.get("ignore")
        found = {str(name): number for name, number in labels.items() if name != "ignore"}
        numbers = {name: x if isinstance(x, list) else [x] for name, x in found.items()}
        if any(type(x) is not int for group in numbers.values() for x in group):
            raise ValueError(f"labels must be whole numbers, but are {found}")
        if any(isinstance(x, list) for x in found.values()):  # the background has no output
            numbers = {name: group for name, group in numbers.items() if any(group)}
            return {"class_names": tuple(numbers)}, list(numbers.values()), ignored
        if sorted(numbers.values()) != [[i] for i in range(len(numbers))]:
            raise ValueError(f"labels must be 0, 1, …, but are {sorted(found.values())}")
    known: dict[str, Any] = {"class_names": tuple(sorted(found, key=found.__getitem__))}
    if ignored is not None:
        known["ignore_index"] = ignored
    return known, [], ignored


def _nifti(file: Path, folder: Path | None) -> Nifti | None:
    """The volume in `folder` that has the name of `file`."""
    for suffix in NIFTI:
        path = (folder or file.parent) / f"{file.stem}{suffix}"
        if path.is_file():
            return Nifti(path)
    return None


def _geometry(image: Nifti) -> str:
    corner = ", ".join(f"{x:g}" for x in image.affine[:3, 3])
    return f"shape {image.shape} from ({corner}) mm"


def _completed(values: np.ndarray, file: Path) -> np.ndarray:
    """(C, …) float32 probabilities of sum 1.

    Voxels outside the predicted box are 0 for all classes in files of earlier versions of nnU-Net:
    they count as background. Probabilities that were rounded to float16 are divided by their sum.
    """
    if values.dtype.kind != "f":
        raise ValueError(f"{KEY} must be of a floating dtype, but are {values.dtype}")
    values = values.astype(np.float32, copy=False)
    total = values.sum(0)
    empty = total == 0
    if empty.any():
        log.warning(
            "%s: %d voxels were not predicted: counted as background", file, int(empty.sum())
        )
        values[0][empty] = 1
        total[empty] = 1
    off = np.abs(total - 1)
    if off.max() > 1e-5 and off.max() < _ROUNDING:
        values /= total
    return values


def mdca_trainer(
    spec: str = "dicece+mdca", *, name: str = "nnUNetTrainerMDCA", **hyper: Any
) -> type:
    """A trainer of nnU-Net whose loss is one of segcal's.

    Args:
        spec: as for `segcal.build_loss`, as is `hyper`.
        name: what the class is called; `nnUNetv2_train -tr` and predictions find it by this name.
    """
    try:
        from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    except ImportError as error:
        raise missing("nnunetv2", "nnunet") from error

    class MDCATrainer(nnUNetTrainer):
        def _build_loss(self) -> nn.Module:
            labels = self.label_manager
            loss = ChannelLabels(
                spec, ignore_index=labels.ignore_label, multilabel=labels.has_regions, **hyper
            )
            if not self.enable_deep_supervision:
                return loss
            scales = self._get_deep_supervision_scales()
            weights = np.array([1 / (2**i) for i in range(len(scales))])
            if len(weights) > 1:
                weights[-1] = 0  # as nnU-Net itself does
            return DeepSupervisionWrapper(loss, weights / weights.sum())

    MDCATrainer.__name__ = MDCATrainer.__qualname__ = name
    return MDCATrainer


class ChannelLabels(nn.Module):
    """A loss of segcal on labels with a channel, (N, 1, *S), as nnU-Net has them.

    Args:
        spec: as for `segcal.build_loss`, as is `hyper`.
        ignore_index: label that counts for nothing, or None. With `multilabel` the last channel of
            the labels marks such voxels.
        multilabel: the labels are regions, (N, K, *S) of 0 and 1.
    """

    def __init__(
        self, spec: str, *, ignore_index: int | None, multilabel: bool = False, **hyper: Any
    ) -> None:
        super().__init__()
        self._masked = multilabel and ignore_index is not None
        self._ignored = -1 if ignore_index is None or multilabel else ignore_index
        self.criterion = build_loss(
            spec, ignore_index=self._ignored, multilabel=multilabel, **hyper
        )

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The scalar loss."""
        if not self.criterion.multilabel:
            return self.criterion(logits, target[:, 0].long())
        labels = target[:, : logits.shape[1]].long()
        if self._masked:
            labels = labels.masked_fill(target[:, -1:].bool(), self._ignored)
        return self.criterion(logits, labels)
