"""Files made to do harm, and what fuzzing has found: each is one line, or is only text."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import segcal
from segcal.cli import main
from segcal.evaluation import folder as results
from segcal.evaluation.evaluate import Evaluation
from segcal.files import BadFile
from segcal.losses import build_loss
from segcal.metrics import meter as meter_module
from segcal.sources.saved import PredictionFolder
from segcal.training.config import load_config
from tests.fuzz.files import Payload, npz, pt
from tests.support.saved import logits_and_labels, save_folder
from tests.support.states import restated
from tests.support.synthetic_reports import synthetic_report

HOSTILE = ["<script>alert(1)</script>", "../../up", "'\"><img src=x onerror=alert(1)>", "{{7*7}}"]


def test_names_are_only_text(tmp_path, monkeypatch):
    """Images, classes and the run have hostile names; the page is real, and nothing leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "write_figures", lambda *_, **__: None)  # the page has them too
    names = [f"{n}{name}".replace("/", "∕") for n, name in enumerate(HOSTILE)]  # a slash look-alike
    folder = tmp_path / names[0]
    for index, name in enumerate(names):
        save_folder(folder, 1, first=index)
        os.rename(folder / f"im{index:03d}.npz", folder / f"{name}.npz")
    os.rename(save_folder(tmp_path / "x", 1) / "im000.npz", os.fsencode(folder) + b"/\xff.npz")
    (tmp_path / "x").rmdir()
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"class_names": HOSTILE[:3]}))
    quick = ["--resamples", "4", "--device", "cpu", "--num-overlays", "2", "--out", "out"]
    assert main(["eval", "--predictions", str(folder), *quick]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script") == 5  # the page's own: numbers, two of the library, app, sorting
    assert "<img src=x" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], "out"])
    report = segcal.Report.load(tmp_path / "out" / "report.json")
    assert {image.name for image in report.worst_images} == {*names, "?"}
    assert len(list((tmp_path / "out" / "overlays").iterdir())) == 4


@pytest.mark.parametrize(
    "text",
    [
        "out: !!python/object/apply:os.mkdir [pwned]",
        "!!python/object/apply:os.mkdir [pwned]: 1",
        "loss: !!python/name:os.system ''",
        "loss: \0",
        "loss: 2020-99-99",
        "a: " + "[" * 1000,
        "loss: null",
        "epochs: null",
        "optim: null",
        "data: {name: null}",
    ],
)
def test_configs(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"c\.yaml"):
        load_config(tmp_path / "c.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def header(text):
    """An archive whose array has a header of that text."""
    line = text.encode() + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + bytes(64)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("logits", "labels", "settings"):
            archive.writestr(f"{name}.npy", array)
    return buffer.getvalue()


ARCHIVES = {
    "pickle": npz(logits=np.array([Payload()], dtype=object), settings=np.array([Payload()])),
    "open bracket": header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, "),
    "huge": header("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,)}"),
    "overflow": header("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999,)}"),
    "not a zip": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.npz"
    path.write_bytes(ARCHIVES[case])
    with pytest.raises(BadFile, match=r"a\.npz: "):
        PredictionFolder(path)[0]
    with pytest.raises(ValueError, match=r"a\.npz: expected a saved CalibrationMeter"):
        segcal.CalibrationMeter.load(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_is_as_large_as_it_says(tmp_path):
    meter = segcal.CalibrationMeter(3, ignore_index=-100)
    state = restated(meter.state_dict(), settings={"num_classes": 3000})
    path = tmp_path / "state.npz"
    path.write_bytes(npz(**{name: tensor.numpy() for name, tensor in state.items()}))
    with pytest.raises(ValueError, match="the settings say 3000 classes"):
        segcal.CalibrationMeter.load(path)


@pytest.mark.parametrize("field", ["top", "fine", "confusion"])
def test_reports_with_numbers_past_int64(field, tmp_path):
    data = synthetic_report(3, side=4, images=1).to_dict()
    if field == "confusion":
        data["confusion"][0][0] = 10**30
    else:
        data[field]["edges" if field == "top" else "correct"][0] = 10**400
    with pytest.raises(ValueError, match="Expected a complete report"):
        segcal.Report.from_dict(data)


@pytest.mark.parametrize("options", [{"seed": 0.5}, {"seed": -1}, {"sample": 8.5}])
def test_odd_options_of_mmce(options):
    logits = torch.zeros(2, 3)
    (name,) = options
    with pytest.raises(ValueError, match=name):
        build_loss("nll+mmce", **options)(logits, torch.tensor([0, 1]))


@pytest.mark.parametrize("value", [True, None, "3", float("nan"), float("inf"), 10**400])
def test_odd_options_of_any_loss(value):
    with pytest.raises(ValueError, match="gamma"):
        build_loss("fl", gamma=value)


def test_a_seed_past_int64():
    with pytest.raises(ValueError, match="seed"):
        build_loss("nll+mmce", seed=2**70)


CHECKPOINTS = {
    "payload": pt({"segcal_checkpoint": 1, "model": Payload()}),
    "nothing in it": pt({"segcal_checkpoint": 1}),
    "other weights": pt({"segcal_checkpoint": 1, "model": {"w": torch.zeros(2)}, "record": None}),
    "no weights": pt({"segcal_checkpoint": 1, "model": 3, "config": 3, "samples": "x"}),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints(runs, tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((runs / "digits" / "config.yaml").read_bytes())
    for name in ("best.pt", "last.pt"):
        (tmp_path / "run" / name).write_bytes(CHECKPOINTS[case])
    for command in (["eval", "run"], ["train", "--resume", "--out", "run"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith("segcal: error: ") and err.count("\n") == 1
        assert "run/" in err
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("protocol", "average"), 3),
        (("protocol", "pixels"), "x"),
        (("images", "ece"), [1]),
        (("top", "count"), {}),
        (("top", "count"), 10**400),
        (("about", "history", 0, "epoch"), "x"),
        (("about", "history", 0, "epoch"), 10**400),
        (("about", "history", 0, "holdout/ece"), [1]),
    ],
)
def test_a_report_with_odd_values_is_one_line(tmp_path, capsys, place, value):
    report = synthetic_report(3, side=8, images=2, per_image=True)
    found = Evaluation("run", {"none": report}, history=[{"epoch": 1, "holdout/ece": 0.1}])
    found.save(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    node = data
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "page")]) == 2
    err = capsys.readouterr().err
    assert "a.json" in err and err.count("\n") == 1
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    "settings", [{"num_bins": 2**40}, {"num_bins": 2**63}, {"ignore_index": 2**63}]
)
def test_settings_past_all_bounds_take_no_memory(settings):
    """Found by fuzzing: the allocator, or a conversion, raised."""
    with pytest.raises(ValueError, match="num_bins|ignore_index"):
        segcal.CalibrationMeter(3, **settings)


def test_labels_of_minus_one_are_named(tmp_path):
    """Of int8, which other frameworks ignore."""
    logits, labels = (torch.from_numpy(x)[None] for x in logits_and_labels(0))
    labels = torch.where(labels == 255, -1, labels).to(torch.int8)
    for take in (build_loss("nll"), segcal.CalibrationMeter(3).update):
        with pytest.raises(ValueError, match="ignore_index=255, but got -1 in"):
            take(logits, labels)
    meter = segcal.CalibrationMeter(3, ignore_index=-1)
    meter.update(logits, labels)
    assert meter.compute().protocol.pixels == (labels >= 0).sum()


def counted(*, per_image):
    meter = segcal.CalibrationMeter(3, 4, per_image=per_image)
    for index in range(3):
        logits, labels = (torch.from_numpy(x)[None] for x in logits_and_labels(index))
        meter.update(logits, labels, names=[f"{index}"])
    return meter


@given(
    kind=st.sampled_from(["update", "update_probs"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    rule=st.sampled_from(["left", "right"]),
    bins=st.integers(1, 20),
    scale=st.floats(0, 1e4),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_every_state_that_is_counted_is_taken(kind, dtype, rule, bins, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(2, 3, 5, generator=generator)).to(dtype)
    labels = torch.randint(4, (2, 5), generator=generator)
    meter = segcal.CalibrationMeter(3, bins, 3, edge_rule=rule, per_image=True)
    values = logits if kind == "update" else logits.softmax(1)
    getattr(meter, kind)(values, labels)
    other = segcal.CalibrationMeter(3, bins, 3, edge_rule=rule, per_image=True)
    other.load_state_dict(meter.state_dict())
    both = meter + meter
    (meter + other).load_state_dict(both.state_dict())
    assert int(both.state_dict()["top_count"].sum()) == 2 * int((labels != 3).sum())
    for name, value in meter.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_state_is_not_merged_with_itself(tmp_path, capsys):
    meter = segcal.CalibrationMeter(3, 4)
    meter.update(*(torch.from_numpy(x)[None] for x in logits_and_labels(0)))
    for name in "ab":
        meter.save(tmp_path / f"{name}.npz")
    for pair in ("aa", "ab"):
        assert main(["merge", *(str(tmp_path / f"{name}.npz") for name in pair)]) == 2
        assert "different images" in capsys.readouterr().err


def test_probabilities_given_as_logits_are_told_once(tmp_path, caplog):
    meter_module.say_once.cache_clear()
    logits, labels = (torch.from_numpy(x)[None] for x in logits_and_labels(0))
    segcal.CalibrationMeter(3).update(logits, labels)
    segcal.CalibrationMeter(3).update_probs(logits.softmax(1), labels)
    assert not caplog.records
    for _ in range(2):
        meter = segcal.CalibrationMeter(3)
        meter.update(logits.softmax(1), labels)
        meter.update(logits.softmax(1), labels)
    assert len(caplog.records) == 1
    assert "look like probabilities" in caplog.text
    meter_module.say_once.cache_clear()
    loader = [(logits.softmax(1), labels)]
    segcal.evaluate(torch.nn.Identity(), loader, num_classes=3, progress=False)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("per_image", [False, True])
def test_sigmoid_outputs_likewise(caplog, per_image):
    meter_module.say_once.cache_clear()
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 3, 4, 5, generator=generator)
    labels = torch.randint(2, logits.shape, generator=generator)
    labels[0, 1] = 255
    meter = segcal.CalibrationMeter(3, multilabel=True, per_image=per_image)
    meter.update(logits, labels)
    assert not caplog.records
    meter.load_state_dict(meter.state_dict())
    segcal.CalibrationMeter(3, multilabel=True).update(logits.sigmoid(), labels)
    assert "look like probabilities" in caplog.text
