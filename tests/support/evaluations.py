"""Quick evaluations from the command line: few resamples, and nothing drawn."""

import pytest

from segcal.evaluation import folder

QUICK = ["--resamples", "20", "--workers", "0", "--device", "cpu"]


def _write_text(entries, path, *, title, **_):
    path.write_text("\n".join([title, *(line for entry in entries for line in entry.skipped)]))


def draw_nothing(replace=setattr):
    """Leave out pages and figures, which take seconds; `replace` is setattr or monkeypatch's."""
    replace(folder, "write_figures", lambda *_, **__: None)
    replace(folder, "write_page", _write_text)


@pytest.fixture
def undrawn(monkeypatch):
    """`draw_nothing`, for one test."""
    draw_nothing(monkeypatch.setattr)
