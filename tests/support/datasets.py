"""Writes small data sets in the layouts of the real ones."""

import pickle

import numpy as np
from PIL import Image
from torchvision import datasets

from segcal.data.classification import DOMAINS, PACS_CLASSES


def write_masks(root, count=12, side=16):
    """A folder of images and masks, as the `masks` data wants it, in train and test parts."""
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        for kind in ("images", "masks"):
            (root / part / kind).mkdir(parents=True)
        for n in range(count):
            image = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(image).save(root / part / "images" / f"{n}.jpg")
            mask = generator.integers(0, 2, (side, side), dtype=np.uint8)
            Image.fromarray(mask).save(root / part / "masks" / f"{n}.png")


def write_cifar(root, *, hundred):
    """Two images in each batch file, rows of 3072 bytes: red plane, green plane, blue plane."""
    cls = datasets.CIFAR100 if hundred else datasets.CIFAR10
    folder = root / cls.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    written = []
    for name, _ in [*cls.train_list, *cls.test_list]:
        data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        labels = {"fine_labels" if hundred else "labels": [1, 7]}
        (folder / name).write_bytes(pickle.dumps({"data": data, **labels}))
        written.append(data)
    meta = {cls.meta["key"]: [f"class {i}" for i in range(100 if hundred else 10)]}
    (folder / cls.meta["filename"]).write_bytes(pickle.dumps(meta))
    return written


def pacs_colour(domain, label, number):
    """The colour of an image of `write_pacs`, which says what it is."""
    return (50 * DOMAINS.index(domain), 30 * label, 40 * number)


def write_pacs(folder):
    """Three plain images of each class in each domain, in `folder`/PACS."""
    for domain in DOMAINS:
        for label, name in enumerate(PACS_CLASSES):
            images = folder / "PACS" / domain / name
            images.mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (20 + label, 18), pacs_colour(domain, label, number))
                image.save(images / f"pic_{number}.png")
