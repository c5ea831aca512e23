"""Everything that reads a file someone else may have made, with valid examples to start from."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import math
import os
import pickle
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nibabel
import numpy as np
import torch
import torch._dynamo  # torch loads it late, and makes a folder then
import yaml

import segcal
from segcal.data import build as build_data
from segcal.data.samples import read_class_mask
from segcal.data.shift import parse_shifts
from segcal.evaluation import folder as results
from segcal.evaluation.evaluate import Evaluation
from segcal.evaluation.folder import load_evaluation, write_comparison
from segcal.files import read_rgb
from segcal.losses import build_loss
from segcal.metrics import counting
from segcal.metrics.counting import count_compiled, count_in_torch
from segcal.models import build as build_model
from segcal.posthoc import CALIBRATORS
from segcal.sources.network import _read_log
from segcal.sweep.definition import read_sweep
from segcal.training.config import load_config, parse_train
from tests.fuzz.files import Payload, npz, png, pt
from tests.fuzz.guard import command
from tests.support.holdouts import make_calibrator
from tests.support.saved import CLASSES, logits_and_labels
from tests.support.synthetic_reports import synthetic_report

EVAL = ("--device", "cpu", "--workers", "0", "--resamples", "4")
RUN = ("--data.name", "digits", "--data.limit", "16", "--model.name", "resnet8", "--epochs", "1")
RUN += ("--batch_size", "8", "--workers", "0", "--device", "cpu")


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        kind: of mutation, see `mutate.mutated`.
        examples: the files to start from, given a folder to work in.
        attempt: reads a file, given the same folder and another one for what it writes.
    """

    kind: str
    examples: object
    attempt: object


# Settings


def config_examples(_):
    config, _ = parse_train(RUN)
    from segcal.settings import to_dict

    dumped = yaml.safe_dump(to_dict(config)).encode()
    hostile = b"out: !!python/object/apply:os.system ['touch pwned']\n"
    return [dumped, b"loss: fl+mdca\noptim: {lr: 0.1}\ndata: {name: digits}\n", dumped + hostile]


def config_attempt(data, _, out):
    path = out / "config.yaml"
    path.write_bytes(data)
    config = load_config(path)
    if config.data.name != "digits" or config.data.download:
        return
    source = build_data(config.data, seed=config.seed)
    if config.model.name in ("resnet8", "small_unet") and config.model.width <= 64:
        bare = config.model
        build_model(bare, num_classes=source.num_classes)
    build_loss(config.loss, beta=config.beta, **config.hyper)


def loss_examples(_):
    specs = ("nll", "FL+MDCA", "ls+dca", "flsd", "brier+mmce")
    hypers = ({}, {"gamma": 2.0, "beta": 5}, {"alpha": 0.1}, {"gamma": 3}, {"sample": 8, "seed": 1})
    return [json.dumps({"spec": s, **h}).encode() for s, h in zip(specs, hypers, strict=True)]


def loss_attempt(data, _, out):
    given = json.loads(data)
    if not isinstance(given, dict) or not isinstance(given.get("spec"), str):
        return
    options = {k: v for k, v in given.items() if k != "spec" and isinstance(v, (int, float))}
    criterion = build_loss(given["spec"], **options)
    logits = torch.linspace(-3, 3, 60).reshape(2, 3, 10).requires_grad_()
    criterion(logits, torch.arange(20).reshape(2, 10) % 3).backward()


# What networks left


def prediction_examples(_):
    logits, labels = logits_and_labels(0, size=4)
    probs = np.exp(logits) / np.exp(logits).sum(0)
    image = np.zeros((4, 4, 3), np.uint8)
    return [
        npz(logits=logits, labels=labels, image=image),
        npz(probs=probs.astype(np.float16), labels=labels.astype(np.int64)),
        npz(logits=logits[:, 0].T, labels=labels[0] % CLASSES),
        npz(logits=logits[:, ::2, ::2], labels=labels),
        npz(logits=np.array([Payload()], dtype=object), labels=labels),
    ]


def prediction_attempt(data, _, out):
    folder = out / "in"
    folder.mkdir()
    (folder / "a.npz").write_bytes(data)
    command("eval", "--predictions", folder, "--out", out / "eval", *EVAL)


def label_examples(_):
    labels = logits_and_labels(0, size=4)[1]
    return [
        png(labels),
        png(labels, palette=True),
        png(labels.astype(np.uint16)),
        png(labels == 1),
        png(labels, optimize=True),
    ]


def label_attempt(data, _, out):
    for name in ("in", "labels"):
        (out / name).mkdir()
    np.save(out / "in" / "a.npy", logits_and_labels(0, size=4)[0])
    path = out / "labels" / "a.png"
    path.write_bytes(data)
    stated = ("--kind", "logits", "--labels", path.parent, "--images", path.parent)
    command("eval", "--predictions", out / "in", *stated, "--out", out / "eval", *EVAL)
    with contextlib.suppress(ValueError):
        read_rgb(path)
    read_class_mask(path, num_classes=CLASSES, ignore_index=255)


def manifest_examples(_):
    stated = {"kind": "logits", "layout": "chw", "num_classes": 3, "class_names": ["a", "b", "c"]}
    stated |= {"ignore_index": 255, "align_corners": True, "labels": "l"}
    return [yaml.safe_dump(stated).encode(), b"kind: logits\n", b'{"labels": "../in/l"}']


def manifest_attempt(data, _, out):
    (out / "in" / "l").mkdir(parents=True)
    logits, labels = logits_and_labels(0, size=4)
    np.save(out / "in" / "a.npy", logits)
    np.save(out / "in" / "l" / "a.npy", labels)
    (out / "in" / "manifest.yaml").write_bytes(data)
    command("eval", "--predictions", out / "in", "--out", out / "eval", *EVAL)


def nifti(array, path):
    """A NIfTI file as bytes."""
    nibabel.Nifti1Image(array.T, np.eye(4)).to_filename(path)
    return path.read_bytes()


def volume_examples(folder):
    logits, labels = logits_and_labels(0, size=4)
    whole = np.stack([logits, logits, -logits], 1)  # (C, D, H, W)
    return [
        nifti(np.stack([labels] * 3), folder / "a.nii"),
        nifti(whole, folder / "b.nii"),
        nifti(np.stack([labels] * 3).astype(np.float32), folder / "c.nii"),
    ]


def volume_attempt(data, _, out):
    """A volume as labels, and as predictions."""
    logits, labels = logits_and_labels(0, size=4)
    for name in ("in", "labels", "other", "plain"):
        (out / name).mkdir()
    np.save(out / "in" / "a.npy", np.stack([logits, logits, -logits], 1))
    (out / "labels" / "a.nii").write_bytes(data)
    (out / "other" / "a.nii.gz").write_bytes(gzip.compress(data, 1))
    np.save(out / "plain" / "a.npy", np.stack([labels] * 3))
    for predictions, beside in (("in", "labels"), ("other", "plain")):
        stated = (
            "--kind",
            "logits",
            "--labels",
            out / beside,
            "--out",
            out / f"eval-{predictions}",
        )
        command("eval", "--predictions", out / predictions, *stated, *EVAL)


def nnunet_examples(_):
    labels = {"background": 0, "liver": 1, "tumour": 2, "ignore": 3}
    regions = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    order = {"regions_class_order": [1, 2]}
    channels = {"channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}
    return [json.dumps({"labels": labels, **channels}).encode(),
            json.dumps({"labels": regions, **order, **channels}).encode()]  # fmt: skip


def nnunet_attempt(data, _, out):
    """The dataset.json beside what nnU-Net predicted."""
    for name in ("in", "labels"):
        (out / name).mkdir()
    logits, labels = logits_and_labels(0, size=4)
    probs = np.exp(logits) / np.exp(logits).sum(0)
    np.savez(out / "in" / "a.npz", probabilities=np.stack([probs] * 3, 1))
    (out / "in" / "a.pkl").write_bytes(pickle.dumps(Payload()))
    (out / "in" / "dataset.json").write_bytes(data)
    volume = np.stack([np.where(labels == 255, 3, labels)] * 3).astype(np.uint8)
    nifti(volume, out / "labels" / "a.nii.gz")
    stated = ("--format", "nnunet", "--labels", out / "labels", "--out", out / "eval")
    command("eval", "--predictions", out / "in", *stated, *EVAL)


def state_examples(folder):
    examples = []
    for per_image in (False, True):
        meter = segcal.CalibrationMeter(3, 4, per_image=per_image, class_names=("a", "b", "c"))
        logits, labels = (torch.from_numpy(x)[None] for x in logits_and_labels(0, size=4))
        meter.update(logits, labels, names=["<b>"])
        meter.save(folder / "state.npz")
        examples.append((folder / "state.npz").read_bytes())
    return [*examples, npz(settings=np.array([Payload()], dtype=object))]


def state_attempt(data, _, out):
    (out / "a.npz").write_bytes(data)
    where = ("--out", out / "b.npz", "--report", out / "page", "--resamples", "4")
    command("merge", out / "a.npz", *where)


# What segcal left


def report_examples(folder):
    report = synthetic_report(3, side=8, images=2, per_image=True, names=("a", "b", "c"))
    log = [{"epoch": 1, "train/loss": 2.0}]
    whole = Evaluation("run", {"none": report}, skipped={"x": "bad"}, config="a: 1", history=log)
    whole.save(folder / "written")
    report.save(folder / "plain.json")
    return [(folder / "written" / "report.json").read_bytes(), (folder / "plain.json").read_bytes()]


def report_attempt(data, _, out):
    (out / "a.json").write_bytes(data)
    (out / "overlays").mkdir()
    (out / "overlays" / "odd.png").write_bytes(data)
    command("report", out / "a.json", "--out", out / "page")


def log_examples(_):
    record = {"epoch": 1, "step": 4, "lr": 0.1, "train/loss": 2.0, "holdout/ece": 0.1, "best": True}
    lines = json.dumps(record) + "\n" + json.dumps(record | {"epoch": 2, "holdout/ece": None})
    return [lines.encode(), json.dumps(record).encode()]


def log_attempt(data, _, out):
    """The log of a run, as its page shows it."""
    (out / "log.jsonl").write_bytes(data)
    history = _read_log(out / "log.jsonl")
    report = synthetic_report(3, side=4, images=1)
    Evaluation("run", {"none": report}, history=history).save(out / "eval")
    assert len(load_evaluation(out / "eval").history) == len(history)
    for name in ("train/loss", "holdout/ece"):
        np.asarray([record.get(name) or 0 for record in history], dtype=float)


def trained(folder):
    """A finished run, made once."""
    run = folder / "run"
    if not run.exists():
        assert command("train", *RUN, "--out", run) == 0
    return run


def checkpoint_examples(folder):
    run = trained(folder)
    return [
        (run / "last.pt").read_bytes(),
        (run / "best.pt").read_bytes(),
        pt({"segcal_checkpoint": 1, "model": Payload()}),
        pickle.dumps(Payload()),
    ]


def checkpoint_attempt(data, folder, out):
    run = out / "run"
    run.mkdir()
    shutil.copy(trained(folder) / "config.yaml", run)
    for name in ("last.pt", "best.pt"):
        (run / name).write_bytes(data)
    command("eval", run, "--split", "holdout", "--overlays", "none", *EVAL)
    command("train", "--resume", "--out", run)


def calibrator_examples(folder):
    batches = [tuple(torch.from_numpy(x)[None] for x in logits_and_labels(0))]
    examples = []
    for name in CALIBRATORS:
        make_calibrator(name).fit(batches).save(folder / "calibrator.safetensors")
        examples.append((folder / "calibrator.safetensors").read_bytes())
    return examples


def calibrator_attempt(data, _, out):
    (out / "a.safetensors").write_bytes(data)
    calibrator = segcal.load_calibrator(out / "a.safetensors")
    logits = torch.linspace(-2, 2, 12).reshape(1, 3, 2, 2)
    with contextlib.suppress(ValueError):
        assert not calibrator(logits).softmax(1).isnan().any(), f"{calibrator} gives NaN"


# What a program passes


def array_examples(_):
    """Logits and labels in a few words, and what is done with them."""
    usual = {"shape": [2, 3, 4, 4], "labels": [2, 4, 4], "dtype": "float32", "ints": "int64"}
    usual |= {"scale": 3.0, "classes": 3, "ignore_index": 255, "bins": 15, "put": [], "name": "ts"}
    masked = [[n, -math.inf] for n in range(16)]  # class 0 of the first image
    others = (
        {"what": "meter"},
        {"what": "meter", "shape": [2, 3, 2, 2, 2], "labels": [2, 2, 2, 2], "dtype": "float16"},
        {"what": "meter", "shape": [5, 3], "labels": [5], "ints": "uint8", "put": [[4, 255]]},
        {"what": "meter", "put": masked, "label": 1},
        {"what": "meter", "multilabel": True, "labels": [2, 3, 4, 4], "bins": 4},
        {"what": "probs", "dtype": "float64"},
        {"what": "loss", "name": "fl+mdca"},
        {"what": "loss", "name": "nll+dca", "shape": [2, 3, 2, 2, 2], "labels": [2, 2, 2, 2]},
        {"what": "loss", "name": "nll", "put": masked, "label": 1},
        {"what": "loss", "name": "nll+mdca", "multilabel": True, "labels": [2, 3, 4, 4]},
        {"what": "calibrator", "name": "ts"},
        {"what": "calibrator", "name": "vs", "put": masked, "label": 1},
    )
    return [json.dumps(usual | other).encode() for other in others]


def array_attempt(data, _, out):
    """Whatever is taken gives finite numbers within their bounds."""
    given = json.loads(data)
    logits, labels = _arrays_of(given)
    keys = ("what", "name", "ignore_index", "classes", "bins")
    what, name, ignore_index, classes, bins = (given.get(key) for key in keys)
    if what == "loss":
        logits.requires_grad_()
        multilabel = given.get("multilabel") is True
        criterion = build_loss(str(name), ignore_index=ignore_index, multilabel=multilabel)
        loss = criterion(logits, labels)
        loss.backward()
        if logits.isnan().any() or (logits == math.inf).any():
            return  # it has diverged, and says so
        assert loss.isfinite() and not logits.grad.isnan().any(), f"loss {loss.item()}"
    elif what == "calibrator":
        if str(name) not in CALIBRATORS:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calibrator = make_calibrator(name, ignore_index=ignore_index).fit([(logits, labels)])
        assert not calibrator(logits).softmax(1).isnan().any(), f"{calibrator} gives NaN"
    else:
        many = given.get("multilabel") is True
        probs = logits.softmax(min(1, logits.ndim - 1)) if what == "probs" else None

        def measured(counting_pass):
            meter = segcal.CalibrationMeter(classes, bins, ignore_index, multilabel=many)
            with mock.patch.object(counting, "counting_pass", lambda device_type: counting_pass):
                if probs is None:
                    meter.update(logits, labels)
                else:
                    meter.update_probs(probs, labels)
            return meter.compute()

        try:
            report = measured(count_compiled)
        except ValueError:
            with contextlib.suppress(ValueError):
                measured(count_in_torch)
                raise AssertionError("only the compiled pass refuses it") from None
            raise
        scores, device = report.scores, measured(count_in_torch)
        if report.protocol.pixels:
            assert 0 <= scores["ece"] <= 1 and 0 <= scores["accuracy"] <= 1, scores
            assert 0 <= scores["nll"] < math.inf, scores
        # A value within rounding of an edge may be in the bin beside it; see docs/conventions.md.
        assert abs(report.top.count - device.top.count).sum() <= 2, "other bins than in torch"
        assert (report.confusion == device.confusion).all(), "other classes than in torch"


_DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_INTS = {"int64": torch.int64, "uint8": torch.uint8, "int8": torch.int8, "uint16": torch.uint16}


def _arrays_of(given):
    """Logits and labels as the words say, of at most 10,000 values; else a ValueError."""
    try:
        shape, sides = (tuple(map(int, given[key])) for key in ("shape", "labels"))
        if min(shape + sides, default=1) < 0 or max(math.prod(shape), math.prod(sides)) > 10_000:
            raise ValueError("Expected small arrays")
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(shape, generator=generator).double() * float(given["scale"])
        for place, value in given["put"]:
            logits.view(-1)[int(place)] = float(value)
        most = 2 if given.get("multilabel") else max(int(given["classes"]), 1)
        labels = torch.randint(min(most, 2**31), sides, generator=generator)
        if "label" in given:
            labels.fill_(int(given["label"]))
        return logits.to(_DTYPES[given["dtype"]]), labels.to(_INTS[given["ints"]])
    except (KeyError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"Expected a description of arrays, but got {error!r}") from None


def adapter_examples(_):
    """As for arrays, with the framework whose adapter gets them."""
    given = [json.loads(example) for example in array_examples(None)]
    usual = [each for each in given if each["what"] in ("meter", "probs")]
    found = []
    for name in ADAPTERS:
        found += [json.dumps({**each, "what": name}).encode() for each in (usual[0], usual[4])]
    smaller = {"what": "transformers", "shape": [2, 3, 2, 2]}  # logits, resized to their labels
    return [*found, json.dumps(usual[0] | smaller).encode()]


def adapter_attempt(data, _, out):
    """Whatever an adapter takes gives the scores of the meter."""
    given = json.loads(data)
    logits, labels = _arrays_of(given)
    if str(given.get("what")) not in ADAPTERS:
        return
    options = {"ignore_index": given.get("ignore_index"), "num_bins": given.get("bins")}
    options["multilabel"] = given.get("multilabel") is True
    scores = ADAPTERS[given["what"]](logits, labels, given.get("classes"), options)
    if scores is None or math.isnan(scores["accuracy"]):  # nothing was counted
        return
    for name in ("accuracy", "ece", "miou"):
        assert 0 <= float(scores[name]) <= 1, scores
    assert 0 <= float(scores["nll"]) < math.inf, scores
    if logits.shape[2:] == labels.shape[labels.ndim - logits.ndim + 2 :]:
        meter = segcal.CalibrationMeter(given["classes"], **options)
        meter.update(logits, labels)
        expected = meter.compute()
        assert math.isclose(float(scores["ece"]), expected.ece, abs_tol=1e-6), "another ECE"


def _torchmetrics(logits, labels, classes, options):
    from segcal.integrations.torchmetrics import CalibrationMetric

    metric = CalibrationMetric(classes, **options)
    metric.update(logits, labels)
    return metric.compute()


def _lightning(logits, labels, classes, options):
    from segcal.integrations.lightning import CalibrationCallback

    callback = CalibrationCallback(classes, **options)
    callback.on_validation_epoch_start(None, None)
    callback.on_validation_batch_end(None, None, {"logits": logits}, (None, labels), 0)
    logged = {}
    module = SimpleNamespace(log_dict=logged.update)
    trainer = SimpleNamespace(sanity_checking=False, is_global_zero=False)
    callback.on_validation_epoch_end(trainer, module)
    return {name.removeprefix("val/"): value for name, value in logged.items()} or None


def _transformers(logits, labels, classes, options):
    from transformers import EvalPrediction

    from segcal.integrations.transformers import TrainerLoss, TrainerMetrics

    ignored = {"ignore_index": options["ignore_index"], "multilabel": options["multilabel"]}
    loss = TrainerLoss("nll+mdca", **ignored)({"logits": logits}, labels, labels.numel() or None)
    assert not loss.isnan() or logits.isnan().any() or (logits == math.inf).any(), loss
    metrics = TrainerMetrics(classes, **options)
    return metrics(EvalPrediction(logits.numpy(), labels.numpy()))


def _monai(logits, labels, classes, options):
    from segcal.integrations.monai import CalibrationMetric

    metric = CalibrationMetric(classes, **options)
    channel = labels[:, None].float() if labels.ndim and not options["multilabel"] else labels
    metric(logits, channel)
    return metric.aggregate()


def _mmengine(logits, labels, classes, options):
    from segcal.integrations.mmengine import CalibrationMetric

    if not logits.numel() or not logits.ndim or not labels.ndim:
        return None
    metric = CalibrationMetric(classes, **options)
    samples = [
        {"seg_logits": {"data": one}, "gt_sem_seg": {"data": label[None]}}
        for one, label in zip(logits, labels, strict=True)
    ]
    metric.process(None, samples)
    found = metric.evaluate(len(samples))
    return {name.removeprefix("calibration/"): value for name, value in found.items()}


ADAPTERS = {
    "torchmetrics": _torchmetrics,
    "lightning": _lightning,
    "transformers": _transformers,
    "monai": _monai,
    "mmengine": _mmengine,
}


def shift_examples(_):
    words = ("fog,jpeg:1,2,rotation:-30.5,domain:sketch", "fog:3", "all:1,3,5", "rotation:45")
    return [word.encode() for word in words]


def shift_attempt(data, _, out):
    image = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    for shift in parse_shifts(data.decode("utf-8", "surrogateescape"))[:8]:
        with contextlib.suppress(ValueError):
            assert shift.apply(image, key="a").shape == image.shape


def sweep_examples(_):
    stated = {
        "title": "a",
        "config": "digits_resnet8",
        "seeds": 2,
        "select": "nll",
        "posthoc": ["none", "ts"],
        "shift": "fog:3",
        "limit": 5,
        "vary": {"data.limit": [16, 32]},
        "options": {"optim": {"lr": 0.1}},
        "methods": [{"loss": "nll"}, {"loss": "fl+mdca", "beta": [1, 10], "gamma": 3, "name": "x"}],
        "scores": ["accuracy", "ece"],
        "compare": [["nll / none", "x / ts"]],
        "draw": ["nll / none"],
        "small": [{"config": "digits", "seeds": 1}, {"grid": {"mdca": {"beta": 1}}}],
    }
    listed = b"config: [digits, scenes]\ngrid: {fl: {gamma: [1, 3]}}\nmethods: [nll, fl]\n"
    return [yaml.safe_dump(stated).encode(), b"config: digits\nmethods: [{loss: nll}]\n", listed]


def sweep_attempt(data, _, out):
    """What a file asks for, without any training; a grid of thousands is not made."""
    (out / "a.yaml").write_bytes(data)
    sweep = read_sweep(out / "a.yaml")
    if sum(len(method.seeds) for method in sweep.methods) < 1000:
        assert sweep.tables()


def option_examples(_):
    lines = (
        "eval {in} --out {out}/o --posthoc none,ts --fit-predictions {in} --shard 1/2",
        "eval --predictions {in} --out {out}/o --regions boundary:3 --protocol image --num-bins 5",
        "eval --predictions {in} --out {out}/o --operate accuracy:0.9 --conformal 0.1 --limit 2",
        "eval --predictions {in} --kind logits --layout hwc --class-names a,b,c --ignore-index 0",
        "merge {out}/a.npz --out {out}/b.npz --report {out}/page --resamples 3",
        "compare {out}/a.npz {out}/a.npz --resamples 3",
        "report {out}/a.json --out {out}/page",
    )
    return [json.dumps(line.split()).encode() for line in lines]


def option_attempt(data, _, out):
    """Any words as a command line; what they name as a folder lies in the case's own place."""
    words = json.loads(data)
    if not isinstance(words, list):
        return
    (out / "in").mkdir()
    (out / "in" / "a.npz").write_bytes(prediction_examples(None)[0])
    (out / "a.npz").write_bytes(_state())
    words = [str(word).replace("{in}", str(out / "in")) for word in words]
    words = [word.replace("{out}", str(out)).replace("\0", "") for word in words]
    if words and words[0] not in ("train", "export", "sweep"):  # they write where they are told
        before = os.getcwd()
        os.chdir(out)
        try:
            command(*words, *(EVAL if words[0] == "eval" else ()))
        finally:
            os.chdir(before)


@functools.cache
def _state():
    with tempfile.TemporaryDirectory() as folder:
        return state_examples(Path(folder))[1]


def compare_attempt(data, _, out):
    """A state against the one it was made from."""
    (out / "a.npz").write_bytes(_state())
    (out / "b.npz").write_bytes(data)
    command("compare", out / "a.npz", out / "b.npz", "--resamples", "4")


# Names


def name_examples(_):
    names = (
        "../../up",
        "/etc/passwd",
        "<script>alert(1)</script>",
        "a\0b",
        "con",
        "..",
        "",
        "\udcff",
    )
    return [name.encode("utf-8", "surrogateescape") for name in (*names, "ä" * 200, "a" * 4000)]


def name_attempt(data, _, out):
    """An image, a class and a run of that name: it is only text, whatever it looks like."""
    name = data.decode("utf-8", "surrogateescape")
    meter = segcal.CalibrationMeter(3, 4, per_image=True, class_names=(name, "b", "<i>"))
    logits, labels = (torch.from_numpy(x)[None] for x in logits_and_labels(0, size=4))
    meter.update(logits, labels, names=[name])
    report = meter.compute(resamples=4)
    labels, odd = np.zeros((4, 4), np.int64), np.ones((4, 4), np.float32)
    drawn = segcal.viz.Overlay(name, labels, labels, odd, odd, None, None, (name, "b", "<i>"), 0.5)
    reports, overlays = {"none": report}, {"none": [drawn]}
    whole = Evaluation(name, reports, overlays=overlays, skipped={name: name}, config=name)
    whole.save(out / "eval")
    inside = {path.parent.name for path in (out / "eval" / "overlays").iterdir()}
    assert inside == {"overlays"}
    write_comparison([load_evaluation(out / "eval")], out / "page", title=name)
    meter.save(out / "state.npz")
    assert segcal.CalibrationMeter.load(out / "state.npz").names == [name]


TARGETS = {
    "config": Target("yaml", config_examples, config_attempt),
    "loss": Target("json", loss_examples, loss_attempt),
    "predictions": Target("zip", prediction_examples, prediction_attempt),
    "labels": Target("png", label_examples, label_attempt),
    "volumes": Target("bytes", volume_examples, volume_attempt),
    "nnunet": Target("json", nnunet_examples, nnunet_attempt),
    "manifest": Target("yaml", manifest_examples, manifest_attempt),
    "state": Target("zip", state_examples, state_attempt),
    "report": Target("json", report_examples, report_attempt),
    "log": Target("json", log_examples, log_attempt),
    "checkpoint": Target("zip", checkpoint_examples, checkpoint_attempt),
    "calibrator": Target("bytes", calibrator_examples, calibrator_attempt),
    "names": Target("bytes", name_examples, name_attempt),
    "arrays": Target("json", array_examples, array_attempt),
    "sweep": Target("yaml", sweep_examples, sweep_attempt),
    "shift": Target("bytes", shift_examples, shift_attempt),
    "options": Target("json", option_examples, option_attempt),
    "compare": Target("zip", state_examples, compare_attempt),
    "adapters": Target("json", adapter_examples, adapter_attempt),
}


def draw_nothing():
    """Leave figures and pages out, which take seconds each, but read what they are made of."""
    results.write_figures = lambda *_, **__: None
    results.write_page = lambda rows, path, **_: Path(path).write_text(repr(rows)[:100])
