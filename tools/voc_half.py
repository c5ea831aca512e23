"""Makes the subset of PASCAL VOC 2012 at half resolution that docs/results.md uses.

python tools/voc_half.py data/VOCdevkit/VOC2012 data/voc2012_half      from the official archive

The images of train and val are those listed in configs/voc2012_half/. Images are averaged over
2 x 2 pixels (Pillow's box filter) and stored as JPEG of quality 88, masks take the nearest pixel.
Of train, a random order (numpy's default_rng(0)) gives four more lists: holdout60, and train60,
train160 and train300, each with the images of the one before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

IDS = Path(__file__).parents[1] / "configs" / "voc2012_half"
LISTS = Path("ImageSets", "Segmentation")
QUALITY = 88
_HOLDOUT, _SIZES = 60, (60, 160, 300)


def training_lists(ids: list[str]) -> dict[str, list[str]]:
    """The hold-out and the training sets of three sizes, by the names of their lists."""
    known = sorted(ids)
    order = [known[i] for i in np.random.default_rng(0).permutation(len(known))]
    lists = {f"train{size}": order[_HOLDOUT : _HOLDOUT + size] for size in _SIZES}
    return {f"holdout{_HOLDOUT}": order[:_HOLDOUT], **lists}


def make_half(source: Path, target: Path, lists: dict[str, list[str]]) -> None:
    """Write the images and masks of all lists at half their size, and the lists."""
    names = sorted({name for ids in lists.values() for name in ids})
    folders = (("JPEGImages", ".jpg"), ("SegmentationClass", ".png"))
    for folder, suffix in folders:
        for name in names:
            path = source / folder / f"{name}{suffix}"
            if not path.is_file():
                raise FileNotFoundError(f"Expected the file {path}, but there is none")
        (target / folder).mkdir(parents=True, exist_ok=True)
    (target / LISTS).mkdir(parents=True, exist_ok=True)
    for name in names:
        with Image.open(source / "JPEGImages" / f"{name}.jpg") as image:
            size = (round(image.width / 2), round(image.height / 2))
            half = image.convert("RGB").resize(size, Image.Resampling.BOX)
            half.save(target / "JPEGImages" / f"{name}.jpg", quality=QUALITY)
        with Image.open(source / "SegmentationClass" / f"{name}.png") as mask:
            half = mask.resize(size, Image.Resampling.NEAREST)
            half.save(target / "SegmentationClass" / f"{name}.png")
    for name, ids in lists.items():
        (target / LISTS / f"{name}.txt").write_text("".join(f"{i}\n" for i in ids), "utf-8")


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="VOCdevkit/VOC2012 of the official archive")
    parser.add_argument("target", type=Path, help="folder to make, such as data/voc2012_half")
    options = parser.parse_args()
    lists = {name: (IDS / f"{name}.txt").read_text("utf-8").split() for name in ("train", "val")}
    lists |= training_lists(lists["train"])
    try:
        make_half(options.source, options.target / "VOCdevkit" / "VOC2012", lists)
    except OSError as error:
        print(f"tools/voc_half.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.target}: " + ", ".join(f"{len(ids)} {name}" for name, ids in lists.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
