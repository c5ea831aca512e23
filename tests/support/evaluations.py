"""Quick evaluations from the command line: few resamples, and nothing drawn."""

import pytest

from segcal.evaluation import results

QUICK = ["--resamples", "20", "--workers", "0", "--device", "cpu"]


@pytest.fixture
def undrawn(monkeypatch):
    """Pages and figures, which take seconds, are left out."""
    monkeypatch.setattr(results, "write_figures", lambda entries, folder, drawings: None)

    def write_page(entries, path, title, drawings):
        path.write_text("\n".join([title, *(line for entry in entries for line in entry.skipped)]))

    monkeypatch.setattr(results, "write_page", write_page)
