"""Grids: chosen on the hold-out, cut and resumed, shared by processes; tables beside the paper."""

import csv
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from reproduction import paper, render, runner
from reproduction.locks import try_lock
from reproduction.plan import PLAIN, Method, Training, merge_methods
from reproduction.results import Number
from reproduction.store import Store

from tests.support import ROOT

TOOLS = ROOT / "tools"
TS = ("ts", None)
GRID = tuple((("beta", float(beta)),) for beta in (1, 5, 10))
TUNED = Method("tiny", "nll+mdca", grid=GRID, seeds=(0, 1, 2))
PLAIN_NLL = Method("tiny", "nll", seeds=(0, 1, 2), evaluations=frozenset({PLAIN, TS}))


class Fake:
    """Trains in no time; the hold-out likes beta = 5."""

    def __init__(self, fail=(), stop_at=None):
        self.trained, self.evaluated = [], []
        self.fail, self.stop_at = fail, stop_at

    def train(self, run, store):
        if len(self.trained) == self.stop_at:
            raise KeyboardInterrupt
        if run.name in self.fail:
            raise ValueError("loss term 'mdca' is no longer finite at step 7")
        self.trained.append(run.name)
        beta = dict(run.hyper).get("beta", 0.0)
        return {"accuracy": 0.9 - abs(beta - 5) / 100, "nll": 0.3, "ece": 0.01}

    def evaluate(self, run, store, evaluations):
        for evaluation in evaluations:
            self.evaluated.append((run.name, evaluation))
            path = store.report(run, evaluation)
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")


def test_grid_tries_each_candidate_once_and_reports_the_best(tmp_path):
    fake = Fake()
    assert runner.work([TUNED, PLAIN_NLL], Store(tmp_path), fake) == []
    tried = [f"tiny-nll+mdca-beta{beta}-seed0" for beta in (1, 5, 10)]
    others = [f"tiny-nll+mdca-beta5-seed{seed}" for seed in (1, 2)]
    plain = [f"tiny-nll-seed{seed}" for seed in (0, 1, 2)]
    assert sorted(fake.trained) == sorted(tried + others + plain)
    reported = {name for name, _ in fake.evaluated}
    assert reported == {tried[1], *others, *plain}  # losers never see the test data
    assert sorted(fake.evaluated).count(("tiny-nll-seed0", TS)) == 1


def test_ties_go_to_the_lower_nll_and_failures_do_not_count(tmp_path):
    store = Store(tmp_path)
    one, five, ten = TUNED.candidates()
    store.set_trained(one, {"accuracy": 0.9, "nll": 0.31})
    store.set_trained(five, {"accuracy": 0.9, "nll": 0.30})
    assert store.choice(TUNED) is None  # one is still missing
    store.set_failure(ten, "diverged")
    assert store.choice(TUNED) == five.hyper
    for run in (one, five):
        store.set_failure(run, "diverged")
    with pytest.raises(ValueError, match="no run of tiny nll"):
        store.choice(TUNED)


def test_interrupted_grid_resumes_where_it_stopped(tmp_path):
    first, second = Fake(stop_at=4), Fake()
    with pytest.raises(KeyboardInterrupt):
        runner.work([TUNED, PLAIN_NLL], Store(tmp_path), first)
    runner.work([TUNED, PLAIN_NLL], Store(tmp_path), second)
    assert len(first.trained) == 4 and len(second.trained) == 8 - 4
    assert not set(first.trained) & set(second.trained)
    assert not set(first.evaluated) & set(second.evaluated)
    third = Fake()
    runner.work([TUNED, PLAIN_NLL], Store(tmp_path), third)
    assert third.trained == third.evaluated == []


def test_another_table_evaluates_what_is_trained_already(tmp_path):
    runner.work([Method("tiny", "nll", seeds=(0, 1, 2))], Store(tmp_path), Fake())
    fake = Fake()
    runner.work([PLAIN_NLL], Store(tmp_path), fake)
    assert fake.trained == []
    assert [evaluation for _, evaluation in fake.evaluated] == [TS] * 3


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    store = Store(tmp_path)
    failures = runner.work([PLAIN_NLL, TUNED], store, Fake(fail=["tiny-nll-seed1"]))
    assert failures == ["tiny-nll-seed1: loss term 'mdca' is no longer finite at step 7"]
    assert runner.progress([PLAIN_NLL, TUNED], store) == (7, 8)
    store.forget_failure(Training("tiny", "nll", seed=1))
    assert runner.work([PLAIN_NLL, TUNED], store, Fake()) == []


def test_a_workshop_that_writes_no_report_is_a_failure_not_a_loop(tmp_path):
    fake = Fake()
    fake.evaluate = lambda run, store, evaluations: None
    failures = runner.work([Method("tiny", "nll")], Store(tmp_path), fake)
    assert failures == ["tiny-nll-seed0: no report was written for [('none', None)]"]


def test_merge_unites_evaluations():
    assert merge_methods([Method("tiny", "nll", seeds=(0, 1, 2)), PLAIN_NLL, TUNED]) == [
        PLAIN_NLL,
        TUNED,
    ]


WORKER = """
import os, sys, time
from pathlib import Path
from reproduction import runner
from reproduction.plan import Method
from reproduction.store import Store

class Slow:
    def train(self, run, store):
        with open(sys.argv[2], "a") as log:
            log.write(f"{run.name}\\n")
        time.sleep(float(sys.argv[3]))
        return {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}
    def evaluate(self, run, store, evaluations):
        for e in evaluations:
            path = store.report(run, e)
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")

grid = tuple((("beta", float(beta)),) for beta in range(6))
tuned = Method("tiny", "nll+mdca", grid=grid, seeds=(0, 1, 2))
plain = Method("tiny", "nll", seeds=(0, 1, 2))
runner.work([tuned, plain], Store(Path(sys.argv[1])), Slow(), poll=0.02)
"""


def start(folder, log, seconds):
    path = os.pathsep.join([str(TOOLS), str(TOOLS.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), str(log), str(seconds)],
        env={**os.environ, "PYTHONPATH": path},
    )


def test_two_grids_on_one_folder_do_each_run_once(tmp_path):
    log = tmp_path / "log"
    workers = [start(tmp_path / "runs", log, 0.05) for _ in range(2)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 6 + 2 + 3


def test_a_killed_grid_leaves_no_lock_behind(tmp_path):
    log = tmp_path / "log"
    worker = start(tmp_path / "runs", log, 600)
    for _ in range(600):
        if log.exists():
            break
        time.sleep(0.1)
    folder = tmp_path / "runs" / log.read_text().split()[0]
    with try_lock(folder) as mine:
        assert not mine
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    with try_lock(folder) as mine:
        assert mine


def sheet(command="python tools/reproduce.py segmentation"):
    table = paper.tables()["segmentation"]
    ours = {"nll / none": (6.0, 7.0, 8.0), "fl / none": (9.0,), "fl+mdca / none": (5.0, 5.5)}
    numbers = [
        Number(metric, unit, row, column, table.printed(metric, row, column), ours.get(row, ()))
        for metric, unit in table.units.items()
        for row in table.rows
        for column in table.columns
    ]
    return render.Sheet(table, numbers, {}, command, ["A <b>remark</b>."])


def test_markdown_has_ours_beside_the_papers():
    text = render.sheet_markdown(sheet())
    assert "| nll / none | 7.00 ± 1.00 (6.4) |" in text
    assert "| nll / ts | – (6.26) |" in text
    assert "| fl / none | 9.00 (11.8) |" in text
    assert "SCE (1e-3), lower is better" in text and "mIoU (%), higher is better" in text
    said = "Against its base loss, MDCA"
    assert f"{said} lowers SCE in 1 of 1 cases here and in 1 of 1 in the paper." in text
    assert f"{said} raises mIoU in 0 of 1 cases here and in 1 of 1 in the paper." in text


def test_csv_has_every_number():
    rows = list(csv.DictReader(io.StringIO(render.sheet_csv(sheet()))))
    assert len(rows) == 16
    (row,) = [r for r in rows if (r["metric"], r["row"]) == ("ece", "nll / none")]
    assert (row["paper"], row["mean"], row["deviation"]) == ("7.77", "7", "1")
    assert row["seeds"] == "6 7 8"


def test_html_is_escaped_and_whole():
    page = render.sheet_html(sheet(command="<script>alert(1)</script>"))
    assert "<script>" not in page and "A &lt;b&gt;remark" in page
    assert "<td>7.00 ± 1.00<small>7.77</small></td>" in page
    assert page.count("<small>") == 16


def test_put_into_replaces_only_its_own_part(tmp_path):
    path = tmp_path / "results.md"
    path.write_text("# Results\n\n<!-- a -->\nold\n<!-- end of a -->\n\nafter\n")
    render.put_into(path, "a", render.sheet_markdown(sheet()))
    render.put_into(path, "b", render.sheet_markdown(sheet()))
    text = path.read_text()
    assert "old" not in text and text.startswith("# Results\n\n<!-- a -->\n### Semantic")
    assert text.index("after") < text.index("<!-- b -->") < text.index("<!-- end of b -->")
    once = text
    render.put_into(path, "a", render.sheet_markdown(sheet()))
    assert path.read_text() == once
    path.write_text("<!-- a -->\nno end")
    with pytest.raises(ValueError, match="Expected <!-- end of a -->"):
        render.put_into(path, "a", render.sheet_markdown(sheet()))
