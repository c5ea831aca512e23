"""The built wheel stands alone: used in an environment of its own, outside the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import segcal
from segcal.metrics.scores import SCORES
from tests.support import ROOT

RECIPES = {path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/**/*.yaml")}


def run(*command, cwd):
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    out = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, env=clean
    )
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("segcal", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=folder)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def home(built, tmp_path_factory):
    """A virtual environment with the wheel, which finds its dependencies where this one does."""
    folder = tmp_path_factory.mktemp("home")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # A path in a .pth file adds packages, but no editable install: those are .pth files themselves.
    (place,) = (folder / "venv").glob("lib/python*/site-packages")
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    run(*pip, "--no-deps", built[1], cwd=folder)
    return folder


def test_version_and_recipes_are_in_both_files(built):
    sdist, wheel = built
    assert f"segcal-{segcal.__version__}" in sdist.name and segcal.__version__ in wheel.name
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as files:
        in_sdist = [member.name.partition("/")[2] for member in files if member.isfile()]
    for names in (in_wheel, in_sdist):
        found = {n.removeprefix("segcal/recipes/") for n in names if n.endswith(".yaml")}
        assert found == RECIPES
        assert {"segcal/py.typed", "segcal/viz/page/report.html"} <= set(names)
        assert not any(name.startswith("tests") for name in names)


def test_a_session_from_recipe_to_report(home):
    segcal_command, python = home / "venv/bin/segcal", home / "venv/bin/python"
    where = run(python, "-c", "import segcal; print(segcal.__file__)", cwd=home)
    assert Path(where.strip()).is_relative_to(home / "venv")
    listed = run(segcal_command, "train", "--list", cwd=home)
    assert "voc2012_deeplabv3plus_xception65\n  cost: 120 epochs" in listed
    recipes = {name for name in RECIPES if not name.startswith("sweeps/")}
    assert listed.count("\n  cost: ") == listed.count("\n  expected") == len(recipes)
    voc = run(
        *(python, "-m", "segcal", "train", "--print_config"),
        *("--config", "voc2012_deeplabv3plus_xception65"),
        cwd=home,
    )
    assert "encoder: tu-xception65" in voc
    quick = ["--epochs", "1", "--data.limit", "64", "--out", "run", "--device", "cpu"]
    run(segcal_command, "train", "--config", "small/digits_resnet8", *quick, cwd=home)
    run(segcal_command, "eval", "run", "--limit", "32", "--workers", "0", cwd=home)
    report = segcal.Report.load(home / "run/eval-limit-32/report.json")
    assert report.protocol.images == 32 and report.protocol.version == segcal.__version__
    run(segcal_command, "report", "run/eval-limit-32/report.json", "--out", "page", cwd=home)
    page = (home / "page/report.html").read_text(encoding="utf-8")
    assert f"{SCORES['ece'].number(report.ece)} " in page and page.rstrip().endswith("</html>")


def test_a_sweep_from_its_dry_run_to_its_table(home):
    """A file of the user's, and one of the paper's by name."""
    segcal_command = home / "venv/bin/segcal"
    planned = run(segcal_command, "sweep", "paper/segmentation", "--small", "--dry-run", cwd=home)
    assert planned.startswith("10 trainings, 0 done; 12 reports to make\n")
    (home / "grid.yaml").write_text(
        "config: small/digits_resnet8\noptions: {epochs: 1, data.limit: 64, workers: 0}\n"
        "methods: [nll, {loss: fl+mdca, gamma: 3}]\nscores: [accuracy, ece]\n"
    )
    words = [segcal_command, "sweep", "grid.yaml", "--device", "cpu"]
    assert run(*words, "--dry-run", cwd=home).startswith("2 trainings, 0 done; 2 reports to make\n")
    assert not (home / "runs/sweep").exists()
    written = run(*words, cwd=home).splitlines()
    assert "runs/sweep/grid.html" in written
    table = (home / "runs/sweep/grid.md").read_text()
    assert "| fl+mdca / none | " in table and "–" not in table
