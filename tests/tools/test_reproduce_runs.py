"""Tables and figures end to end, on trainings of a second; the panels of the opening figure."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from reproduction import command, opening, paper
from reproduction.render import numbers

from segcal import viz
from segcal.metrics import CalibrationMeter, Report, mean_intervals
from segcal.sweep import runner
from segcal.sweep.definition import read_sweep
from segcal.sweep.results import Results
from segcal.sweep.runner import Runs
from segcal.training.config import RECIPES, load_config, parse_train

TINY = """
data: {name: DATA, limit: 16}
model: MODEL
epochs: 1
batch_size: 8
workers: 0
optim: {name: sgd, lr: 0.05, weight_decay: 0.0}
schedule: {name: constant, warmup: 0}
"""
BETAS, SIZES = (0.25, 1, 5, 25), (16, 64, 256)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Configs of the same names, for trainings of a second; nothing else is replaced."""
    configs = shutil.copytree(RECIPES, tmp_path / "configs")
    for path in (configs / "small").glob("*_*.yaml"):
        path.write_text(TINY.replace("DATA", "digits").replace("MODEL", "{name: resnet8}"))
    unet = "{name: small_unet, width: 4}"
    (configs / "small/scenes.yaml").write_text(
        TINY.replace("DATA", "scenes").replace("MODEL", unet)
    )
    monkeypatch.setattr(runner, "recipe_path", lambda name: configs / f"{name}.yaml")
    return tmp_path


def reproduce(tiny, *words):
    out = ["--scale", "small", "--out", str(tiny / "out"), "--data", str(tiny), "--device", "cpu"]
    return command.reproduce("", [*words, *out])


@pytest.mark.slow
def test_segmentation_table(tiny, capsys):
    into = tiny / "results.md"
    assert reproduce(tiny, "segmentation", "--seeds", "2", "--into", str(into)) == 0
    with open(tiny / "out/small/segmentation.csv", newline="") as file:
        rows = {(row["metric"], row["row"]): row for row in csv.DictReader(file)}
    assert len(rows) == 16
    for row in rows.values():
        first, second = map(float, row["seeds"].split())
        assert float(row["mean"]) == pytest.approx((first + second) / 2, rel=1e-4)
    runs = tiny / "out/small/runs"
    report = report_of(tiny, "small_scenes-nll-seed0")
    assert float(rows["sce", "nll / none"]["seeds"].split()[0]) == pytest.approx(
        1000 * report.sce, rel=1e-4
    )
    # Temperature scaling leaves every prediction as it was, but for ties at a large temperature.
    before, after = (float(rows["accuracy", f"nll / {how}"]["mean"]) for how in ("none", "ts"))
    assert after == pytest.approx(before, abs=0.1)
    # nll and fl have nothing to choose; fl+mdca tries two values of beta with the first seed.
    assert len(list(runs.iterdir())) == 2 + 2 + (2 + 1)
    assert "python tools/reproduce.py segmentation --seeds 2" in into.read_text()
    assert "fl+mdca: beta" in into.read_text()

    times = {path: path.stat().st_mtime_ns for path in runs.rglob("last.pt")}
    assert reproduce(tiny, "segmentation", "--seeds", "2") == 0  # nothing is trained again
    assert times == {path: path.stat().st_mtime_ns for path in runs.rglob("last.pt")}
    capsys.readouterr()
    assert reproduce(tiny, "--list", "--seeds", "2") == 0
    assert "7 trainings, 7 done" in capsys.readouterr().out


def run_of(tiny, label):
    (path,) = tiny.glob(f"out/small/runs/{label}-????????")
    return path


def report_of(tiny, label):
    return Report.load(run_of(tiny, label) / "eval/report.json")


@pytest.fixture
def drawn(tiny, monkeypatch):
    """Makes a figure with one seed and nothing to choose; the figure that was written."""
    kept = {}

    def draw(name, *words):
        maker = command.MAKERS[name]

        def keep(results):
            kept[name] = maker.draw(results)
            return kept[name]

        monkeypatch.setitem(command.MAKERS, name, replace(maker, draw=keep))
        assert reproduce(tiny, name, "--seeds", "1", *words) == 0
        (figure,) = kept[name].values()
        width, height = figure.get_size_inches()
        with Image.open(tiny / f"out/small/{name}.png") as png:
            assert png.width / png.height == pytest.approx(width / height, rel=0.01)
            assert len(png.convert("RGB").getcolors(2**24)) > 20  # there is something on it
        return figure

    return draw


def lines_of(ax):
    return {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}


def test_reliability_figure_shows_the_reports(tiny, drawn):
    figure = drawn("reliability_fl", "--no-tune")
    folders = ("small_cifar10_resnet8-fl-gamma3", "small_cifar10_resnet8-fl+mdca-beta1-gamma3")
    for ax, folder, loss in zip(figure.axes, folders, ("fl", "fl+mdca"), strict=False):
        expected = viz.reliability_diagram(report_of(tiny, f"{folder}-seed0"), counts=False)
        assert ax.get_title() == loss
        shapes, wanted = (
            [patch.get_patch_transform().transform_path(patch.get_path()) for patch in axes.patches]
            for axes in (ax, expected)
        )
        assert len(shapes) > 0
        for shape, other in zip(shapes, wanted, strict=True):
            np.testing.assert_array_equal(shape.vertices, other.vertices)


def test_convergence_figure_shows_the_logs(tiny, drawn):
    figure = drawn("convergence", "--no-tune")
    for ax, score, factor in zip(figure.axes, ("ece", "sce"), (100, 1000), strict=True):
        lines = lines_of(ax)
        for loss, beta in (("nll+mdca", 1), ("nll+mmce", 2), ("nll+dca", 1)):
            run = run_of(tiny, f"small_mnist_resnet8-{loss}-beta{beta}-seed0")
            log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
            expected = [[line["epoch"], factor * line[f"holdout/{score}"]] for line in log]
            np.testing.assert_allclose(lines[loss], expected)


@pytest.mark.slow
def test_figures_against_a_setting(tiny, drawn):
    path = tiny / "configs/small/cifar10_resnet8.yaml"
    path.write_text(path.read_text().replace("limit: 16", "limit: 300"))  # for batches of 256
    found = {
        "beta": {"fl+mdca": {b: f"mnist_resnet8-fl+mdca-beta{b}-gamma3" for b in BETAS}},
        "batch_size": {
            "fl+mdca": {b: f"cifar10_resnet8-fl+mdca-beta1-gamma3-batch_size{b}" for b in SIZES},
            "fl": {b: f"cifar10_resnet8-fl-gamma3-batch_size{b}" for b in SIZES},
        },
    }
    factors = {"ece": 100, "sce": 1000, "accuracy": 100}
    for name, scores in (("beta", ["sce", "accuracy"]), ("batch_size", list(factors))):
        for ax, score in zip(drawn(name).axes, scores, strict=True):
            lines = lines_of(ax)
            assert lines.keys() == found[name].keys()
            for loss, folders in found[name].items():
                values = []
                for at, folder in folders.items():
                    report = report_of(tiny, f"small_{folder}-seed0")
                    values.append([at, factors[score] * getattr(report, score)])
                np.testing.assert_allclose(lines[loss], values)


@pytest.mark.slow
def test_list_names_everything_and_says_what_is_missing(tiny, capsys):
    assert command.reproduce("", ["--list", "--data", str(tiny)]) == 0
    text = capsys.readouterr().out
    for entry in [*paper.tables().values(), *paper.figures().values()]:
        assert entry.name in text and entry.label in text
    assert "missing: data of voc2012_deeplabv3plus_xception65" in text


def test_missing_data_is_one_line(tiny, capsys):
    words = ["segmentation", "--data", str(tiny), "--out", str(tiny / "out")]
    assert command.reproduce("", words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "VOC 2012" in line and str(tiny) in line
    assert "(for voc2012_deeplabv3plus_xception65)" in line
    assert not (tiny / "out").exists()
    assert reproduce(tiny, "figure9") == 2
    assert "but got 'figure9'" in capsys.readouterr().err


def test_dry_run_prints_commands_that_train(tiny, capsys):
    assert reproduce(tiny, "segmentation", "--dry-run", "--seeds", "1") == 0
    counted, _, *lines = capsys.readouterr().out.splitlines()
    assert counted == "4 trainings, 0 done" and len(lines) == 4
    for line in lines:
        assert line.startswith("segcal train ")
        config, resume = parse_train(line.split()[2:])
        assert resume and config.data.name == "scenes"
    assert not (tiny / "out").exists()


def answered(probs, labels, names=("cat", "dog", "owl")):
    class Pictures:
        def image(self, index):
            return np.zeros((8, 8, 3), np.uint8)

    both = {loss: torch.tensor(probs) for loss in opening.LOSSES}
    return opening.Answers(Pictures(), torch.tensor(labels), both, names)


def test_panels_choose_by_rule():
    probs = [[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.2, 0.2, 0.6], [0.7, 0.0, 0.3]]
    shown = answered([*probs, [0.3, 0.3, 0.4]], [0, 1, 1, 2, 2, 2])
    assert opening.surest_mistake(shown) == 2
    assert opening.surest_hit(shown) == 0
    assert opening.typical_of_rarest(shown) == 5  # 0.4, the median of 0.3, 0.4 and 0.6
    assert len(opening.image_and_answers(shown, 2, "rule").axes) == 2
    right = answered([[0.9, 0.1, 0.0], [0.1, 0.6, 0.3]], [0, 1])
    assert opening.surest_mistake(right) == 0  # no mistake at all: still an image


def test_activation_map_shows_where_the_class_is_seen():
    """One convolution that lets the right half through: the map is 1 there and 0 elsewhere."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 1, 1, bias=False)
            torch.nn.init.ones_(self.conv.weight)
            self.head = torch.nn.Conv2d(1, 2, 1, bias=False)
            self.head.weight.data = torch.tensor([[-1.0], [1.0]]).view(2, 1, 1, 1)

        def forward(self, x):
            return self.head(self.conv(torch.nn.functional.avg_pool2d(x, 2)).repeat(1, 1, 2, 2))

    image = torch.zeros(3, 8, 8)
    image[:, :, 4:] = 1
    found = opening.grad_cam(Half().eval(), image, torch.ones(8, 8, dtype=torch.bool), 1)
    assert found.shape == (8, 8)
    assert found[:, :3].max() < 0.5 < found[:, 5:].min()


def test_layer_of_the_map_is_the_deepest_of_the_encoder():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            conv = torch.nn.Conv2d
            halves, keeps, pooled = conv(3, 4, 2, stride=2), conv(4, 8, 1), conv(8, 9, 4)
            self.encoder = torch.nn.Sequential(halves, keeps)
            self.pool, self.decoder = pooled, conv(8, 16, 1)

        def forward(self, x):
            features = self.encoder(x)
            return self.decoder(features) + self.pool(features).sum()

    net = Net()
    assert opening.deepest(net, torch.zeros(3, 8, 8)) is net.encoder[1]


PAPER = sorted((RECIPES / "sweeps/paper").glob("*.yaml"))
CONFIGS = sorted(
    {c for path in PAPER for small in (0, 1) for c in read_sweep(path, small=small).config}
)


def test_configs_state_their_schedule_and_open_with_their_command():
    for name in CONFIGS:
        path = RECIPES / f"{name}.yaml"
        load_config(path)
        stated = yaml.safe_load(path.read_text())
        assert "warmup" in stated["schedule"] and "lr" in stated["optim"], name
        assert f"--config configs/{name}.yaml" in path.read_text().splitlines()[0]


def opened(tmp_path, scale):
    words = ["--scale", scale, "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    options = command.read_options("", words)
    return command.open_runs(options), options


def test_a_bare_machine_has_every_small_table(tmp_path):
    """Scikit-learn's digits stand in where data is missing, and turn in place of domains."""
    runs, options = opened(tmp_path, "small")
    for name in paper.tables():
        (sweep,) = command.sweeps_of(paper.find(name), runs, options)
        runs.require_data(sweep.methods)
    (pacs,) = command.sweeps_of(paper.find("pacs"), runs, options)
    assert pacs.config == ("small/digits_resnet8",)
    assert [str(shift) for shift in pacs.shifts()] == ["rotation:15", "rotation:45", "rotation:75"]
    where = "(small/digits_resnet8 under rotation:15, rotation:45, rotation:75)"
    assert where in command.stand_in(pacs)
    assert {"mdca", "fl"} <= {part for method in pacs.methods for part in method.loss.split("+")}
    # of the first small version
    grid = pacs.methods[-1].grid
    assert set(grid) == {(("beta", beta), ("gamma", gamma)) for beta in (1, 10) for gamma in (3, 1)}


@pytest.mark.parametrize("scale", ["small", "full"])
def test_sweeps_have_what_the_tables_of_the_paper_ask_for(scale, tmp_path):
    runs, options = opened(tmp_path, scale)
    for table in paper.tables().values():
        (sweep,) = command.sweeps_of(table, runs, options)
        assert len(sweep.config) == len(table.experiments)
        assert scale == "small" or list(sweep.config) == table.experiments
        found = numbers(table, Results(sweep, runs))  # looks up every place
        assert len(found) == len(table.units) * len(table.rows) * len(table.columns)


@pytest.mark.slow
def test_table_of_our_own_has_intervals_and_differences(tiny):
    into = tiny / "results.md"
    assert reproduce(tiny, "voc_half", "--seeds", "2", "--no-tune", "--into", str(into)) == 0
    names = ["small_scenes-fl-gamma1", "small_scenes-fl+mdca-beta1-gamma1"]
    first, second = ([report_of(tiny, f"{name}-seed{seed}") for seed in (0, 1)] for name in names)
    lines = into.read_text().splitlines()
    row = next(line for line in lines if line.startswith("| fl / none |"))
    ece = row.split("|")[4]
    folders = [run_of(tiny, f"{names[0]}-seed{seed}") for seed in (0, 1)]
    states = [CalibrationMeter.load(folder / "eval/state.npz") for folder in folders]
    interval = mean_intervals(states)["ece"]
    assert f"[{100 * interval.low:.2f}, {100 * interval.high:.2f}]" in ece
    (row,) = [line for line in lines if line.startswith("| fl / none → fl+mdca / none |")]
    found = row.split("|")[4].split("[")[0].strip(" *")
    means = [sum(report.ece for report in side) / 2 for side in (first, second)]
    assert float(found) == pytest.approx(100 * (means[1] - means[0]), abs=0.006)


def test_missing_word_vectors_are_named(tmp_path):
    """The messages can be fetched, GloVe cannot."""
    path = tmp_path / "glove.6B.100d.txt"
    assert str(path) in Runs(tmp_path / "runs", data=tmp_path).lacks("newsgroups_gpcnn")
