"""`segcal sweep` from a YAML file to its tables, on trainings of a second."""

import base64
import csv
import re
import shutil
from statistics import fmean, stdev

import pytest

from segcal.cli import main
from segcal.metrics import CalibrationMeter, Report, mean_intervals, paired_differences
from segcal.sweep.definition import read_sweep
from segcal.sweep.plan import Evaluation
from segcal.sweep.results import Results, remarks_on_noise
from segcal.sweep.store import Store
from segcal.viz.tables import Number
from tests.support import ROOT

OWN = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
CONFIG = """
# cost: a second.
data: {name: digits, limit: 60}
model: {name: resnet8}
epochs: 1
batch_size: 20
workers: 0
optim: {name: sgd, lr: 0.05}
schedule: {name: constant, warmup: 0}
"""
SWEEP = """
title: Digits under shift
config: tiny.yaml
seeds: 2
select: [accuracy, nll]
posthoc: [none, ts]
shift: fog:3,contrast:3
limit: 30
methods:
  - {loss: nll, posthoc: none}
  - {loss: fl, gamma: [1, 3]}
scores: [accuracy, ece, nll]
by_shift: [ece]
compare: [[nll / none, fl / ts]]
draw: [nll / none]
"""


def sweep(folder, *words):
    return main(["sweep", str(folder / "grid.yaml"), "--device", "cpu", *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a sweep that was run."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "grid.yaml").write_text(SWEEP)
    assert sweep(folder, "--out", str(folder / "out"), "--into", str(folder / "page.md")) == 0
    return folder


def state(made, loss, where, posthoc, seed):
    (path,) = made.glob(f"out/runs/tiny-{loss}*-seed{seed}/reports/{where}-{posthoc}.npz")
    return CalibrationMeter.load(path)


def test_tables_are_those_of_the_reports(made):
    with open(made / "out/grid.csv", newline="") as file:
        rows = {(r["metric"], r["row"], r["column"]): r for r in csv.DictReader(file)}
    clean = rows["ece", "nll / none", "clean test images"]
    paths = [made / f"out/runs/tiny-nll-seed{seed}/reports/test-none.json" for seed in (0, 1)]
    seeds = [100 * Report.load(path).ece for path in paths]
    assert [float(x) for x in clean["seeds"].split()] == pytest.approx(seeds, rel=1e-5)
    assert float(clean["mean"]) == pytest.approx(fmean(seeds), rel=1e-5)
    assert float(clean["deviation"]) == pytest.approx(stdev(seeds), rel=1e-5)

    shifts = "mean over 2 corruptions of severity 3, 30 images"
    mean = rows["ece", "nll / none", shifts]
    each = [rows["ece", "nll / none", name] for name in ("fog:3", "contrast:3")]
    values = [[float(x) for x in r["seeds"].split()] for r in each]
    assert [float(x) for x in mean["seeds"].split()] == pytest.approx(
        [fmean(pair) for pair in zip(*values, strict=True)], rel=1e-4
    )
    names = ("fog3-limit30", "contrast3-limit30")
    meters = [[state(made, "nll", where, "none", seed) for where in names] for seed in (0, 1)]
    assert all(len(meter.names) == 30 for meter in meters[0])
    interval = mean_intervals(meters)["ece"]
    ends = [float(mean["low"]), float(mean["high"])]
    assert ends == pytest.approx([100 * interval.low, 100 * interval.high], rel=1e-4, abs=1e-9)


def test_errors_above_their_intervals_are_explained():
    within = Number("ece", "%", "nll / none", "clean", (2.0, 3.0), (2.0, 2.5))
    above = Number("sce", "1e-3", "nll / none", "clean", (19.0,), (4.0, 15.5))
    missing = Number("sce", "1e-3", "fl / none", "clean", ())
    assert remarks_on_noise([within, missing]) == []
    (remark,) = remarks_on_noise([within, above, above, missing])
    assert remark.startswith("SCE above the interval: noise adds")


def test_differences_are_paired_over_seeds_and_shifts(made):
    nll, fl, *_ = read_sweep(made / "grid.yaml").methods()
    store = Store(made / "out/runs")
    first, second = (
        [
            list(shifts)
            for shifts in zip(
                *(
                    store.meters(method, Evaluation(posthoc, shift, 30))
                    for shift in ("fog:3", "contrast:3")
                ),
                strict=True,
            )
        ]
        for method, posthoc in ((nll, "none"), (fl, "ts"))
    )
    assert len(first) == len(second) == 2
    value, interval = paired_differences(first, second)["ece"].texts(Report.ece)
    text = (made / "out/grid.md").read_text()
    part = text.split("Mean over 2 corruptions of severity 3, 30 images: differences")[1]
    (row,) = [line for line in part.splitlines() if line.startswith("| nll / none → fl / ts |")]
    assert f"| {value} ({interval}) |" in row


def test_page_and_marked_file(made):
    text = (made / "page.md").read_text()
    assert text.startswith("<!-- sweep grid -->\n### Digits under shift\n")
    assert "fl: gamma" in text and "The weights of the last epoch are evaluated." in text
    page = (made / "out/grid.html").read_text()
    assert "<h1>Digits under shift</h1>" in page and page.count("<table>") == 5
    picture = base64.b64encode((made / "out/grid.png").read_bytes()).decode()
    assert f"data:image/png;base64,{picture}" in page


def test_the_same_command_trains_nothing_again(made, capsys):
    times = {path: path.stat().st_mtime_ns for path in made.glob("out/runs/*/reports/*")}
    assert sweep(made, "--out", str(made / "out"), "--dry-run") == 0
    assert "0 reports to make" in capsys.readouterr().out
    assert sweep(made, "--out", str(made / "out")) == 0
    assert times == {path: path.stat().st_mtime_ns for path in made.glob("out/runs/*/reports/*")}


def test_two_processes_make_the_same_tables(made, tmp_path):
    assert sweep(made, "--out", str(tmp_path), "--jobs", "2") == 0
    assert (tmp_path / "grid.csv").read_text() == (made / "out/grid.csv").read_text()


def test_runs_are_found_by_their_settings(made, tmp_path, capsys):
    """Other names, another place, a changed folder of data: still the same training."""
    for number, path in enumerate(sorted((made / "out/runs").iterdir())):
        shutil.copytree(path, tmp_path / f"runs/{number}")
        shutil.rmtree(tmp_path / f"runs/{number}/reports", ignore_errors=True)
        (tmp_path / f"runs/{number}/trained.json").unlink()
    words = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    assert sweep(made, *words, "--dry-run") == 0
    said = capsys.readouterr().out
    assert f", {number + 1} of them found in --runs;" in said
    assert not (tmp_path / "out").exists()
    assert sweep(made, *words) == 0
    assert (tmp_path / "out/grid.csv").read_text() == (made / "out/grid.csv").read_text()
    assert not list((tmp_path / "out").rglob("*.pt"))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}

    # An unfinished run and one of other settings are neither.
    runs = [path for path in (tmp_path / "runs").iterdir() if "loss: nll" in settings(path)]
    (runs[0] / "log.jsonl").write_text("")
    (runs[1] / "config.yaml").write_text(settings(runs[1]).replace("epochs: 1", "epochs: 2"))
    capsys.readouterr()
    words = ["--out", str(tmp_path / "new"), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert sweep(made, *words) == 0
    wanted = [line for line in capsys.readouterr().out.splitlines() if "--loss nll " in line]
    assert len(wanted) == 2


def settings(run):
    return (run / "config.yaml").read_text()


def test_changed_settings_are_not_taken_for_done(made, tmp_path, capsys):
    shutil.copytree(made, tmp_path / "copy")
    (tmp_path / "copy/tiny.yaml").write_text(CONFIG.replace("lr: 0.05", "lr: 0.01"))
    assert sweep(tmp_path / "copy", "--out", str(tmp_path / "copy/out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "but got optim.lr=0.01; choose another folder with --out" in line


def test_dry_run_states_runs_and_cost_and_writes_nothing(made, tmp_path, capsys):
    assert sweep(made, "--out", str(tmp_path / "none"), "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    # nll with two seeds, gamma 1 and 3 with the first, and the second with what each rule chooses
    assert lines[0] == "6 trainings at most, 0 done; 30 reports to make"
    assert lines[1].endswith("tiny.yaml: a second.")
    assert len(lines) == 2 + 4 and not (tmp_path / "none").exists()
    shutil.copy(made / "grid.yaml", tmp_path)
    (tmp_path / "tiny.yaml").write_text(CONFIG.replace("# cost: a second.", ""))
    assert sweep(tmp_path, "--out", str(tmp_path / "none"), "--dry-run") == 0
    cost = capsys.readouterr().out.splitlines()[1]
    assert cost.endswith("tiny.yaml: cost unknown until the first run is done")


def test_options_vary(tmp_path):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    text = "config: tiny.yaml\nvary: {data: {limit: [40, 60]}}\nmethods: [{loss: nll}]\n"
    (tmp_path / "grid.yaml").write_text(text)
    found = read_sweep(tmp_path / "grid.yaml")
    assert [method.options for method in found.methods()] == [
        (("data.limit", 40),),
        (("data.limit", 60),),
    ]
    assert sweep(tmp_path, "--out", str(tmp_path / "out")) == 0
    folders = sorted(path.name for path in (tmp_path / "out/runs").iterdir())
    assert folders == [f"tiny-nll-data.limit{limit}-seed0" for limit in (40, 60)]
    text = (tmp_path / "out/grid.md").read_text()
    assert "**data.limit 40: clean test images" in text and "limit 60: clean" in text


def test_remarks_count_the_candidates_that_are_tried(tmp_path):
    """A hyper-parameter that the sweep varies is not one to choose."""
    (tmp_path / "grid.yaml").write_text(
        "config: scenes\nvary: {beta: [1, 5]}\nmethods: [nll+mdca, fl+mdca]\n"
        "grid: {mdca: {beta: [1, 10, 20]}, fl: {gamma: [1, 3]}}\n"
    )
    found, store = read_sweep(tmp_path / "grid.yaml"), Store(tmp_path / "runs")
    for run in (run for method in found.methods() for run in method.candidates()):
        store.set_trained(run, {"accuracy": dict(run.hyper).get("gamma", 0), "nll": 0.0})
    assert Results(found, store).remarks()[2:] == [
        f"beta {beta}, fl+mdca: beta {beta}, gamma 3 chosen, of 2." for beta in (1, 5)
    ]


def test_several_configs_with_grids_by_term_and_scores_by_class(tmp_path):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "other.yaml").write_text(CONFIG.replace("limit: 60", "limit: 40"))
    (tmp_path / "grid.yaml").write_text(
        "config: [tiny.yaml, other.yaml]\nscores: [sce]\nby_class: [class_ece]\n"
        "grid: {fl: {gamma: [3, 1]}, mdca: {beta: [1, 10]}}\n"
        "methods: [nll, fl+mdca, {loss: fl, gamma: 2}]\n"
    )
    nll, both, fl = read_sweep(tmp_path / "grid.yaml").methods()[:3]
    assert (len(nll.grid), len(both.grid), fl.grid) == (1, 4, ((("gamma", 2),),))
    assert sweep(tmp_path, "--out", str(tmp_path / "out"), "--no-tune", "--seeds", "2") == 0
    names = {path.name for path in (tmp_path / "out/runs").iterdir()}
    methods = ("nll", "fl+mdca-beta1-gamma3", "fl-gamma2")  # the first of each list
    assert names == {
        f"{config}-{method}-seed{seed}"
        for config in ("tiny", "other")
        for method in methods
        for seed in (0, 1)
    }
    with open(tmp_path / "out/grid.csv", newline="") as file:
        rows = {(r["metric"], r["row"], r["column"]): r for r in csv.DictReader(file)}
    where = "other: clean test images"
    each = [rows["class_ece", "nll / none", f"{where}: {digit}"] for digit in range(10)]
    seeds = zip(*(map(float, r["seeds"].split()) for r in each), strict=True)
    means = [fmean(classes) for classes in seeds]
    sce = [float(x) for x in rows["sce", "nll / none", where]["seeds"].split()]
    assert [10 * mean for mean in means] == pytest.approx(sce, rel=1e-4)  # SCE is their mean
    assert "fl+mdca / none" in (tmp_path / "out/grid.md").read_text()


def test_a_small_version_replaces_keys_and_takes_data_that_is_there(tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text(
        "title: Big\nconfig: cifar10_resnet32\nmethods: [nll, fl]\ngrid: {fl: {gamma: [1, 3]}}\n"
        "small:\n  - {config: small/cifar10_resnet8, grid: {fl: {gamma: 3}}, seeds: 2}\n"
        "  - {config: small/digits_resnet8, methods: [fl]}\n"
    )
    assert sweep(tmp_path, "--small", "--data", str(tmp_path), "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 trainings, 0 done; 2 reports to make"
    assert all("small/digits_resnet8.yaml --loss fl --gamma 3" in line for line in lines[2:])
    first = read_sweep(tmp_path / "grid.yaml", small=True)
    assert first.configs == ("small/cifar10_resnet8",) and len(first.entries) == 2
    assert (first.name, first.title) == ("grid_small", "Big, small version")
    assert read_sweep(tmp_path / "grid.yaml").configs == ("cifar10_resnet32",)


def test_a_table_has_the_rows_that_are_evaluated_there(tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "config: scenes\nshift: fog:3\nlimit: 5\nscores: [ece]\n"
        "methods: [{loss: nll, shift: 'fog:1,3'}, {loss: fl, posthoc: ts}]\n"
    )
    sheet = Results(read_sweep(tmp_path / "grid.yaml"), Store(tmp_path)).sheet("segcal sweep")
    shown = {block.caption: [name for name, _ in block.rows] for block in sheet.blocks}
    both = ["nll / none", "fl / ts"]
    assert list(shown.values()) == [both, ["nll / none"], both]
    assert all(number.text == "–" for number in sheet.numbers)  # nothing is measured yet


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("posthoc: [none, ts]", "posthoc: [none, tz]"), "Expected post-hoc methods among"),
        (("gamma: [1, 3]", "gama: [1, 3]"), "Expected keys of a method out of .* but got gama"),
        (("loss: nll", "loss: nl"), "Expected"),
        (("shift: fog:3", "shift: frog:3"), "Expected shifts out of .* but got 'frog'"),
        (("seeds: 2", "seeds: two"), "Expected seeds as a number of them or a list, but got 'two'"),
        (("seeds: 2", "seeds: 1000000000"), "Expected seeds as a number of them or a list"),
        (("draw: [nll / none]", "draw: 0.5"), "Expected a sweep, but got 'float' object"),
        (("limit: 30", "limit: 0"), "Expected limit as a whole number of at least 1, but got 0"),
        (("select: [accuracy, nll]", "select: speed"), "Expected select out of .* but got speed"),
        (
            ("[nll / none, fl / ts]", "[nll / ts, fl / ts]"),
            "Expected rows out of .* but got nll / ts",
        ),
        (("config: tiny.yaml", "config: nowhere"), "Expected a config at nowhere"),
        (("methods:", "ways:"), "Expected methods in a sweep, but there is none"),
        (("limit: 30", "grid: {mcda: {beta: 1}}"), "Expected keys of grid out of .* but got mcda"),
        (("limit: 30", "small: {epochs: 1}"), "Expected keys of a small version out of .* epochs"),
        (("by_shift: [ece]", "by_class: [ece]"), "Expected by_class out of class_ece, .* got ece"),
        (("config: tiny.yaml", "config: []"), "Expected a config or a list of configs"),
    ],
)
def test_mistakes_are_one_line(change, message, tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    assert change[0] in SWEEP
    (tmp_path / "grid.yaml").write_text(SWEEP.replace(*change))
    assert sweep(tmp_path, "--out", str(tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_our_own_sweeps_can_be_read(path):
    assert read_sweep(path).methods()
    assert f"# segcal sweep configs/sweeps/{path.name}" in path.read_text().splitlines()[0]


def test_ours_are_known_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "voc_half", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("11 trainings, 0 done; 18 reports to make\n")


def test_the_grid_of_masks_under_shift():
    found = read_sweep(ROOT / "configs/sweeps/voc_shift.yaml")
    candidates = {run for method in found.methods() for run in method.candidates()}
    assert len(candidates) == 1 + 2 + 2 + 4
    method = found.methods()[0]
    assert method.seeds == (0, 1, 2) and len(method.evaluations) == 2 * (1 + 12)
    assert Evaluation("ts", "fog:3", 150) in method.evaluations
    assert found.select == ("accuracy", "nll")
