"""What the first user with a GPU runs to trust it: `make test-gpu`, which is `pytest -m gpu`.

Without a GPU these are skipped. What does not need its numbers runs here too, on torch's `meta`
device, a stand-in that has shapes but no values: whoever looks at a value there, which on a GPU
would wait for all queued work, gets an error.
"""

import contextlib
import copy
import itertools
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import segcal
from segcal import distributed
from segcal.cli import main
from segcal.metrics import meter as meter_module
from segcal.metrics import update_together
from segcal.metrics.regions import named_regions
from segcal.pixels import label_mass
from segcal.posthoc import CALIBRATORS
from segcal.sources.network import LoaderSource
from segcal.training import checkpoint
from tests.support import ROOT
from tests.support.holdouts import make_calibrator, random_holdout
from tests.support.loss_batches import LOSSES, batch
from tests.support.small_run import expect_equal, outcome
from tests.support.tiny import Patches, steady_network, trainer


def need_gpus(count):
    """Skip where there are fewer."""
    if torch.cuda.device_count() < count:
        there = torch.cuda.device_count()
        pytest.skip(f"{there} CUDA GPUs here, {count} needed: run `make test-gpu` where there are")


@pytest.fixture
def one_gpu():
    need_gpus(1)


@pytest.fixture
def two_gpus():
    need_gpus(2)


def gpu(test):
    """A test that needs the numbers of a GPU."""
    return pytest.mark.gpu(pytest.mark.usefixtures("one_gpu")(test))


@contextlib.contextmanager
def _raising(device):
    """Raise at whatever waits for the device."""
    if device == "meta":  # always does
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU, and the stand-in for one."""
    if request.param == "meta":
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    else:
        need_gpus(1)
    return request.param


def to(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_does_not_wait(device, loss):
    logits, labels = to(device, *batch(6, 5, dtype=torch.float32))
    built = loss.build().to(device)
    logits.requires_grad_()
    built(logits, labels).backward()  # what is loaded or allocated once
    with _raising(device):
        for _ in range(3):
            terms = built.terms(logits, labels)
            terms["loss"].backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"mixup": 0.4}, {"ema": 0.9}], ids=str)
def test_a_training_step_does_not_wait(device, options):
    run = trainer(model=steady_network, **options)
    learner = type(run.learner)(
        steady_network(),
        segcal.build_loss("fl+mdca", ignore_index=255),
        run.options,
        torch.device(device),
    )
    items = [Patches()[i] for i in range(8)]
    images, labels = (torch.stack(part) for part in zip(*items, strict=True))
    count = options.get("accumulate", 1)
    parts = [*zip(images.chunk(count), labels.chunk(count), strict=True)]
    parts = [tuple(to(device, *part)) for part in parts]  # as pinned batches, already on their way
    learner.step(parts, 1.0)
    with _raising(device):
        for _ in range(3):
            terms = learner.step(parts, 1.0)
    assert terms["loss"].device.type == device and learner.steps == 4


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_update_does_not_wait(device, probs, per_image, dtype):
    logits, labels = to(device, *batch(6, 5, dtype=torch.float32))
    values = (logits.softmax(1) if probs else logits).to(dtype)
    regions = named_regions(["boundary:1"], 4)
    meters = [segcal.CalibrationMeter(4, per_image=per_image) for _ in range(1 + len(regions))]

    def update():
        inside = [None, *(region(labels) for region in regions.values())]
        update_together(meters, values, labels, inside=inside, probs=probs, names=list("abc"))

    update()
    with _raising(device):
        update()
    assert meters[0].sums()["nll"].device.type == device


@pytest.mark.parametrize("name", CALIBRATORS)
def test_a_fitted_calibrator_does_not_wait(device, name):
    calibrator = make_calibrator(name).fit(random_holdout()).to(device)
    logits = random_holdout()[0][0].to(device)
    calibrator(logits)
    with _raising(device):
        assert calibrator(logits).shape == logits.shape


def test_the_stand_in_raises_when_something_looks():
    """Or else the tests above could not fail without a GPU."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.zeros((), device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta").nonzero()


def test_bad_values_of_an_accelerator_are_told_by_compute(monkeypatch):
    """The branch for a device that must not be looked at, on the CPU."""
    monkeypatch.setattr(meter_module, "_can_look", lambda tensor: False)
    meter_module.say_once.cache_clear()
    logits, labels = batch(6, 5, dtype=torch.float32)
    meter = segcal.CalibrationMeter(4)
    meter.update(logits, labels)
    before = meter.compute()
    bad = logits.clone()
    bad[:, 1] = torch.nan
    meter.update(bad, labels)
    with pytest.raises(ValueError, match="logits not finite"):
        meter.compute()
    assert meter.state_dict()["top_count"].sum() == before.protocol.pixels


def test_probabilities_on_an_accelerator_are_told_by_compute(monkeypatch, caplog):
    monkeypatch.setattr(meter_module, "_can_look", lambda tensor: False)
    meter_module.say_once.cache_clear()
    logits, labels = batch(6, 5, dtype=torch.float32)
    meter = segcal.CalibrationMeter(4)
    meter.update(logits.softmax(1), labels)
    assert not caplog.records
    meter.compute()
    assert "look like probabilities" in caplog.text


class NoGpus:
    """A machine with one GPU that this one does not have."""

    def __init__(self, monkeypatch, count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_devices_are_chosen_by_what_there_is(monkeypatch):
    NoGpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.choose_device("auto") == torch.device("cuda", 1)
    assert distributed.choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"among 2 CUDA GPU\(s\), but got cuda:2"):
        distributed.choose_device("cuda:2")
    NoGpus(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert distributed.choose_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert distributed.choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["meta", "xpu", "nothing"])
def test_devices_that_compute_nothing_are_refused(name, tmp_path, capsys):
    assert main(["train", "--data.name", "digits", "--device", name, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "Expected --device" in err and err.count("\n") == 1


class OnMps(torch.Tensor):
    """A tensor of the CPU that says it is on a device without float64."""

    device = property(lambda self: torch.device("mps"))

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_without_float64_sums_are_made_on_the_cpu():
    logits, labels = batch(6, 5, dtype=torch.float32)
    reports, calibrators = [], []
    for on_mps in (False, True):
        there = [t.as_subclass(OnMps) if on_mps else t for t in (logits, labels)]
        meter = segcal.CalibrationMeter(4)
        meter.update(*there)
        reports.append(meter.compute())
        calibrators.append(segcal.TemperatureScaling().fit([tuple(there)]).temperature_)
    assert reports[0] == reports[1] and calibrators[0] == calibrators[1]
    assert label_mass(labels.as_subclass(OnMps), 255).dtype == torch.float32
    assert label_mass(labels, 255).dtype == torch.float64


def test_processes_with_gpus_talk_by_nccl(monkeypatch):
    joined = []
    monkeypatch.setattr(dist, "init_process_group", joined.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("cuda", "cpu"):
        with distributed.process_group(torch.device(name)):
            pass
    assert joined == ["nccl", "gloo"]
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert distributed.communication_device() == torch.device("cuda", 1)


def test_random_numbers_of_a_gpu_are_kept(monkeypatch):
    before, restored = torch.arange(16, dtype=torch.uint8), []
    NoGpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: before)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = checkpoint.rng_state()
    checkpoint.set_rng_state(state)
    NoGpus(monkeypatch, 0)
    checkpoint.set_rng_state(state)  # a run of a GPU goes on without one
    assert restored == [before]


# From here on, numbers: only on a GPU.


@gpu
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses_equal_those_of_the_cpu(loss):
    logits, labels = batch(16, 15)
    values = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device).requires_grad_()
        value = loss.build().to(device)(leaf, labels.to(device))
        value.backward()
        values.append((value.detach().cpu(), leaf.grad.cpu()))
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-10)


@gpu
@pytest.mark.parametrize("probs", [False, True])
def test_meters_and_regions_equal_those_of_the_cpu(probs):
    logits, labels = batch(64, 48, dtype=torch.float64)
    values = logits.softmax(1) if probs else logits
    reports = []
    for device in ("cpu", "cuda"):
        meters = [segcal.CalibrationMeter(4, per_image=True) for _ in range(2)]
        on = labels.to(device)
        (region,) = named_regions(["boundary:2"], 4).values()
        update_together(meters, values.to(device), on, inside=[None, region(on)], probs=probs)
        reports.append([meter.compute(resamples=50) for meter in meters])
    for one, other in zip(*reports, strict=True):
        assert other.protocol == one.protocol
        assert (other.confusion == one.confusion).all()
        assert other.scores == pytest.approx(one.scores, rel=1e-9, nan_ok=True)
        for name, interval in one.intervals.items():
            assert other.intervals[name].low == pytest.approx(interval.low, abs=1e-9)


@gpu
@pytest.mark.parametrize("name", CALIBRATORS)
def test_calibrators_equal_those_of_the_cpu(name):
    holdout = random_holdout()
    one, other = (
        make_calibrator(name).fit([tuple(to(device, *part)) for part in holdout])
        for device in ("cpu", "cuda")
    )
    logits = holdout[0][0]
    off = 0.05 if name in ("lts", "selective") else 1e-3  # these are trained, by Adam
    torch.testing.assert_close(other.to("cpu")(logits), one(logits), rtol=off, atol=off)


@gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_training_of_the_scenes_learns(tmp_path, precision):
    run = tmp_path / "run"
    options = ["--data.limit", "64", "--epochs", "4", "--batch_size", "8", "--workers", "2"]
    options += ["--precision", precision, "--device", "cuda"]
    assert main(["train", *options, "--out", str(run)]) == 0
    history = checkpoint.read_checkpoint(run / "last.pt")["history"]
    assert history[-1]["train/loss"] < 0.8 * history[0]["train/loss"]
    assert main(["eval", str(run), "--device", "cuda", "--posthoc", "none,ts", "--limit", "8"]) == 0


class Cut(BaseException):
    """What SIGKILL is to a process."""


@gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_goes_on_bit_for_bit(tmp_path, precision):
    reads = itertools.count()

    def cut():
        if next(reads) == 50:
            raise Cut

    options = {"epochs": 2, "save_every": 3, "device": "cuda", "precision": precision}
    trainer(tmp_path / "whole", **options).fit()
    with pytest.raises(Cut):
        trainer(tmp_path / "cut", train=Patches(on_read=cut), **options).fit()
    resumed = trainer(tmp_path / "cut", **options)
    resumed.restore(checkpoint.load_last(tmp_path / "cut"))
    resumed.fit()
    expect_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


@gpu
def test_memory_does_not_grow_with_the_pixels():
    logits, labels = to("cuda", *batch(128, 128, dtype=torch.float32))
    meter = segcal.CalibrationMeter(4)
    peaks = []
    for count in (3, 30):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(count):
            meter.update(logits, labels)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]


@gpu
def test_a_network_on_a_gpu_is_evaluated_there():
    images = torch.stack([Patches()[i][0] for i in range(8)])
    labels = torch.stack([Patches()[i][1] for i in range(8)])
    network = steady_network().eval()
    loader = [(images, labels)]
    one, other = (
        segcal.evaluate(copy.deepcopy(network).to(device), loader, num_classes=3, progress=False)
        for device in ("cpu", "cuda")
    )
    assert other.scores == pytest.approx(one.scores, rel=1e-3, nan_ok=True)
    source = LoaderSource(network.to("cuda"), loader, num_classes=3)
    assert next(iter(source)).values.device.type == "cuda"


@pytest.mark.gpu
def test_two_gpus_equal_one(two_gpus, tmp_path):
    """The command as typed; a network whose statistics are per image."""
    script = str(ROOT / "tools/train_seg.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [
        "--data.limit",
        "24",
        "--batch_size",
        "8",
        "--epochs",
        "2",
        "--model.norm",
        "group",
        "--device",
        "cuda",
    ]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, script, "--out", str(tmp_path / name), *options]
        subprocess.run(command, check=True)
    one, two = (
        checkpoint.read_checkpoint(tmp_path / n / "last.pt")["model"] for n in ("one", "two")
    )
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
