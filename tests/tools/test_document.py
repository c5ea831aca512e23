"""The tables of docs/ that come from the code are up to date: `python tools/document.py`."""

import document

from tests.support import ROOT


def test_tables_are_those_of_the_code(tmp_path):
    for path, _ in document.TABLES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    document.write_tables(tmp_path)
    for path, mark in document.TABLES:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), mark


def test_every_score_has_a_row():
    lines = document.scores().splitlines()
    assert "| `ece` | ECE (%) | lower | " in "\n".join(lines)
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)
