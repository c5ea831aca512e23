"""Makes the nuclei set of docs/results.md from stage1_train of the Data Science Bowl 2018.

python tools/nuclei.py stage1_train data/nuclei

stage1_train has a folder for each image, with images/NAME.png and a mask of each nucleus in masks/.
The result has the layout `masks` (classes background and nucleus) and, beside images and masks, the
instance maps for `--object-labels`. The hash of its name says where an image belongs: 400 of the
670 images are for training, 100 are the hold-out and 170 the test.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, HOLDOUT = 400, 100


def main() -> None:
    """Read the folders of the images, and write three parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="the folder stage1_train")
    parser.add_argument("out", type=Path, help="folder of the result")
    arguments = parser.parse_args()
    names = [path.name for path in arguments.source.iterdir() if path.is_dir()]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    for index, name in enumerate(names):
        part = "train" if index < TRAIN else "holdout" if index < TRAIN + HOLDOUT else "test"
        image = Image.open(arguments.source / name / "images" / f"{name}.png").convert("RGB")
        instances = np.zeros((image.height, image.width), np.uint16)
        masks = sorted((arguments.source / name / "masks").glob("*.png"))
        for number, mask in enumerate(masks, 1):
            instances[np.asarray(Image.open(mask).convert("L")) > 0] = number
        for kind, picture in (
            ("images", image),
            ("masks", Image.fromarray((instances > 0).astype(np.uint8))),
            ("instances", Image.fromarray(instances)),
        ):
            path = arguments.out / part / kind / f"{name[:12]}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    (arguments.out / "classes.txt").write_text("background\nnucleus\n")


if __name__ == "__main__":
    main()
