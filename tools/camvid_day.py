"""Makes the CamVid sets of docs/results.md: train by day, test by day and at dusk.

python tools/camvid_day.py CamVid data      from the CamVid folder of the SegNet tutorial

Writes folders in the layout `masks`, with void as label 11; images have 240 x 180 pixels in the
first three:

camvid_day     train: sequences 0006R0 and 0016E5 (305 frames); holdout: the official val, which is
               a part of 0016E5 (101); test: Seq05VD without its first third (114)
camvid_other   test: the first third of Seq05VD (57), a hold-out from another video
camvid_dusk    test: 0001TP (124)
cvB            whole images for networks of others: val: the first third of Seq05VD (57), a hold-out
               that no network was trained on; test: the other official test images (176)

Frames of a video are not independent: names of test frames begin with SEQUENCE_bNN, the block of
ten consecutive frames that they belong to, so that `--group "^.*_b[0-9]+"` makes a block the unit
of every interval.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cv2

CLASSES = [
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
]
BLOCK = 10


def frames(camvid: Path, parts: list[str], sequences: list[str]) -> list[Path]:
    """The images of some official parts that are of some sequences, in the order of the video."""
    found = [path for part in parts for path in (camvid / part).glob("*.png")]
    return sorted((p for p in found if p.name.startswith(tuple(sequences))), key=lambda p: p.name)


def write(paths: list[Path], folder: Path, *, blocks: bool = True, part: int = 2) -> None:
    """Write images, averaged over part x part pixels, and masks, of which one pixel is taken."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(paths):
        name = path.name
        if blocks:
            sequence, frame = name.split("_")
            name = f"{sequence}_b{i // BLOCK:02d}_{frame}"
        image = cv2.imread(str(path))
        mask = cv2.imread(str(path.parent.with_name(path.parent.name + "annot") / path.name), -1)
        if image is None or mask is None:
            raise ValueError(f"{path} or its mask cannot be read")
        size = (image.shape[1] // part, image.shape[0] // part)
        small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(folder / "images" / name), small)
        small = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST_EXACT)
        cv2.imwrite(str(folder / "masks" / name), small)
    print(f"{folder}: {len(paths)} images")


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("camvid", type=Path, help="folder CamVid, with train, trainannot, …")
    parser.add_argument("out", type=Path, help="folder to make the sets in")
    options = parser.parse_args()
    day = frames(options.camvid, ["train"], ["0006R0", "0016E5"])
    video = frames(options.camvid, ["test"], ["Seq05VD"])
    if not day or not video:
        print(f"{options.camvid} has no images of CamVid in train and test", file=sys.stderr)
        return 2
    third = len(video) // 3
    write(day, options.out / "camvid_day/train", blocks=False)
    write(frames(options.camvid, ["val"], [""]), options.out / "camvid_day/holdout", blocks=False)
    write(video[third:], options.out / "camvid_day/test")
    write(video[:third], options.out / "camvid_other/test")
    dusk = frames(options.camvid, ["train", "test"], ["0001TP"])
    write(dusk, options.out / "camvid_dusk/test")
    write(video[:third], options.out / "cvB/val", part=1)
    write(video[third:], options.out / "cvB/test", part=1)
    write(frames(options.camvid, ["test"], ["0001TP"]), options.out / "cvB/test", part=1)
    for name in ("camvid_day", "camvid_other", "camvid_dusk", "cvB"):
        (options.out / name / "classes.txt").write_text("".join(f"{c}\n" for c in CLASSES), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
