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

pytestmark = pytest.mark.slow
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
    for name in ("segcal", "configs", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
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
    quick = ["--epochs", "1", "--data.limit", "64", "--out", "run", "--device", "cpu"]
    assert "train" in run(segcal_command, "--help", cwd=home)
    run(segcal_command, "train", "--config", "demo", *quick, cwd=home)
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
    assert planned.startswith("10 trainings, 0 done\n")
    (home / "grid.yaml").write_text(
        "config: small/digits_resnet8\noptions: {epochs: 1, data.limit: 64, workers: 0}\n"
        "methods: [nll, {loss: fl+mdca, gamma: 3}]\nscores: [accuracy, ece]\n"
    )
    words = [segcal_command, "sweep", "grid.yaml", "--device", "cpu"]
    assert run(*words, "--dry-run", cwd=home).startswith("2 trainings, 0 done\n")
    assert not (home / "runs/sweep").exists()
    written = run(*words, cwd=home).splitlines()
    assert "runs/sweep/grid.html" in written
    table = (home / "runs/sweep/grid.md").read_text()
    assert "| fl+mdca / none | " in table and "–" not in table


# Runs when Python starts, and hides packages.
HIDE = """
import sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in HIDDEN:
            return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
HIDDEN = {
    *("torchvision", "segmentation_models_pytorch", "timm", "cv2", "sklearn", "albumentations"),
    *("tensorboard", "onnx", "onnxruntime", "onnxscript", "pytorch_grad_cam", "torchmetrics"),
    *("lightning", "transformers", "accelerate", "monai", "ignite", "mmengine", "nibabel"),
    *("nnunetv2", "ray", "pytest", "jsonargparse", "pandas", "huggingface_hub"),
}
SESSION = """
import numpy as np, torch, segcal
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES
from segcal.posthoc import METHODS

torch.manual_seed(0)
labels = torch.randint(3, (4, 16, 16))
logits = 3 * torch.nn.functional.one_hot(labels, 3).movedim(-1, 1) + torch.randn(4, 3, 16, 16)
for spec in (*BASE_LOSSES, *(f"nll+{name}" for name in AUXILIARY_LOSSES)):
    assert segcal.build_loss(spec)(logits, labels).isfinite(), spec
meter = segcal.CalibrationMeter(num_classes=3)
meter.update(logits, labels)
loader = [(logits, labels)]
assert segcal.evaluate(torch.nn.Identity(), loader, num_classes=3).ece == meter.compute().ece
for part in ("holdout", "test"):
    import pathlib
    pathlib.Path(part).mkdir()
    for i in range(4):
        image = np.zeros((16, 16, 3), np.uint8)
        np.savez(f"{part}/{i}.npz", logits=logits[i], labels=labels[i], image=image)
open_source = segcal.open_source
result = segcal.evaluate_source(
    open_source("test"), holdout=open_source("holdout"), posthoc=tuple(METHODS)
)
assert result.methods == ["none", *METHODS]
print(result.save("results"))
"""


@pytest.fixture(scope="module")
def bare(home):
    """The same environment, which sees none of the packages of any extra."""
    (place,) = (home / "venv").glob("lib/python*/site-packages")
    (place / "sitecustomize.py").write_text(f"HIDDEN = {HIDDEN}\n{HIDE}")
    yield home
    (place / "sitecustomize.py").unlink()


def test_the_core_needs_no_package_of_an_extra(bare):
    """Losses, counting, every calibrator, saved predictions, any module, and the page."""
    page = run(bare / "venv/bin/python", "-W", "ignore", "-c", SESSION, cwd=bare).strip()
    assert (bare / page).read_text(encoding="utf-8").rstrip().endswith("</html>")
    command = [bare / "venv/bin/segcal", "eval", "--predictions", "test"]
    out = run(*command, "--fit-predictions", "holdout", "--posthoc", "ts", cwd=bare)
    assert "report: test/eval/report.html" in out


def test_training_without_its_extra_says_in_one_line_what_to_install(bare):
    command = [str(bare / "venv/bin/segcal"), "train", "--device", "cpu"]
    done = subprocess.run(command, cwd=bare, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'segcal[train]'" in done.stderr
