"""Evaluation of saved predictions on a Ray cluster: one task per shard, whose sums are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segcal.evaluation.evaluate import LogitMap, Measured, keeps_image_sums, measure
from segcal.evaluation.saved import PredictionFolder
from segcal.metrics.triage import AcceptedPixels, SetCounts
from segcal.runtime import RETRIES, join_ray

SHARDS_PER_CORE = 4  # so that no core waits long for the last one
Counts = Mapping[str, Sequence[AcceptedPixels | SetCounts]]  # by calibrator


def measure_on_ray(
    source: PredictionFolder,
    calibrators: Mapping[str, LogitMap | None],
    *,
    cluster: str,
    observers: Counts,
    **settings: Any,
) -> dict[str, Measured]:
    """`measure` by tasks of a Ray cluster that sees the files at the same paths.

    A task returns its meters, a few kilobytes per image. If its worker or node dies, another one
    repeats the task.

    Args:
        source: the predictions.
        calibrators: by name; None leaves the predictions as they are.
        cluster: address; see `join_ray`.
        observers: see `measure`; each gets the counts of all tasks.
        **settings: further arguments of `measure`.
    """
    tables = settings["num_bins"] * len(calibrators) * (1 + len(settings["regions"]))
    settings["per_image"] = keeps_image_sums(
        source, tables, settings["protocols"], asked=settings["per_image"]
    )
    ray, leave = join_ray(cluster)
    cores = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    count = min(len(source.names), SHARDS_PER_CORE * cores)
    shared = ray.put((dict(calibrators), dict(observers), settings))
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_measure_shard)
    pending = [task.remote(source.shard(number, count), shared) for number in range(count)]
    total: dict[str, Measured] = {}
    try:
        while pending:
            (done,), pending = ray.wait(pending)
            measured, counted, skipped = ray.get(done)
            source.skipped |= skipped
            for name, part in measured.items():
                total[name] = _add(total[name], part) if name in total else part
            for name, ours in observers.items():
                for one, other in zip(ours, counted[name], strict=True):
                    one.add(other)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:  # a worker that died as often as it may
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ChildProcessError(f"a task of the Ray cluster ended early: {lines[0]}") from None
    finally:
        for handle in pending:
            ray.cancel(handle)
        leave()
    return total


def _measure_shard(
    source: PredictionFolder, shared: tuple[dict[str, LogitMap | None], Counts, dict[str, Any]]
) -> tuple[dict[str, Measured], Counts, dict[str, str]]:
    """The meters and the counts of a shard, and the files that were left out."""
    calibrators, observers, settings = shared
    measured = measure(source, calibrators, observers=observers, progress=False, **settings)
    return measured, observers, source.skipped


def _add(one: Measured, other: Measured) -> Measured:
    regions = {name: meter + other.regions[name] for name, meter in one.regions.items()}
    return Measured(one.whole + other.whole, regions, one.protocols)
