"""Public classification sets, from tiny files in their official formats."""

import gzip
import socket
import struct

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torchvision import datasets

from segcal.data import DataConfig
from segcal.data import build as build_data
from tests.support.datasets import write_cifar


def build(name, root, **options):
    return build_data(DataConfig(name, root=str(root), **options), seed=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_batches(name, tmp_path, monkeypatch):
    written = write_cifar(tmp_path, hundred=name == "cifar100")
    with pytest.raises(ValueError, match=rf"Expected {name.upper()} in .*corrupted"):
        build(name, tmp_path)  # the checksums are not those of the real files
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = build(name, tmp_path)
    assert data.num_classes == len(data.class_names) == (100 if name == "cifar100" else 10)
    assert len(data.train) + len(data.holdout) == 2 * (len(written) - 1) and len(data.test) == 2
    image, label = data.test[1]
    assert label.item() == 7
    raw = written[-1][1].reshape(3, 32, 32) / 255
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    expected = (raw - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(image.numpy(), expected, atol=1e-5)
    assert data.train[(1, 0)][0].shape == (3, 32, 32)
    assert not torch.equal(data.train[(1, 0)][0], data.train[(2, 0)][0])  # pad, crop, flip


def test_svhn_matrices(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)  # SVHN puts the images last
    labels = np.array([[1], [2], [10], [3]], dtype=np.uint8)  # and calls the digit 0 class 10
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels})
    monkeypatch.setattr(datasets.SVHN, "_check_integrity", lambda self: True)
    data = build("svhn", tmp_path)
    assert [int(data.test[i][1]) for i in range(4)] == [1, 2, 0, 3]
    assert (data.test.image(2) == images[..., 2]).all()
    index = int(data.train.names[0].removeprefix("train-"))
    assert (data.train.image(0) == images[..., index]).all()
    assert torch.equal(data.train[(1, 0)][0], data.train[(2, 0)][0])  # SVHN is not augmented


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files(tmp_path, packed):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)

    def write(name, content):
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    for part in ("train", "t10k"):
        header = struct.pack(">IIII", 2051, 3, 28, 28)
        write(f"{part}-images-idx3-ubyte", header + images.tobytes())
        labels = write(f"{part}-labels-idx1-ubyte", struct.pack(">II", 2049, 3) + bytes([5, 0, 9]))
    before = {path.name for path in folder.iterdir()}
    data = build("mnist", tmp_path)
    image, label = data.test[2]
    assert image.shape == (3, 28, 28) and label.item() == 9
    np.testing.assert_allclose(image[1].numpy(), (images[2] / 255 - 0.1307) / 0.3081, atol=1e-5)
    assert {path.name for path in folder.iterdir()} == before  # the folder may be read-only
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"Expected MNIST's format in .*{labels.name}") as caught:
        build("mnist", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "voc2012"])
def test_missing_data_says_how_to_get_it(name, tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for download in (False, True):
        with pytest.raises(ValueError, match=rf"{tmp_path}.*data/README.md") as caught:
            build(name, tmp_path, download=download)
        assert "\n" not in str(caught.value)


def test_real_mnist(shared_data):
    data = build("mnist", shared_data, limit=100)
    assert data.num_classes == 10 and len(data.test) == 100
    pixels = torch.stack([data.test[i][0] for i in range(100)])
    assert abs(pixels.mean()) < 0.1 and abs(pixels.std() - 1) < 0.1
