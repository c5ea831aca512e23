"""`segcal sweep` from a YAML file to its tables, on trainings of a second."""

import base64
import csv
import os
import re
import shutil
from statistics import fmean, stdev

import numpy as np
import pytest
from PIL import Image

import segcal
from segcal import evaluate_source, open_source
from segcal.cli import main
from segcal.data.shift import Shift, parse_shifts
from segcal.metrics import CalibrationMeter, Report, mean_intervals, paired_differences
from segcal.metrics.scores import SCORES
from segcal.sweep.definition import read_sweep
from segcal.sweep.results import Results
from segcal.viz.tables import difference_cell
from tests.support import ROOT
from tests.support.stepwise import Counted

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
select: accuracy
posthoc: [none, ts]
shift: fog:3,contrast:3
limit: 30
methods:
  - {loss: nll, posthoc: none, ensemble: true}
  - {loss: fl, gamma: [1, 3], posthoc: [none, ts, vs]}
scores: [accuracy, ece, nll]
by_shift: [ece]
compare: [[nll / none, fl / ts], [nll / none, nll ensemble / none]]
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


def kept(made, loss, seed, where):
    """The folder of an evaluation: where is such as eval, eval/ts or eval-limit-30/fog-3."""
    (path,) = made.glob(f"out/runs/tiny-{loss}-seed{seed}-*/{where}")
    return path


def states(made, loss, *where):
    """For each of both seeds, the meters of some evaluations."""
    return [
        [CalibrationMeter.load(kept(made, loss, seed, each) / "state.npz") for each in where]
        for seed in (0, 1)
    ]


def test_tables_are_those_of_the_reports(made):
    with open(made / "out/grid.csv", newline="") as file:
        rows = {(r["metric"], r["row"], r["column"]): r for r in csv.DictReader(file)}
    clean = rows["ece", "nll / none", "clean test images"]
    paths = [kept(made, "nll", seed, "eval/report.json") for seed in (0, 1)]
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
    meters = states(made, "nll", "eval-limit-30/fog-3", "eval-limit-30/contrast-3")
    assert all(len(meter.names) == 30 for shifts in meters for meter in shifts)
    interval = mean_intervals(meters)["ece"]
    ends = [float(mean["low"]), float(mean["high"])]
    assert ends == pytest.approx([100 * interval.low, 100 * interval.high], rel=1e-4, abs=1e-9)


def test_differences_are_paired_over_seeds_and_shifts(made):
    shifts = ("fog-3", "contrast-3")
    (fl,) = made.glob("out/runs/tiny-fl-*-seed1-*")
    loss = fl.name.removeprefix("tiny-").partition("-seed")[0]
    differences = paired_differences(
        states(made, "nll", *(f"eval-limit-30/{shift}" for shift in shifts)),
        states(made, loss, *(f"eval-limit-30/ts/{shift}" for shift in shifts)),
    )
    cell = difference_cell(SCORES["ece"], differences["ece"])
    text = (made / "out/grid.md").read_text()
    part = text.split("Mean over 2 corruptions of severity 3, 30 images: differences")[1]
    (row,) = [line for line in part.splitlines() if line.startswith("| nll / none → fl / ts |")]
    assert f"| {cell.text} {cell.note} |" in row


def test_values_of_the_seeds_stand_beside_the_mean(made):
    text = (made / "out/grid.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| nll / none |"))
    seeds = [100 * Report.load(kept(made, "nll", seed, "eval/report.json")).ece for seed in (0, 1)]
    assert f"seeds {', '.join(f'{value:.2f}' for value in seeds)}" in row


def test_one_seed_has_no_star_and_says_so(made, tmp_path):
    out = ["--out", str(tmp_path), "--seeds", "1", "--runs", str(made / "out/runs")]
    assert sweep(made, *out) == 0
    text = (tmp_path / "grid.md").read_text()
    assert "one seed: images only" in text and "* [" not in text


def test_page_and_marked_file(made):
    text = (made / "page.md").read_text()
    assert text.startswith("<!-- sweep grid -->\n### Digits under shift\n")
    assert "fl: gamma" in text and "The weights of the last epoch are evaluated." in text
    page = (made / "out/grid.html").read_text()
    assert "<h1>Digits under shift</h1>" in page and page.count("<table") == 5
    picture = base64.b64encode((made / "out/grid.png").read_bytes()).decode()
    assert f"data:image/png;base64,{picture}" in page


def test_the_seeds_of_a_method_pooled_are_a_row(made):
    runs = sorted(made.glob("out/runs/tiny-nll-seed[01]-*"))
    source = segcal.Members([segcal.open_source(run) for run in runs])
    expected = segcal.evaluate_source(source, overlays="none", resamples=0).reports["none"]
    with open(made / "out/grid.csv", newline="") as file:
        rows = {(r["metric"], r["row"], r["column"]): r for r in csv.DictReader(file)}
    found = rows["nll", "nll ensemble / none", "clean test images"]
    assert float(found["mean"]) == pytest.approx(expected.nll, rel=1e-5) and not found["deviation"]
    (folder,) = made.glob("out/runs/tiny-nll-seeds0_1-*/eval-limit-30/fog-3")
    assert len(CalibrationMeter.load(folder / "state.npz").names) == 30
    text = (made / "out/grid.md").read_text()
    assert "nll / none → nll ensemble / none" in text and "An ensemble is the mean" in text


def test_a_calibrator_that_may_change_the_mask_has_a_column_that_says_how_much(made):
    with open(made / "out/grid.csv", newline="") as file:
        rows = {(r["metric"], r["row"], r["column"]): r["mean"] for r in csv.DictReader(file)}
    found = {name: rows["mask_changed", name, "clean test images"] for _, name, _ in rows}
    (folder,) = {path.parent for path in made.glob("out/runs/*-seed0-*/eval/vs/report.json")}
    assert not found["nll / none"] and float(found["fl / ts"]) == 0
    share = Report.load(folder / "report.json").mask_changed
    assert float(found["fl / vs"]) == pytest.approx(100 * share, abs=1e-6) and share >= 0


def times(folder, *patterns):
    paths = [path for pattern in patterns for path in folder.rglob(pattern)]
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.slow
def test_the_same_command_makes_nothing_again(made, capsys):
    before = times(made, "best.pt", "report.json", "state.npz")
    assert sweep(made, "--out", str(made / "out"), "--dry-run") == 0
    assert capsys.readouterr().out == "5 trainings, 5 done\n"
    assert sweep(made, "--out", str(made / "out")) == 0
    assert before == times(made, "best.pt", "report.json", "state.npz")
    damaged = kept(made, "nll", 0, "eval-limit-30/fog-3/report.json")
    whole = damaged.read_text()
    damaged.write_text(whole[:100])
    assert sweep(made, "--out", str(made / "out")) == 0
    assert damaged.read_text() == whole


@pytest.mark.slow
def test_two_processes_make_the_same_tables(made, tmp_path):
    assert sweep(made, "--out", str(tmp_path), "--jobs", "2") == 0
    assert (tmp_path / "grid.csv").read_text() == (made / "out/grid.csv").read_text()
    trained = [p for p in tmp_path.rglob("output.txt") if "-seeds" not in p.parent.name]
    assert trained and all("hold-out accuracy" in p.read_text() for p in trained)


@pytest.mark.slow
def test_runs_are_found_by_their_settings(made, tmp_path, capsys):
    """Under other names, in another place: still the same training."""
    for number, path in enumerate(sorted((made / "out/runs").iterdir())):
        shutil.copytree(path, tmp_path / f"runs/{number}", ignore=shutil.ignore_patterns("eval*"))
    words = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    before = times(tmp_path / "runs", "*")
    assert sweep(made, *words, "--dry-run") == 0
    assert capsys.readouterr().out == "5 trainings, 5 done\n"
    assert not (tmp_path / "out").exists()
    assert sweep(made, *words) == 0
    assert (tmp_path / "out/grid.csv").read_text() == (made / "out/grid.csv").read_text()
    assert not list((tmp_path / "out").rglob("*.pt"))
    assert before == times(tmp_path / "runs", "*")

    # An unfinished run and one of other settings are neither.
    runs = [path.parent for path in tmp_path.glob("runs/*/config.yaml")]
    runs = [path for path in runs if "loss: nll" in settings(path)]
    (runs[0] / "log.jsonl").write_text("")
    (runs[1] / "config.yaml").write_text(settings(runs[1]).replace("epochs: 1", "epochs: 2"))
    capsys.readouterr()
    words = ["--out", str(tmp_path / "new"), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert sweep(made, *words) == 0
    wanted = [line for line in capsys.readouterr().out.splitlines() if "--loss nll " in line]
    assert len(wanted) == 2


def settings(run):
    return (run / "config.yaml").read_text()


def test_changed_settings_are_another_training(made, tmp_path, capsys):
    for name in ("tiny.yaml", "grid.yaml"):
        shutil.copy(made / name, tmp_path)
    (tmp_path / "tiny.yaml").write_text(CONFIG.replace("lr: 0.05", "lr: 0.01"))
    assert sweep(tmp_path, "--out", str(made / "out"), "--dry-run") == 0
    assert capsys.readouterr().out.startswith("5 trainings, 0 done\n")


@pytest.fixture
def two(tmp_path):
    """A sweep of two configs of one name, whose data is in different folders."""
    rng = np.random.default_rng(0)
    for name in ("one", "other"):
        for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
            (tmp_path / name / "data" / place).mkdir(parents=True)
            for i in range(6):
                image = Image.fromarray(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8))
                image.save(tmp_path / name / "data" / place / f"{i}.png")
        root = f"{{name: folders, root: {tmp_path / name / 'data'}, resize: 8}}"
        text = re.sub(r"{name: digits.*}", root, CONFIG).replace("batch_size: 20", "batch_size: 4")
        (tmp_path / name / "tiny.yaml").write_text(text)
    (tmp_path / "grid.yaml").write_text(
        "config: [one/tiny.yaml, other/tiny.yaml]\nmethods: [nll]\nscores: [accuracy, ece, nll]\n"
    )
    assert sweep(tmp_path, "--out", str(tmp_path / "out")) == 0
    return tmp_path


def nlls(folder):
    with open(folder / "out/grid.csv", newline="") as file:
        rows = csv.DictReader(file)
        return {r["column"].partition(":")[0]: r["mean"] for r in rows if r["metric"] == "nll"}


def test_two_data_folders_are_two_trainings(two, capsys):
    """Though both configs have one file name; a changed folder is never shown with old numbers."""
    assert len(list(two.glob("out/runs/tiny-nll-seed0-*"))) == 2
    first = nlls(two)
    assert first.keys() == {"one", "other"} and first["one"] != first["other"]

    # A root that is edited between two calls is another training.
    config = two / "one/tiny.yaml"
    config.write_text(config.read_text().replace("one/data", "other/data"))
    assert sweep(two, "--out", str(two / "out")) == 0
    assert len(list(two.glob("out/runs/*"))) == 2
    assert nlls(two) == {"one": first["other"], "other": first["other"]}
    config.write_text(config.read_text().replace("other/data", "one/data"))

    # Images that are added, changed or touched make the old run another one's.
    touched = two / "one/data/train/cat/0.png"
    about = touched.stat()
    os.utime(touched, (about.st_atime, about.st_mtime + 5))
    capsys.readouterr()
    assert sweep(two, "--out", str(two / "out")) == 2
    assert "--same-data" in capsys.readouterr().err
    stated = ["--same-data", str(two / "one/data")]
    assert sweep(two, "--out", str(two / "out"), *stated) == 0
    assert nlls(two) == first


def test_moved_data_is_stated(two, capsys):
    first = nlls(two)
    shutil.move(two / "one/data", two / "one/moved")
    config = two / "one/tiny.yaml"
    config.write_text(config.read_text().replace("one/data", "one/moved"))
    assert sweep(two, "--out", str(two / "out"), "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("2 trainings, 1 done")
    stated = ["--same-data", f"{two / 'one/data'}={two / 'one/moved'}"]
    assert sweep(two, "--out", str(two / "out"), *stated) == 0
    assert len(list(two.glob("out/runs/*"))) == 2 and nlls(two) == first
    # A missing folder is said before anything is trained.
    shutil.rmtree(two / "one/moved")
    assert sweep(two, "--out", str(two / "out")) == 2
    assert "moved" in capsys.readouterr().err


def test_a_shift_of_other_images_is_checked_before_training(two, capsys):
    text = (two / "grid.yaml").read_text()
    shutil.copytree(two / "one/data", two / "birds")
    for part in ("train", "test"):
        (two / "birds" / part / "dog").rename(two / "birds" / part / "bird")
    for place, word in (("nowhere", "nowhere"), ("birds", "bird")):
        shift = f"shift: data:{two / place}\n"
        (two / "grid.yaml").write_text(text + shift)
        assert sweep(two, "--out", str(two / "new"), "--dry-run") == 0
        assert "before it can start: " in capsys.readouterr().out
        assert sweep(two, "--out", str(two / "new")) == 2
        assert word in capsys.readouterr().err and not (two / "new").exists()


def test_calibrators_are_fitted_on_the_stated_images(two):
    text = (
        (two / "grid.yaml").read_text().replace("[one/tiny.yaml, other/tiny.yaml]", "one/tiny.yaml")
    )
    more = f"posthoc: [none, ts]\nholdout: {two / 'other/data'}\ngroup: '(cat|dog)'\n"
    (two / "grid.yaml").write_text(text + more)
    assert sweep(two, "--out", str(two / "out")) == 0
    (folder,) = two.glob("out/runs/*/eval/ts")
    report = Report.load(folder / "report.json")
    run = open_source(folder.parents[1])
    (other,) = parse_shifts(f"data:{two / 'other/data'}")
    expected = evaluate_source(run, holdout=run.shifted(other), posthoc=["ts"], overlays="none")
    assert report.nll == pytest.approx(expected.reports["ts"].nll, rel=1e-6)
    assert report.images.groups == 2


def test_changed_test_images_are_evaluated_again(two):
    first = nlls(two)
    Image.new("RGB", (8, 8)).save(two / "one/data/test/cat/0.png")
    assert sweep(two, "--out", str(two / "out")) == 0
    assert nlls(two)["one"] != first["one"] and nlls(two)["other"] == first["other"]


def test_dry_run_states_runs_and_cost_and_writes_nothing(made, tmp_path, capsys):
    assert sweep(made, "--out", str(tmp_path / "none"), "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    # nll with two seeds, gamma 1 and 3 with the first, and the second with what is chosen
    assert lines[0] == "5 trainings, 0 done"
    assert lines[1].endswith("tiny.yaml: a second.")
    assert len(lines) == 2 + 4 and not (tmp_path / "none").exists()


def test_options_vary(tmp_path):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    text = "config: tiny.yaml\nvary: {data: {limit: [40, 60]}}\nmethods: [{loss: nll}]\n"
    (tmp_path / "grid.yaml").write_text(text)
    found = read_sweep(tmp_path / "grid.yaml")
    assert [m.options for m in found.methods] == [(("data.limit", 40),), (("data.limit", 60),)]
    assert list(found.tables()) == ["data.limit 40", "data.limit 60"]


def test_remarks_count_the_candidates_that_are_tried(tmp_path):
    """A hyper-parameter that the sweep varies is not one to choose."""
    (tmp_path / "grid.yaml").write_text(
        "config: scenes\nvary: {beta: [1, 5]}\nmethods: [nll+mdca, fl+mdca]\n"
        "grid: {mdca: {beta: [1, 10, 20]}, fl: {gamma: [1, 3]}}\n"
    )
    found, runs = read_sweep(tmp_path / "grid.yaml"), Counted(tmp_path)
    for training in (t for method in found.methods for t in method.candidates()):
        gamma = dict(training.changes).get("gamma", 0)
        runs.kept[training.label] = {"accuracy": gamma, "nll": 0.0}
    assert Results(found, runs).remarks()[2:] == [
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
    nll, both, fl = read_sweep(tmp_path / "grid.yaml").methods[:3]
    assert (len(nll.grid), len(both.grid), fl.grid) == (1, 4, ((("gamma", 2),),))
    assert sweep(tmp_path, "--out", str(tmp_path / "out"), "--no-tune", "--seeds", "2") == 0
    names = {path.name.rpartition("-")[0] for path in (tmp_path / "out/runs").iterdir()}
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
    assert lines[0] == "2 trainings, 0 done"
    assert all("small/digits_resnet8.yaml --loss fl " in line for line in lines[2:])
    first = read_sweep(tmp_path / "grid.yaml", small=True)
    assert first.config == ("small/cifar10_resnet8",) and len(first.methods) == 2
    assert (first.name, first.title) == ("grid_small", "Big, small version")
    assert read_sweep(tmp_path / "grid.yaml").config == ("cifar10_resnet32",)


def test_a_table_has_the_rows_that_are_evaluated_there(tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "config: scenes\nshift: fog:3\nlimit: 5\nscores: [ece]\n"
        "methods: [{loss: nll, shift: 'fog:1,3'}, {loss: fl, posthoc: ts}]\n"
    )
    sheet = Results(read_sweep(tmp_path / "grid.yaml"), Counted(tmp_path)).sheet("segcal sweep")
    shown = {table.title: [name for name, _ in table.rows] for table in sheet.tables}
    both = ["nll / none", "fl / ts"]
    assert list(shown.values()) == [both, ["nll / none"], both]
    assert all(number.text == "–" for number in sheet.numbers)  # nothing is measured yet


MISTAKES = [
    (("posthoc: [none, ts, vs]", "posthoc: [none, tz]"), "tz"),
    (("gamma: [1, 3]", "gama: [1, 3]"), "gama"),
    (("loss: nll", "loss: nl"), "nl"),
    (("shift: fog:3", "shift: frog:3"), "frog"),
    (("seeds: 2", "seeds: two"), "two"),
    (("seeds: 2", "seeds: 1000000000"), "seeds"),
    (("draw: [nll / none]", "draw: 0.5"), "draw"),
    (("limit: 30", "limit: 0"), "limit"),
    (("select: accuracy", "select: speed"), "speed"),
    (("[nll / none, fl / ts]", "[nll / ts, fl / ts]"), "nll / ts"),
    (("config: tiny.yaml", "config: nowhere"), "nowhere"),
    (("methods:", "ways:"), "ways"),
    (("limit: 30", "grid: {mcda: {beta: 1}}"), "mcda"),
    (("limit: 30", "small: {epochs: 1}"), "epochs"),
    (("by_shift: [ece]", "by_class: [ece]"), "by_class"),
    (("config: tiny.yaml", "config: []"), "config"),
    (("limit: 30", "options: {optim.lrr: 1}"), "optim.lr"),
]


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    for (before, after), word in MISTAKES:
        assert before in SWEEP
        (tmp_path / "grid.yaml").write_text(SWEEP.replace(before, after))
        assert sweep(tmp_path, "--out", str(tmp_path / "out")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("segcal: error: ") and word in line
    assert not (tmp_path / "out").exists()


def test_our_own_sweeps_can_be_read():
    for path in OWN:
        assert read_sweep(path).methods, path
        assert f"# segcal sweep configs/sweeps/{path.name}" in path.read_text().splitlines()[0]


def test_ours_are_known_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "voc_half", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("11 trainings, 0 done\n")


def test_the_grid_of_masks_under_shift():
    found = read_sweep(ROOT / "configs/sweeps/voc_shift.yaml")
    candidates = {training for method in found.methods for training in method.candidates()}
    assert len(candidates) == 1 + 2 + 2 + 4
    method = found.methods[0]
    assert method.seeds == (0, 1, 2) and method.posthoc == ("none", "ts")
    assert len(method.shifts) == 12 and Shift("fog", 3) in method.shifts
    assert found.select == "accuracy" and found.limit == 150
