"""A few mutations of every kind of input; `python -m tests.fuzz.run` tries as many as one likes."""

import random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import segcal
from segcal.evaluation import folder as results
from segcal.losses import build_loss
from segcal.sources.saved import _manifest
from segcal.training.config import load_config
from tests.fuzz.files import Payload, pt
from tests.fuzz.guard import Escaped, guarded
from tests.fuzz.mutate import mutated
from tests.fuzz.run import attempt, cases, warm_up
from tests.fuzz.targets import TARGETS

# The examples as they are, and some mutations; cheap targets get more.
COUNTS = dict.fromkeys(TARGETS, 20) | {"loss": 100, "state": 40, "calibrator": 40, "checkpoint": 7}
COUNTS |= {"config": 10, "names": 12, "labels": 12, "volumes": 12, "nnunet": 12}
COUNTS |= {"adapters": 40}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_worse_than_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warm_up(name, tmp_path)
    for data in cases(name, COUNTS[name], 0, TARGETS[name].examples(tmp_path)):
        attempt(name, data, tmp_path)
    assert not list(tmp_path.rglob("pwned"))


def test_mutations_are_many_and_repeatable(tmp_path):
    for name, target in TARGETS.items():
        if name == "checkpoint":
            continue  # a training is made for it
        example = target.examples(tmp_path)[0]
        made = [mutated(random.Random(n), example, target.kind) for n in range(40)]
        assert made == [mutated(random.Random(n), example, target.kind) for n in range(40)]
        assert len({*made, example}) > 30


@pytest.mark.parametrize(
    "deed",
    [
        lambda folder: __import__("pickle").loads(__import__("pickle").dumps(Payload())),
        lambda folder: (folder.parent / "elsewhere").write_text(""),
        lambda folder: (folder.parent / "elsewhere").mkdir(),
        lambda folder: __import__("os").system("true"),
        lambda folder: [][0],
        lambda folder: __import__("torch").load(_pickled(folder), weights_only=False),
    ],
)
def test_the_guard_sees_what_must_not_happen(deed, tmp_path):
    """Or else the tests above could not fail."""
    place = tmp_path / "case"
    place.mkdir()
    with pytest.raises(Escaped), guarded(place):
        deed(place)


def _pickled(folder):
    (folder / "a.pt").write_bytes(pt(Payload()))
    return folder / "a.pt"


def test_the_guard_lets_pass_what_may_happen(tmp_path):
    with guarded(tmp_path):
        (tmp_path / "inside").write_text("")
        raise ValueError("Expected this")
    assert (tmp_path / "inside").exists()


@settings(max_examples=50)
@given(spec=st.text(max_size=20), value=st.one_of(st.floats(), st.integers(), st.none()))
def test_any_loss_spec(spec, value):
    try:
        build_loss(spec, gamma=value)
    except ValueError as error:
        assert "\n" not in str(error)


TREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["loss", "epochs", "optim", "data", "model", "seed", "class_weights", "out"])


@settings(max_examples=15)
@given(options=st.dictionaries(KEYS, TREE, max_size=4))
def test_any_config_is_read_or_refused_in_one_line(options, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(yaml.safe_dump(options), encoding="utf-8", errors="surrogatepass")
    try:
        load_config(path)
    except (ValueError, OSError) as error:
        assert str(error)


@given(data=st.binary(max_size=60))
def test_any_bytes_as_any_file(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    readers = {
        "a.npz": segcal.CalibrationMeter.load,
        "b.json": segcal.Report.load,
        "c.safetensors": segcal.load_calibrator,
        "manifest.yaml": lambda path: _manifest(path.parent),
    }
    for name, read in readers.items():
        (folder / name).write_bytes(data)
        try:
            read(folder / name)
        except ValueError as error:
            assert name in str(error)


@given(name=st.text(max_size=300))
def test_any_name_makes_a_file_name(name):
    made = results.file_name(name)
    assert made and "/" not in made and "\0" not in made and made not in (".", "..")
    assert len(made.encode()) <= 200
