"""Imports go only downward, and `import segcal` is light."""

import ast
import subprocess
import sys

from tests.support import ROOT

# A module imports from its own layer's package and from the layers before it.
LAYERS = [
    {"pixels", "distributed", "files", "settings"},
    {"losses", "metrics"},
    {"posthoc"},
    {"viz", "data", "models"},
    {"sources"},
    {"evaluation"},
    {"training", "integrations"},
    {"sweep"},
    {"commands", "cli"},
    {"__init__", "__main__"},  # the names of the package, and the program
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted((ROOT / "segcal").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def imported(path):
    """The dotted names that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong_imports(part, names):
    """What a module in `part` of segcal must not import, and why."""
    for name in names:
        top, *rest = name.split(".")
        if top in ("tools", "benchmarks", "reproduction", "tests"):
            yield f"{name} is not part of the library"
        elif top == "segcal" and rest and rest[0] in LEVEL and rest[0] != part:
            if LEVEL[rest[0]] > LEVEL[part]:
                yield f"{name} is in a higher layer"
            elif LEVEL[rest[0]] == LEVEL[part] and len(rest) < 3 and part not in LAYERS[0]:
                yield f"{name} is of the same layer: name the module that it is in"


def test_imports_go_downward():
    parts = {
        path: path.relative_to(ROOT / "segcal").parts[0].removesuffix(".py") for path in SOURCES
    }
    assert {part for part in parts.values() if part not in LEVEL} == set()
    wrong = {str(path): list(wrong_imports(part, imported(path))) for path, part in parts.items()}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_wrong_imports_are_found():
    names = ["segcal.viz.plots.draw", "segcal.models.build", "segcal.training.run.train_run"]
    names += ["segcal.metrics.Report", "segcal.data.DataConfig", "tools.bench", "torch.nn"]
    assert list(wrong_imports("data", names)) == [
        "segcal.models.build is of the same layer: name the module that it is in",
        "segcal.training.run.train_run is in a higher layer",
        "tools.bench is not part of the library",
    ]


def test_what_tests_share_is_in_tests_support():
    files = [*TESTS, *(ROOT / "tools").rglob("*.py")]
    wrong = [
        f"{path}: {name}"
        for path in files
        for name in imported(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert wrong == []


def test_no_test_skips_for_want_of_a_package():
    """The extra `dev` has them all; W&B and MLflow may have been left out, as they are large."""
    wrong = []
    for path in TESTS:
        if path.name == "test_trackers.py":
            continue
        calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        wrong += [f"{path}: {name}" for name in names & {"importorskip", "find_spec", "skipif"}]
    assert wrong == []


def test_commands_compute_nothing():
    """What a command does, a Python call does: no command touches a tensor or an array."""
    files = sorted((ROOT / "segcal" / "commands").glob("*.py"))
    tops = {path.name: {name.partition(".")[0] for name in imported(path)} for path in files}
    wrong = {name: found & {"torch", "numpy", "scipy"} for name, found in tops.items()}
    assert len(files) > 5 and {name: found for name, found in wrong.items() if found} == {}


TRICKS = {"fork", "forkpty", "_exit", "umask", "setsid", "setpgid", "setpgrp", "killpg"}
TRICKS |= {"preexec_fn", "start_new_session", "process_group"}
# Of torchrun, of the trackers, and what torch asks for in deterministic trainings.
VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"}
VARIABLES |= {"CUBLAS_WORKSPACE_CONFIG"}


def process_tricks(code):
    """What code uses of `TRICKS`, and environment variables that are none of `VARIABLES`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            yield from {node.attr} & {*TRICKS, "getenv", "putenv"}
        elif isinstance(node, ast.keyword) and node.arg in TRICKS:
            yield node.arg
        elif isinstance(node, ast.Call) and "os.environ" in ast.unparse(node.func):
            yield from {ast.literal_eval(node.args[0])} - VARIABLES
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            yield from {ast.unparse(node.slice).strip("'")} - VARIABLES
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from {alias.name for alias in node.names} & {*TRICKS, "environ", "getenv"}
        elif isinstance(node, ast.Constant) and node.value in ("fork", "forkserver"):
            yield f"start method {node.value}"


def test_no_process_tricks_and_no_hidden_variables():
    files = [*SOURCES, *(ROOT / "tools").rglob("*.py")]
    wrong = {str(path): list(process_tricks(path.read_text())) for path in files}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_process_tricks_are_found():
    code = "from os import fork\nos._exit(0)\nrun(x, start_new_session=True)\nos.environ['A']\n"
    code += "os.environ.get('B')\nos.environ.get('RANK')\nget_context('fork')\nos.getenv('RANK')"
    found = {"fork", "_exit", "start_new_session", "A", "B", "start method fork", "getenv"}
    assert set(process_tricks(code)) == found


def loaded(code, names):
    """Those of `names` that Python has loaded after `code`."""
    code += f"; import sys; print(*[m for m in {names} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return out.stdout.split()


TRAIN = ["segmentation_models_pytorch", "timm", "torchvision", "albumentations", "cv2", "sklearn"]


def test_the_library_loads_what_is_used():
    assert loaded("import segcal", ["torch", "numpy", "matplotlib", "numba"]) == []
    heavy = ["matplotlib", "numba", "bokeh", "scipy.stats", *TRAIN]
    assert loaded("import segcal; segcal.build_loss('fl+mdca')", heavy) == []


def test_evaluating_needs_no_training_environment():
    code = (
        "import segcal.evaluation.evaluate, segcal.commands.eval, segcal.viz.page, segcal.sources"
    )
    assert loaded(code, [*TRAIN, "segcal.training", "segcal.sweep"]) == []


def test_help_needs_no_torch():
    for command in ("eval", "train", "sweep", "compare"):
        code = (
            f"from segcal.cli import main\ntry:\n    main(['{command}', '--help'])\n"
            "except SystemExit:\n    pass\nimport sys; print('torch' in sys.modules)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert out.stdout.split()[-1] == "False", (command, out.stderr)
