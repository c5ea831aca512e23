"""CamVid by day and at dusk: the sequences that each part has, and half-size images and masks."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np

TOOL = Path(__file__).parents[2] / "tools" / "camvid_day.py"


def make(root, part, name, label):
    for folder, values in ((part, np.full((4, 8, 3), 10 * label)), (f"{part}annot", label)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        values = np.broadcast_to(np.uint8(values), (4, 8, 3)[: np.ndim(values) or 2])
        cv2.imwrite(str(root / folder / name), values)


def test_sequences_become_parts_and_blocks_of_ten_frames(tmp_path):
    root = tmp_path / "CamVid"
    make(root, "train", "0006R0_f00930.png", 1)
    make(root, "train", "0016E5_00001.png", 2)
    make(root, "train", "0001TP_006690.png", 3)
    make(root, "val", "0016E5_07959.png", 4)
    make(root, "test", "0001TP_008550.png", 5)
    for frame in range(33):
        make(root, "test", f"Seq05VD_f{30 * frame:05}.png", 11)
    subprocess.run([sys.executable, TOOL, root, tmp_path / "out"], check=True)

    def names(part):
        return [path.stem for path in sorted((tmp_path / "out" / part / "images").iterdir())]

    assert names("camvid_day/train") == ["0006R0_f00930", "0016E5_00001"]
    assert names("camvid_day/holdout") == ["0016E5_07959"]
    assert names("camvid_dusk/test") == ["0001TP_b00_006690", "0001TP_b00_008550"]
    assert names("camvid_other/test")[-1] == "Seq05VD_b01_f00300"
    assert len(names("camvid_other/test")) == 11
    assert names("camvid_day/test")[0] == "Seq05VD_b00_f00330"
    assert names("camvid_day/test")[-1] == "Seq05VD_b02_f00960"
    mask = cv2.imread(str(tmp_path / "out/camvid_day/train/masks/0016E5_00001.png"), -1)
    assert mask.shape == (2, 4)
    assert (mask == 2).all()
    image = cv2.imread(str(tmp_path / "out/camvid_day/train/images/0016E5_00001.png"))
    assert image.shape == (2, 4, 3)
    assert (image == 20).all()
    assert names("cvB/val") == names("camvid_other/test")
    assert names("cvB/test") == ["0001TP_b00_008550", *names("camvid_day/test")]
    assert cv2.imread(str(tmp_path / "out/cvB/val/masks" / "Seq05VD_b00_f00000.png"), -1).shape == (
        4,
        8,
    )


def test_a_folder_without_camvid_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path, tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no images of CamVid" in done.stderr
