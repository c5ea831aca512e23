"""A pool on Ray: runs are tasks of a cluster, retried where a worker or a node dies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segcal.runtime import RETRIES, join_ray
from segcal.sweep.runner import OpenTask, Worker, do
from segcal.sweep.store import Store

_SAVING = 300  # seconds that runs have to save themselves when the sweep is stopped


class RayPool:
    """Tasks of a Ray cluster, which sees the files of the grid at the same paths.

    Args:
        address: of the cluster, or auto; "" starts one on this machine, for this process alone.
        cpus: of a run.
        gpus: of a run; None for one if the cluster has any.
        retries: of a run whose worker or node died.
    """

    def __init__(
        self,
        address: str = "",
        *,
        cpus: float = 1,
        gpus: float | None = None,
        retries: int = RETRIES,
    ) -> None:
        self._ray, self._leave = join_ray(address)
        has = self._ray.cluster_resources()
        gpus = float(bool(has.get("GPU"))) if gpus is None else gpus
        self._needs = {"CPU": cpus, "GPU": gpus}
        for name, needed in self._needs.items():
            if needed > has.get(name, 0):
                self.close()
                raise ValueError(
                    f"Expected a cluster with {needed:g} {name} for a run, but it has "
                    f"{has.get(name, 0):g}"
                )
        self._do = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_do)

    @property
    def size(self) -> int:
        """Runs at a time on the nodes that there are now."""
        has = self._ray.cluster_resources()
        return max(min(int(has.get(n, 0) / need) for n, need in self._needs.items() if need), 1)

    def has_room(self, under_way: int) -> bool:
        """Always: Ray has a queue, by which a cluster may grow."""
        return True

    def submit(self, task: OpenTask, store: Store, worker: Worker) -> Any:
        """Give the task to the cluster."""
        return self._do.options(name=task.run.name).remote(task, store, worker, os.getcwd())

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, str | None]]:
        """Wait for the first."""
        done, _ = self._ray.wait(list(handles), num_returns=1)
        return [(handle, self._outcome(handle)) for handle in done]

    def _outcome(self, handle: Any) -> str | None:
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            lines = str(cause).strip().splitlines() or [""]
            return f"{type(cause).__name__}: {lines[0]}"

    def stop(self, handles: Sequence[Any]) -> None:
        """Interrupt every run, which saves it, and wait until all have ended."""
        for handle in handles:
            self._ray.cancel(handle, force=False)
        if handles:
            self._ray.wait(list(handles), num_returns=len(handles), timeout=_SAVING)

    def close(self) -> None:
        """Leave the cluster; one that was started for this process ends."""
        self._leave()


def _do(task: OpenTask, store: Store, worker: Worker, folder: str) -> str | None:
    """`do`, where paths mean what they mean to the driver."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return do(task, store, worker)
