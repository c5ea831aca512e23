"""Runs of sweeps that train nothing: counted in memory, or as steps in a file."""

import os
import signal
import time
from pathlib import Path

from segcal.sweep.runner import Runs
from segcal.training.signals import Interrupted, StopSignals

STEPS = 4


class Counted(Runs):
    """Runs whose scores are in memory.

    Args:
        root: their folder, in which nothing is written.
        kept: scores by label, which other objects may share.
        fail: labels of the runs that fail.
        stop_at: the number of trainings after which Ctrl-C comes.
    """

    def __init__(self, root, kept=None, fail=(), stop_at=None):
        super().__init__(root)
        self.kept = {} if kept is None else kept
        self.trained, self.asked = [], []
        self.fail, self.stop_at = fail, stop_at

    def scores(self, training):
        return self.kept.get(training.label)


class Stepwise(Runs):
    """Trains in `STEPS` steps, and logs each as "RUN STEP PROCESS NODE".

    Args:
        root: folder of the runs.
        log: file of the steps of all runs.
        dies: run whose process kills itself, once, after the second step.
        gate: file that a run waits for after its first step.
        slow: run that is half a second behind the others after each step.
        fails: by run, the exception that it raises, or "dies" for a process that always dies.
    """

    def __init__(self, root, log, *, dies="", gate=None, slow="", fails=()):
        super().__init__(Path(root))
        self.log, self.dies, self.gate, self.slow, self.fails = log, dies, gate, slow, dict(fails)

    def folder(self, training):
        return self.root / training.label

    def scores(self, training):
        path = self.root / training.label / "steps"
        done = path.exists() and int(path.read_text()) == STEPS
        gamma = dict(training.changes).get("gamma", 0)
        return {"accuracy": 0.5 + gamma / 10, "nll": 1.0, "ece": 0.1} if done else None

    def do(self, training, methods=()):
        label = training.label
        folder = self.root / label
        folder.mkdir(parents=True, exist_ok=True)
        why = self.fails.get(label)
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
                kept.with_suffix(".new").write_text(str(step + 1))
                kept.with_suffix(".new").replace(kept)  # others may be reading it
                with self.log.open("a") as file:
                    file.write(f"{label} {step} {os.getpid()} {node()}\n")
                while self.gate and not self.gate.exists() and not stop.received:
                    time.sleep(0.02)
                time.sleep(0.5 if label == self.slow else 0)
                if label == self.dies and step == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.scores(training)


def node():
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else "-"
