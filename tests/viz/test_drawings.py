"""Every diagram of an evaluation is written, as PNG and as SVG, where its entry says."""

from segcal.viz import PageRow, write_figures
from tests.support.synthetic_reports import synthetic_report

GOOD, SHARP = synthetic_report(), synthetic_report(sharpness=3.0)
OWN = {
    *("reliability", "confidence_histogram", "wrong_confidence", "risk_coverage"),
    *("classwise_reliability", "gap_heatmap"),
}


def stems(paths, folder):
    """The stems of the files that lie in `folder`, each written as PNG and SVG."""
    inside = [path for path in paths if path.parent == folder]
    found = {path.stem for path in inside}
    assert {path.name for path in inside} == {f"{s}.{e}" for s in found for e in ("png", "svg")}
    return found


def test_figures_of_one_entry(tmp_path):
    log = [{"epoch": 1, "holdout/ece": 0.1, "holdout/sce": 0.01, "best": True}]
    written = write_figures([PageRow("one", GOOD, log)], tmp_path)
    assert stems(written, tmp_path) == OWN | {"convergence_ece", "convergence_sce"}
    assert sorted(written) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    starts = {".png": b"\x89PNG", ".svg": b"<?xml"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in written)


def test_figures_of_several_entries_go_to_folders_of_their_own(tmp_path):
    written = write_figures([PageRow("a/b", GOOD), PageRow("..", SHARP)], tmp_path / "f")
    folders = {path.parent.relative_to(tmp_path / "f").as_posix() for path in written}
    assert folders == {".", "a-b", "entry"}
    together = {"reliability", "confidence_histogram", "wrong_confidence", "risk_coverage"}
    assert stems(written, tmp_path / "f") == together
    for folder in ("a-b", "entry"):
        assert stems(written, tmp_path / "f" / folder) == OWN
