"""What a training says while it runs."""

from types import SimpleNamespace

from segcal.training import log
from segcal.training.log import Progress


def test_without_a_terminal_there_is_a_line_every_half_minute(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    progress = Progress(100, 0, batch_size=4, shown=True)
    assert not progress.due
    now = 30.0
    assert progress.due
    progress.show(15, "1/2", {"loss": 0.5})
    assert capsys.readouterr().out == (
        "step 15/100 · epoch 1/2 · loss 0.5000 · 2 images/s · 02:50 left\n"
    )
    assert not progress.due
