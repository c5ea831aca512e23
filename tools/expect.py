"""Withholds labels, writes what `segcal apply` would expect, then takes the labels to compare.

python tools/expect.py out.csv --run runs/nll-s0 --shift-data camvid_dusk --shift all:1,3,5
python tools/expect.py out.csv --model glue.py:espnet --data masks:cvB:test --holdout masks:cvB:val
python tools/expect.py out.csv --predictions val --fit-predictions train

A row for each shift and calibrator (none, ts), with a line for each number. `drift` is whether the
images raise the alarm against the hold-out. `alarms_of_1` and `alarms_of_20` are the shares of
single images and of sets of 20 images that do, against another hold-out: a random half of the clean
images, 10 times, with images that are not in it. So on the clean images they are rates of false
alarms.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import open_source
from segcal.data.shift import Shift
from segcal.evaluation.expected import Expected
from segcal.evaluation.holdout import choose, fit, recorded
from segcal.evaluation.measure import measure, watch_logits
from segcal.evaluation.shifts import open_shifts
from segcal.metrics.drift import HoldoutProfile, measure_drift, prediction_sums
from segcal.metrics.scores import class_iou, mean_of_known
from segcal.posthoc import Calibrator
from segcal.sources import Source

Shares = tuple[Sequence[str], np.ndarray, np.ndarray]  # names, and (M, B) and (M, C) shares
HALVES, SETS, SIZE = 10, 5, 20


class Sums:
    """The sums of every image that `Expected` holds."""

    def __init__(self, atc: float) -> None:
        self.atc = atc
        self.rows: dict[str, list[Tensor]] = defaultdict(list)

    def update(self, logits: Tensor, labels: Tensor, groups: object = None) -> None:
        """Add a batch, whose labels are not looked at."""
        sums = prediction_sums(logits.softmax(1))
        sums["above"] = (sums.pop("top") > self.atc).sum(1)
        for name, values in sums.items():
            self.rows[name].append(values)

    def sync(self) -> None:
        """Nothing: there is one process."""

    def expected(self, source: Source, profile: HoldoutProfile) -> Expected:
        """What is expected of the images of `source`."""
        arrays: dict[str, Any] = {n: torch.cat(rows).numpy() for n, rows in self.rows.items()}
        arrays["accepted"] = np.full(len(arrays["pixels"]), np.nan)
        names = tuple(map(str, range(len(arrays["pixels"]))))
        return Expected.of(arrays, names=names, class_names=source.class_names, profile=profile)


def alarm_rates(clean: Shares, shares: Shares, profile: HoldoutProfile) -> dict[str, float]:
    """How often images raise the alarm against a random half of the clean ones, without these."""
    rng, single, sets = np.random.default_rng(0), [], []
    for _ in range(HALVES):
        half = rng.permutation(len(clean[0]))[: len(clean[0]) // 2]
        known = {clean[0][i] for i in half}
        drawn = replace(
            profile, images=len(half), confidence=clean[1][half], classes=clean[2][half]
        )
        left = np.array([i for i, name in enumerate(shares[0]) if name not in known])
        found = measure_drift(drawn, shares[1][left], shares[2][left], resamples=200)
        assert found is not None
        single.append(found.unlike.any(0).mean())
        for _ in range(SETS):
            some = rng.choice(left, min(SIZE, len(left)), replace=False)
            found = measure_drift(drawn, shares[1][some], shares[2][some], resamples=200)
            sets.append(found is not None and found.alarm)
    return {"alarms_of_1": float(np.mean(single)), "alarms_of_20": float(np.mean(sets))}


def compare(
    source: Source,
    maps: Mapping[str, Calibrator | None],
    profiles: Mapping[str, HoldoutProfile],
    trivial: Mapping[str, float],
    clean: dict[str, Shares],
) -> list[dict[str, Any]]:
    """A row for each calibrator: expected and true scores of the images, and the alarms.

    Args:
        source: the images.
        maps: the calibrators by name.
        profiles: of the hold-out after each.
        trivial: accuracy and mIoU of the hold-out, as an estimate to beat.
        clean: by calibrator, what the first call finds of its images.
    """
    counters = {method: Sums(profiles[method].atc_threshold) for method in maps}
    watches = {method: [watch_logits(sums)] for method, sums in counters.items()}
    measured = measure(source, maps, watches=watches, per_image=True, resamples=0)
    found = []
    for method, (report, meter) in measured.items():
        expected, images = counters[method].expected(source, profiles[method]), meter.image_sums()
        hit, predicted, truth = (
            images[key].numpy() for key in ("intersection", "predicted", "truth")
        )
        accuracy = hit.sum(1) / images["pixels"].numpy()
        iou = mean_of_known(class_iou(hit, predicted, truth))
        row: dict[str, Any] = {"calibrator": method, "images": len(iou)}
        row |= {"accuracy": report.accuracy, "expected_accuracy": expected.accuracy}
        row |= {"atc": expected.atc, "holdout_accuracy": trivial["accuracy"]}
        row |= {"miou": report.miou, "expected_miou": expected.miou}
        row |= {"holdout_miou": trivial["miou"]}
        for key, values, true in (
            ("expected_accuracy", expected.each.accuracy, accuracy),
            ("atc", expected.each.atc, accuracy),
            ("holdout_accuracy", np.full(len(iou), trivial["accuracy"]), accuracy),
            ("expected_miou", expected.each.miou, iou),
        ):
            known = np.isfinite(values) & np.isfinite(true)
            row[f"image_error:{key}"] = float(np.abs(values - true)[known].mean())
        order = np.array([np.argsort(np.argsort(x)) for x in (expected.each.accuracy, accuracy)])
        row["rank_correlation"] = float(np.corrcoef(order)[0, 1])
        drift = expected.drift
        assert drift is not None
        row |= {"drift": int(drift.alarm)}
        pixels = expected.sums["pixels"][:, None]
        each = expected.sums["bins"] / pixels, expected.class_shares
        clean.setdefault(method, (meter.names, *each))
        row |= alarm_rates(clean[method], (meter.names, *each), profiles[method])
        row |= {"distance": float(drift.distances[0]), "by_chance": float(drift.limits[0])}
        found.append(row)
    return found


def main() -> None:
    """Read the options, and write a table of all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("out", type=Path)
    for option in ("--run", "--model", "--data", "--holdout", "--predictions"):
        add(option)
    add("--fit-predictions")
    add("--ignore-index", type=int)
    add("--shift", action="append", default=[])
    add("--shift-data", action="append", default=[])
    add("--limit", type=int, help="images under each shift")
    add("--name")
    options = parser.parse_args()
    if options.predictions:
        source, held = open_source(options.predictions), open_source(options.fit_predictions)
    elif options.model:
        stated = {"ignore_index": options.ignore_index, "holdout": options.holdout}
        source = open_source(options.model, options.data, **stated)
        held = source.holdout()
    else:
        source = open_source(options.run)
        held = source.holdout()
    source.name = options.name or source.name
    with recorded(held, ["ts"]) as recording:
        maps = {"none": None, "ts": fit("ts", recording)}
        chosen = choose(recording, {"ts": maps["ts"]})
    trivial = {key: getattr(chosen["none"].report, key) for key in ("accuracy", "miou")}
    profiles = {name: c.profile for name, c in chosen.items() if c.profile is not None}
    wanted = [*options.shift, *(Shift("data", root) for root in options.shift_data)]
    clean: dict[str, Shares] = {}
    sources = {"clean": source}
    for name, shifted in open_shifts(source, wanted).items():
        sources[name] = shifted.limited(options.limit) if options.limit else shifted
        sources[name].name = source.name
    with options.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["table", "row", "column", "value"])
        for name, each in sources.items():
            for row in compare(each, maps, profiles, trivial, clean):
                place = source.name, f"{name} {row.pop('calibrator')}"
                for column, value in row.items():
                    shown = f"{value:.5f}" if isinstance(value, float) else value
                    table.writerow([*place, column, shown])
            file.flush()
            print(f"{name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
