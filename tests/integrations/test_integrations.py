"""What all adapters share: a missing package is one line, and importing segcal loads none."""

import subprocess
import sys

import pytest

from segcal.integrations import chosen_scores
from tests.support import ROOT

MODULES = {
    "torchmetrics": ("torchmetrics", "torchmetrics"),
    "lightning": ("lightning", "lightning"),
    "transformers": ("transformers", "transformers"),
    "monai": ("monai", "monai"),
    "mmengine": ("mmengine", "mmengine"),
}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_a_missing_package_is_one_line_that_names_the_extra():
    # None in sys.modules is how Python marks a module that cannot be imported.
    code = "import sys\n"
    for module, (package, _) in MODULES.items():
        code += (
            f"sys.modules[{package!r}] = None\n"
            f"try: import segcal.integrations.{module}\n"
            "except ImportError as error: print(error)\n"
        )
    out = run(code)
    assert out.stdout.splitlines() == [
        f"Expected the package {package}, but it is not installed: pip install 'segcal[{extra}]'"
        for package, extra in MODULES.values()
    ], out.stderr


def test_frameworks_are_loaded_by_their_adapter_alone():
    out = run(
        "import sys, segcal.integrations, segcal.evaluation.evaluate, segcal.run\n"
        f"print([m for m in {list(MODULES)} if m in sys.modules])"
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_scores_are_checked_by_name():
    assert chosen_scores(None) == ("accuracy", "miou", "nll", "ece", "sce")
    assert chosen_scores("ece") == ("ece",)
    assert chosen_scores(["image_ece", "brier"]) == ("image_ece", "brier")
    with pytest.raises(ValueError, match="Expected scores among accuracy, .* but got 'class_ece'"):
        chosen_scores(["ece", "class_ece"])
