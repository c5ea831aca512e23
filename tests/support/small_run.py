"""A small training run from the command line, and everything that a run leaves behind."""

import json

import torch

from segcal.training import checkpoint

RUN = ["--data.name", "digits", "--data.limit", "64", "--model.name", "resnet8", "--epochs", "3"]
RUN += ["--batch_size", "16", "--save_every", "1", "--workers", "1", "--device", "cpu"]


def outcome(folder):
    """Everything a run leaves behind, but for the times."""
    last, best = (checkpoint.read_checkpoint(folder / name) for name in ("last.pt", "best.pt"))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in (*last["history"], *log, best["record"]):
        record.pop("seconds")
    last.pop("seconds"), last["record"].pop("seconds", None)
    return {"last": last, "best": best, "log": log}


def expect_equal(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            expect_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            expect_equal(a, b, f"{where}/{n}")
    else:
        assert one == other, where
