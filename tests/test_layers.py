"""Imports go only downward, and `import segcal` stays light."""

import ast
import subprocess
import sys

import pytest

from tests.support import ROOT

# A module may import from its own layer and from those before it.
LAYERS = [
    {"pixels", "distributed", "files", "runtime"},
    {"losses", "metrics"},
    {"posthoc"},
    {"viz", "data", "models"},
    {"training", "evaluation"},
    {"config", "run", "commands", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(
    path
    for path in (ROOT / "segcal").rglob("*.py")
    if path not in (ROOT / "segcal/__init__.py", ROOT / "segcal/__main__.py")
)


def imported(path):
    """The top-level parts of segcal that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import in line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(("segcal.", "tools.")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path):
    part = path.relative_to(ROOT / "segcal").parts[0].removesuffix(".py")
    assert part in LEVEL, f"{part} is in no layer"
    above = {name for name in imported(path) if LEVEL.get(name, -1) > LEVEL[part]}
    assert not above, f"{path} imports {above} from a higher layer"


def test_import_is_light():
    heavy = ["segmentation_models_pytorch", "timm", "albumentations", "matplotlib", "sklearn"]
    code = (
        "import sys, segcal; segcal.build_loss('fl+mdca'); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr
