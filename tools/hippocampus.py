"""Trains a small 3-D U-Net of MONAI on the Hippocampus set with losses of segcal.

python tools/hippocampus.py Task04_Hippocampus runs/hippocampus --loss dicece --seed 0
segcal eval --predictions runs/hippocampus/dicece-s0/test \
    --fit-predictions runs/hippocampus/dicece-s0/holdout --posthoc ts

Reads images/*.nii.gz (or imagesTr) and labels/*.nii.gz (or labelsTr) of MSD's Task04: 260 cases
of about 35 x 50 x 36 voxels with the labels background, anterior and posterior. A fixed order gives
180 cases for training, 20 as hold-out and 60 for the test. A training of 40 epochs takes about
eight minutes of one core. Its predictions are written when it is done, and a finished one is not
repeated.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installation
import segcal

SIZE = (48, 64, 48)  # every volume fits into it, and three poolings divide it
HOLDOUT, TEST = 20, 60

Case = tuple[str, Tensor, Tensor]  # name, (1, D, H, W) image, (D, H, W) labels


def read_cases(root: Path) -> list[Case]:
    """All cases that have an image and labels, in a fixed random order."""
    images, labels = (
        next(root / name for name in names if (root / name).is_dir())
        for names in (("images", "imagesTr"), ("labels", "labelsTr"))
    )
    cases = []
    for path in sorted(images.glob("hippocampus_*.nii.gz")):
        if not (labels / path.name).is_file():
            continue
        image = torch.from_numpy(np.asarray(nib.load(path).dataobj, np.float32))
        target = torch.from_numpy(np.asarray(nib.load(labels / path.name).dataobj, np.int64))
        image = (image - image.mean()) / image.std()
        cases.append((path.name.removesuffix(".nii.gz"), image[None], target))
    order = np.random.default_rng(0).permutation(len(cases))
    return [cases[i] for i in order]


def padded(image: Tensor, offset: list[int], value: float) -> Tensor:
    """The last three axes padded to `SIZE`, with `offset` voxels before the volume."""
    pads: list[int] = []
    for before, side, whole in zip(offset, image.shape[-3:], SIZE, strict=True):
        pads = [before, whole - side - before, *pads]  # F.pad begins with the last axis
    return F.pad(image, pads, value=value)


def train(cases: list[Case], loss: str, hyper: dict[str, float], seed: int, epochs: int) -> UNet:
    """Adam on batches of eight volumes: shifted at random, with random contrast and noise."""
    torch.manual_seed(seed)
    network = UNet(3, 1, 3, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=1)
    criterion = segcal.build_loss(loss, **hyper)  # padding has the ignore label 255
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-5)
    steps = epochs * (len(cases) // 8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        total = 0.0
        for indices in torch.randperm(len(cases))[: len(cases) // 8 * 8].split(8):
            images, labels = [], []
            for i in indices.tolist():
                _, image, target = cases[i]
                room = [w - s for w, s in zip(SIZE, target.shape, strict=True)]
                offset = [int(torch.randint(r + 1, ())) for r in room]
                contrast = 0.8 + 0.4 * torch.rand(())
                image = contrast * image + 0.1 * torch.randn(image.shape)
                images.append(padded(image, offset, float(image.min())))
                labels.append(padded(target, offset, 255))
            value = criterion(network(torch.stack(images)), torch.stack(labels))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            total += value.detach().item()
        print(f"epoch {epoch + 1}: loss {total / (len(cases) // 8):.4f}", flush=True)
    return network


@torch.inference_mode()
def predict(network: nn.Module, cases: list[Case], folder: Path) -> None:
    """One npz of logits and labels for each case."""
    network.eval()
    folder.mkdir(parents=True)
    for name, image, target in cases:
        logits = network(padded(image, [0, 0, 0], float(image.min()))[None])[0]
        d, h, w = target.shape
        logits = logits[:, :d, :h, :w].numpy().astype(np.float16)
        np.savez_compressed(
            folder / f"{name}.npz", logits=logits, labels=target.numpy().astype(np.uint8)
        )


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, help="folder of Task04_Hippocampus")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--loss", default="dicece", help="such as dicece, dicece+ace, dicece+mdca")
    parser.add_argument("--beta", type=float, help="weight of the auxiliary loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    run = options.out / f"{options.loss}-s{options.seed}"
    if run.exists():
        print(f"{run} is finished")
        return 0
    cases = read_cases(options.root)
    training = cases[: len(cases) - HOLDOUT - TEST]
    hyper = {} if options.beta is None else {"beta": options.beta}
    network = train(training, options.loss, hyper, options.seed, options.epochs)
    parts = {"holdout": cases[len(training) :][:HOLDOUT], "test": cases[-TEST:]}
    unfinished = run.with_name(f".{run.name}.{os.getpid()}")
    for name, part in parts.items():
        predict(network, part, unfinished / name)
    unfinished.rename(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
