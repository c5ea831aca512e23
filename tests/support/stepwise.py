"""A worker of grids whose training is a count of steps, each kept in a file when it is done."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from segcal.training.signals import Interrupted, StopSignals

STEPS = 4


@dataclass(frozen=True)
class Stepwise:
    """Trains in `STEPS` steps of `seconds`, and logs each as "RUN STEP PROCESS NODE".

    Attributes:
        log: file of the steps of all runs.
        seconds: of a step.
        dies: run whose process kills itself, once, after the second step.
        gate: file that a run waits for after its first step.
        slow: run that is half a second behind the others after each step.
        fails: by run, the exception that it raises, or "dies" for a process that always dies.
    """

    log: Path
    seconds: float = 0.0
    dies: str = ""
    gate: Path | None = None
    slow: str = ""
    fails: tuple[tuple[str, object], ...] = ()

    def train(self, run, store):
        folder = store.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        why = dict(self.fails).get(run.name)
        if why == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if why is not None:
            raise why
        kept = folder / "steps"
        with StopSignals() as stop:
            for step in range(int(kept.read_text()) if kept.exists() else 0, STEPS):
                if stop.received:
                    (folder / "saved").touch()
                    raise Interrupted(stop.received)
                time.sleep(self.seconds)
                kept.write_text(str(step + 1))
                with self.log.open("a") as file:
                    file.write(f"{run.name} {step} {os.getpid()} {node()}\n")
                while self.gate and not self.gate.exists() and not stop.received:
                    time.sleep(0.02)
                time.sleep(0.5 if run.name == self.slow else 0)
                if run.name == self.dies and step == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        gamma = dict(run.hyper).get("gamma", 0)
        return {"accuracy": 0.5 + gamma / 10, "nll": 1.0, "ece": 0.1}

    def evaluate(self, run, store, evaluations):
        for evaluation in evaluations:
            path = store.report(run, evaluation)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"run": run.name}))


def node():
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else "-"
