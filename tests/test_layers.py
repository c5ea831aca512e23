"""Imports go only downward, between packages they name a module, and `import segcal` is light."""

import ast
import subprocess
import sys

import pytest

from segcal.metrics import sums
from segcal.metrics.counting import compiled
from tests.support import ROOT

# A module may import from its own layer and from those before it.
LAYERS = [
    {"__init__"},
    {"pixels", "distributed", "files", "registry", "runtime"},
    {"losses", "metrics"},
    {"posthoc"},
    {"viz", "data", "models"},
    {"training", "evaluation"},
    {"integrations", "run", "config"},
    {"sweep"},
    {"commands", "cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PACKAGES = {path.parent.name for path in (ROOT / "segcal").glob("*/__init__.py")}
SOURCES = sorted((ROOT / "segcal").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ABOVE = {"tools", "benchmarks", "reproduction"}  # of segcal; the last two lie in tools/


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """The dotted names that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def is_module(parts):
    """Whether segcal/viz/entry.py, or a package, is there for ["viz", "entry"]."""
    path = ROOT.joinpath("segcal", *parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def wrong_imports(part, names):
    """What a module in `part` of segcal must not import, and why."""
    for name in names:
        top, *rest = name.split(".")
        if top in ABOVE | {"tests"}:
            yield f"{name} is not part of the library"
        if top != "segcal" or not rest or rest[0] == "__version__":
            continue
        assert rest[0] in LEVEL, f"{name} is in no layer"
        if LEVEL[rest[0]] > LEVEL[part]:
            yield f"{name} is in a higher layer"
        sideways = rest[0] != part and LEVEL[rest[0]] == LEVEL[part] and rest[0] in PACKAGES
        if sideways and not (len(rest) > 1 and is_module(rest[:2])):
            yield f"{name} loads all of {rest[0]}: name a module of it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_downward(path):
    part = path.relative_to(ROOT / "segcal").parts[0].removesuffix(".py")
    assert part in LEVEL, f"{part} is in no layer"
    assert list(wrong_imports(part, imported(path))) == []


def test_wrong_imports_are_found():
    names = ["segcal.viz.Entry", "segcal.viz.entry.Entry", "segcal.models", "segcal.run.Run"]
    names += ["segcal.metrics.Report", "segcal.data.DataConfig", "tools.bench", "torch.nn"]
    assert list(wrong_imports("data", names)) == [
        "segcal.viz.Entry loads all of viz: name a module of it",
        "segcal.models loads all of models: name a module of it",
        "segcal.run.Run is in a higher layer",
        "tools.bench is not part of the library",
    ]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_segcal_itself_is_imported_for_its_version_alone(path):
    tree = ast.parse(path.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "segcal"
    }
    assert used <= {"__version__"}


@pytest.mark.parametrize("path", [*TOOLS, *TESTS], ids=name_of)
def test_no_test_module_is_imported(path):
    """What two tests need lies in tests/support."""
    wrong = [
        name
        for name in imported(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_test_skips_for_want_of_a_package(path):
    """The extra `dev` has them all."""
    calls = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    assert not names & {"importorskip", "find_spec", "skipif"}


def test_import_is_light():
    heavy = ["segmentation_models_pytorch", "timm", "albumentations", "matplotlib", "sklearn"]
    heavy += ["numba"]
    code = (
        "import sys, segcal; segcal.build_loss('fl+mdca'); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr


def test_evaluating_saved_predictions_needs_no_training():
    heavy = ["segcal.run", "segcal.training.trainer", "segcal.models.build", "jsonargparse"]
    heavy += ["segmentation_models_pytorch", "timm", "torchvision", "albumentations", "cv2"]
    heavy += ["sklearn", "scipy.stats", "scipy.optimize", "matplotlib.pyplot", "numba"]
    code = f"import sys, segcal.commands.evaluate; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr


# One name, one thing -----------------------------------------------------------------------------

SAME = {"log", "main"}  # the logger of a module, the function of a script
SAME |= {"add_arguments", "run"}  # what tools/bench.py calls of each benchmark
SAME |= {"CalibrationMetric"}  # what each framework calls a metric
SAME |= {n for n in vars(sums).keys() & vars(compiled) if n.isupper()}  # compiled code has its own


def public_names(path):
    """The classes, functions and constants that a module defines for others."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found = [node.name]
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            parts = [e for t in targets for e in getattr(t, "elts", [t])]
            found = [part.id for part in parts if isinstance(part, ast.Name)]
        yield from (name for name in found if not name.startswith("_"))


def test_no_name_is_defined_in_two_modules():
    where = {}
    for path in (*SOURCES, *TOOLS):
        for name in set(public_names(path)) - SAME:
            where.setdefault(name, []).append(name_of(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}
