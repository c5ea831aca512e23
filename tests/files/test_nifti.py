"""NIfTI files give the voxels that were stored, or are refused in one line, whatever they hold."""

import gzip

import nibabel
import numpy as np
import pytest

from segcal import files
from segcal.files import BadFile, Nifti

VOXELS = np.arange(120, dtype=np.int16).reshape(2, 3, 4, 5)  # (class, z, y, x)


def write(path, array=VOXELS, affine=None):
    image = nibabel.Nifti1Image(array.T, np.eye(4) if affine is None else affine)
    image.to_filename(path)
    return path


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
def test_axes_are_reversed_and_nothing_is_flipped(tmp_path, ending):
    affine = np.diag([-1.0, -1.0, 2.0, 1.0])  # as most scanners have it
    image = Nifti(write(tmp_path / f"a.{ending}", affine=affine))
    assert image.shape == VOXELS.shape
    np.testing.assert_array_equal(image.read(), VOXELS)
    np.testing.assert_array_equal(image.affine, affine)


def test_nothing_else_is_said_of_a_bad_header(tmp_path, capfd):
    """nibabel logs what it would mend."""
    data = bytearray(write(tmp_path / "a.nii").read_bytes())
    data[344:348] = b"????"  # the magic string
    (tmp_path / "a.nii").write_bytes(data)
    with pytest.raises(BadFile):
        Nifti(tmp_path / "a.nii")
    assert capfd.readouterr() == ("", "")


def test_damaged_files_are_one_line(tmp_path):
    """Bytes of the header changed at random, or the end cut off; of gzip, any byte of it."""
    rng = np.random.default_rng(0)
    whole = write(tmp_path / "a.nii").read_bytes()
    refused = 0
    for i in range(300):
        data = bytearray(gzip.compress(whole) if i % 2 else whole)
        for place in rng.integers(0, min(len(data), 352), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        path = tmp_path / ("b.nii.gz" if i % 2 else "b.nii")
        path.write_bytes(data[: rng.integers(0, len(data))] if i % 5 == 0 else data)
        try:
            Nifti(path).read()
        except BadFile as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    assert 100 < refused < 300


def test_what_asks_for_too_much_memory_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.nii.gz")
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(BadFile, match=r"a\.nii\.gz: .* GiB"):
        Nifti(path).read()
