"""Two tiny runs, trained once, for tests of the commands that open runs."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with two runs: seg, on masks of several sizes, and digits, a classifier."""
    from segcal.cli import main

    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 5)):
        for kind in ("images", "masks"):
            (folder / "data" / part / kind).mkdir(parents=True)
        for index in range(count):
            width = 16 if index else 24
            mask = rng.integers(0, 3, (2, width // 8)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
            image = (80 * mask[..., None] + rng.integers(0, 60, (*mask.shape, 3))).astype(np.uint8)
            mask[0] = 255
            Image.fromarray(image).save(folder / "data" / part / "images" / f"{part}{index}.png")
            Image.fromarray(mask).save(folder / "data" / part / "masks" / f"{part}{index}.png")
    (folder / "data" / "classes.txt").write_text("sky\nroad\n<b>car</b>\n")
    common = ["--epochs", "2", "--workers", "0", "--device", "cpu", "--data.holdout", "0.3"]
    seg = ["--data.name", "masks", "--data.root", str(folder / "data"), "--data.crop_size", "16"]
    seg += ["--batch_size", "4", "--out", str(folder / "seg")]
    assert main(["train", *common, *seg]) == 0
    digits = ["--data.name", "digits", "--data.limit", "40", "--model.name", "resnet20"]
    assert main(["train", *common, *digits, "--out", str(folder / "digits")]) == 0
    return folder
