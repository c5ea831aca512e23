"""The nuclei set: parts by the hash of the name, masks, and a number for each nucleus."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

TOOL = Path(__file__).parents[2] / "tools" / "nuclei.py"


def test_masks_of_nuclei_become_instance_maps(tmp_path):
    name = "0123456789abcdef"
    place = tmp_path / "stage1_train" / name
    for folder, file in (("images", name), ("masks", "a"), ("masks", "b")):
        (place / folder).mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((4, 6, 3), np.uint8)
        pixels[0 if file == "a" else 2] = 255
        Image.fromarray(pixels).save(place / folder / f"{file}.png")
    subprocess.run([sys.executable, TOOL, place.parent, tmp_path / "out"], check=True)
    part = tmp_path / "out" / "train"
    instances = np.asarray(Image.open(part / "instances" / "0123456789ab.png"))
    assert instances[:, 0].tolist() == [1, 0, 2, 0]
    assert (np.asarray(Image.open(part / "masks" / "0123456789ab.png")) == (instances > 0)).all()
    assert Image.open(part / "images" / "0123456789ab.png").size == (6, 4)
