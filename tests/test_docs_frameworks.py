"""The lines of docs/frameworks.md run as they stand, against the real packages."""

import re

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.utils import import_modules_from_strings

from tests.support import ROOT
from tests.support.framework_batches import CLASSES, assert_same, batches, report_of

TEXT = (ROOT / "docs" / "frameworks.md").read_text()
EXAMPLES = {
    section.partition("\n")[0]: section.split("```python\n")[1].partition("```")[0]
    for section in TEXT.split("\n## ")[1:]
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Executes the example of a framework; its names."""
    monkeypatch.chdir(tmp_path)
    ((logits, labels),) = batches(1)
    names = {"logits": logits, "labels": labels, "model": torch.nn.Identity()}
    names["loader"] = [(logits, labels)]
    names["train_dataset"] = names["eval_dataset"] = list(zip(logits, labels, strict=True))

    def execute(framework):
        exec(EXAMPLES[framework], names)
        return names

    return execute


def test_every_row_of_the_table_has_an_example():
    linked = re.findall(r"^\| \[.+?\]\(#(.+?)\)", TEXT, flags=re.M)
    assert linked == [name.lower() for name in EXAMPLES]


def test_nnunet_is_named_where_it_is_missing(run):
    with pytest.raises(ImportError, match=r"pip install 'segcal\[nnunet\]'"):
        run("nnU-Net")


def test_pytorch(run):
    names = run("PyTorch")
    assert_same(names["report"], report_of(names["loader"]))


def test_torchmetrics(run):
    names = run("torchmetrics")
    assert float(names["metric"].compute()["ece"]) == pytest.approx(report_of(names["loader"]).ece)


def test_lightning(run):
    names = run("Lightning")
    assert any(type(c).__name__ == "CalibrationCallback" for c in names["trainer"].callbacks)


def test_transformers(run):
    assert run("Transformers")["trainer"].compute_loss_func.criterion.spec == "fl+mdca"


def test_monai(run):
    names = run("MONAI")
    assert names["metric"].aggregate()["ece"] == pytest.approx(report_of(names["loader"]).ece)
    assert list(names["key_val_metric"]) == ["ece"]


def test_mmsegmentation(run):
    names = run("mmsegmentation")
    import_modules_from_strings(**names["custom_imports"])  # as a Runner does
    (metric,) = Evaluator(names["val_evaluator"]).metrics
    assert metric.options["num_classes"] == CLASSES
