"""The notebooks of docs/tutorials run from top to bottom, and what they show is up to date."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import ROOT

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    shown = [_kinds(cell) for cell in notebook.cells]
    assert any("image/png" in kinds for kinds in shown)  # the page has its pictures
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert [_kinds(cell) for cell in notebook.cells] == shown


def _kinds(cell):
    """What a cell shows: text, pictures; not which text, as training differs between machines."""
    return {
        kind
        for output in cell.get("outputs", [])
        for kind in output.get("data", {"text": 0})
        if output.get("name") != "stderr"
    }
