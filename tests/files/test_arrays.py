"""Arrays are read one at a time, of a file that is opened once, within bounds."""

import numpy as np
import pytest

import segcal
from segcal import files as module
from segcal.files import BadFile, Npz
from segcal.sources.saved import PredictionFolder
from tests.fuzz.files import npz
from tests.support.saved import save_folder
from tests.support.states import restated


def test_arrays_by_name(tmp_path):
    path = tmp_path / "a.npz"
    held = {"x": np.arange(6.0).reshape(2, 3, order="F"), "y": np.array(True), "z": np.zeros(3)}
    np.savez_compressed(path, **held)
    with Npz(path) as arrays:
        assert arrays.keys == ["x", "y", "z"]
        assert arrays.shape("x") == (2, 3)
        for name, array in held.items():
            np.testing.assert_array_equal(arrays[name], array)
        with pytest.raises(BadFile, match=r"a\.npz: .*w"):
            arrays["w"]


def test_a_prediction_is_opened_once(tmp_path, monkeypatch):
    folder = PredictionFolder(save_folder(tmp_path / "in", 2))
    assert folder.num_classes == 3
    opened = []

    class Counted(module.zipfile.ZipFile):
        def __init__(self, *args, **options):
            opened.append(args[0])
            super().__init__(*args, **options)

    monkeypatch.setattr(module.zipfile, "ZipFile", Counted)
    assert [batch.names for batch in folder] == [["im000"], ["im001"]]
    assert [path.name for path in opened] == ["im000.npz", "im001.npz"]


def state_of(meter):
    return {name: tensor.numpy() for name, tensor in meter.state_dict().items()}


def test_a_state_is_no_larger_than_its_file(tmp_path, monkeypatch):
    """A file of a few kB states 20,000 classes, whose confusion matrix alone takes 3 GB."""
    meter = segcal.CalibrationMeter(3, ignore_index=-100)
    stated = restated(meter.state_dict(), settings={"num_classes": 20_000, "num_bins": 1})
    state = {name: tensor.numpy() for name, tensor in stated.items()}
    wide = {name: np.zeros((20_000, 1), array.dtype) for name, array in state.items()}
    tall = {name: wide[name] for name in state if name.startswith("class_")}
    flat = {name: state[name][:1] for name in state if name.startswith("top_")}
    path = tmp_path / "state.npz"
    path.write_bytes(npz(**{**state, **tall, **flat}))

    def make(self, *args, **options):
        raise AssertionError("a meter is made before the file is checked")

    monkeypatch.setattr(segcal.CalibrationMeter, "__init__", make)
    with pytest.raises(ValueError, match=r"state\.npz: .* 20000 classes .* confusion has shape"):
        segcal.CalibrationMeter.load(path)


def test_a_state_does_not_unpack_to_more_than_its_file(tmp_path, monkeypatch):
    meter = segcal.CalibrationMeter(50)
    meter.save(tmp_path / "state.npz")
    assert segcal.CalibrationMeter.load(tmp_path / "state.npz").settings == meter.settings
    np.savez_compressed(tmp_path / "small.npz", **state_of(meter))
    monkeypatch.setattr(module, "_SMALL", 1000)
    with pytest.raises(ValueError, match=r"small\.npz: .*unpack"):
        segcal.CalibrationMeter.load(tmp_path / "small.npz")


@pytest.mark.parametrize("num_classes", [10**9, 30_000])
def test_a_meter_of_too_many_classes(num_classes):
    with pytest.raises(ValueError, match="at most 23170"):
        segcal.CalibrationMeter(num_classes)
