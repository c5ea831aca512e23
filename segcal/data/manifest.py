"""What must be known of saved predictions to read them: it is stated, never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segcal.files import check_num_classes, read_yaml, utf8

Kind = Literal["logits", "probs"]
Layout = Literal["chw", "hwc"]
MANIFESTS = ("manifest.yaml", "manifest.yml", "manifest.json")  # JSON is YAML too

_CHOICES = {"kind": ("logits", "probs"), "layout": ("chw", "hwc")}
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
        kind: logits or probs; None: the key of each .npz says it.
        layout: chw for (C, H, W), hwc for (H, W, C).
        labels: folder of the labels, NAME.png or NAME.npy; None: in each .npz as `labels`.
        images: folder of the images to draw on, NAME.jpg or NAME.png; None: in each .npz as
            `image`, or no image at all.
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
            check_num_classes(self.num_classes)
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
                raise ValueError(f"Expected {name} to be a folder, but {folder} is none")


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
