"""What all adapters share: a missing package is one line, and importing segcal loads none."""

import subprocess
import sys

import pytest
import torch

from segcal.integrations import at_labels, chosen_scores
from tests.support import ROOT

# The names of the adapters, of their packages and of their extras.
FRAMEWORKS = ["torchmetrics", "lightning", "transformers", "monai", "mmengine"]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_a_missing_package_is_one_line_that_names_the_extra():
    # None in sys.modules is how Python marks a module that cannot be imported.
    code = "import sys\n"
    for name in FRAMEWORKS:
        code += (
            f"sys.modules[{name!r}] = None\n"
            f"try: import segcal.integrations.{name}\n"
            "except ImportError as error: print(error)\n"
        )
    out = run(code)
    assert out.stdout.splitlines() == [
        f"{name} is not installed: pip install 'segcal[{name}]'" for name in FRAMEWORKS
    ], out.stderr


def test_frameworks_are_loaded_by_their_adapter_alone():
    out = run(
        "import sys, segcal.integrations, segcal.evaluation.evaluate, segcal.cli\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_scores_are_checked_by_name():
    assert chosen_scores(None) == ("accuracy", "miou", "nll", "ece", "sce")
    assert chosen_scores("ece") == ("ece",)
    assert chosen_scores(["image_ece", "brier"]) == ("image_ece", "brier")
    with pytest.raises(ValueError, match="no score 'class_ece'"):
        chosen_scores(["ece", "class_ece"])


@pytest.mark.parametrize(
    ("logits", "labels"),
    [((2, 3, 0, 4), (2, 4, 4)), ((2, 3, 1, 1, 1, 1), (2, 2, 2, 2, 2))],
)
def test_logits_that_do_not_fit_their_labels_are_one_line(logits, labels):
    with pytest.raises(ValueError, match="cannot be resized"):
        at_labels(torch.zeros(logits), torch.zeros(labels))


def test_logits_of_one_axis_are_resized():
    logits = torch.tensor([[[0.0, 4.0], [1.0, 1.0]]])  # (1, 2, 2)
    found = at_labels(logits, torch.zeros(1, 4))
    assert found[0, 0].tolist() == [0, 1, 3, 4] and found[0, 1].tolist() == [1] * 4
