"""Checkpoints are whole or absent, and nothing in them is run."""

import os
import pickle

import numpy as np
import pytest
import torch

from segcal.training import checkpoint


def test_round_trip(tmp_path):
    state = {"weights": {"w": torch.arange(6.0)}, "history": [{"epoch": 1, "x": None}], "n": 3}
    checkpoint.save_state(tmp_path / "a.pt", state)
    loaded = checkpoint.read_checkpoint(tmp_path / "a.pt")
    assert torch.equal(loaded["weights"]["w"], state["weights"]["w"])
    assert loaded["history"] == state["history"] and loaded["n"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_previous_is_kept(tmp_path):
    assert checkpoint.load_last(tmp_path) is None
    for n in range(3):
        checkpoint.save_last(tmp_path, {"n": n})
    assert checkpoint.read_checkpoint(tmp_path / checkpoint.LAST)["n"] == 2
    assert checkpoint.read_checkpoint(tmp_path / checkpoint.PREVIOUS)["n"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.prev.pt", "last.pt"]


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def one_bit_flipped(path):
    data = bytearray(path.read_bytes())
    at = data.index(np.float32(1234.5).tobytes())
    data[at] ^= 1
    path.write_bytes(data)


def gone(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut_short, emptied, one_bit_flipped, gone])
def test_the_previous_stands_in_for_a_damaged_last(tmp_path, damage, caplog):
    for n in range(2):
        checkpoint.save_last(tmp_path, {"n": n, "w": torch.full((1000,), 1234.5)})
    damage(tmp_path / checkpoint.LAST)
    assert checkpoint.load_last(tmp_path)["n"] == 0
    assert ("continuing from last.prev.pt" in caplog.text) == (damage is not gone)


@pytest.mark.parametrize("damage", [cut_short, emptied, one_bit_flipped])
def test_damage_is_named(tmp_path, damage):
    path = tmp_path / checkpoint.LAST
    checkpoint.save_state(path, {"w": torch.full((1000,), 1234.5)})
    damage(path)
    with pytest.raises(ValueError, match=r"last.pt is damaged"):
        checkpoint.load_last(tmp_path)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_while_writing(tmp_path, monkeypatch, renames):
    """Whatever is on the disk before each rename, a whole checkpoint can be read."""
    for n in range(2):
        checkpoint.save_last(tmp_path, {"n": n})
    replace, left = os.replace, iter(range(renames))

    def power_cut(source, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_last(tmp_path, {"n": 2})
    assert checkpoint.load_last(tmp_path)["n"] == 1


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in the file was run')",)


def pickled_code(path):
    path.write_bytes(pickle.dumps(Malicious()))


def torch_with_code(path):
    torch.save({"x": Malicious()}, path)


def a_list(path):
    torch.save([1, 2], path)


@pytest.mark.parametrize("write", [pickled_code, torch_with_code, a_list])
def test_foreign_files_are_refused(tmp_path, write):
    write(tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt is"):
        checkpoint.read_checkpoint(tmp_path / "x.pt")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.pt"):
        checkpoint.read_checkpoint(tmp_path / "nothing.pt")


def test_the_generator_comes_back_through_a_file(tmp_path):
    checkpoint.save_state(tmp_path / "a.pt", {"generators": checkpoint.rng_state()})
    expected = torch.rand(3)
    torch.rand(3)
    checkpoint.set_rng_state(checkpoint.read_checkpoint(tmp_path / "a.pt")["generators"])
    assert torch.equal(torch.rand(3), expected)


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    checkpoint.save_last(tmp_path, {"n": 1})
    (tmp_path / ".last.next.pt.abc").write_bytes(b"half")
    (tmp_path / ".best.pt.xyz").write_bytes(b"half")
    checkpoint.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
