"""A report is frozen, survives its file exactly, and holds what its diagrams show."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from segcal import CalibrationMeter, Report
from segcal.metrics.scores import SCORES

K = 4


def report_of(seed=0, k=K, **settings):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, k, 12, 9, generator=generator)
    labels = torch.randint(0, k - 1, (5, 12, 9), generator=generator)  # the last never occurs
    logits[:, -1] -= 100  # and is never predicted
    labels[:, :2] = 255
    meter = CalibrationMeter(k, **settings)
    meter.update(logits, labels, names=[f"image {i}" for i in range(5)])
    return meter.compute()


@pytest.mark.parametrize("per_image", [False, True])
def test_file_round_trip_is_exact(tmp_path, per_image):
    part = report_of(1, per_image=per_image)
    report = report_of(per_image=per_image, class_names=["a", "b", "ç", "d"])
    report = dataclasses.replace(report, regions={"boundary": part})
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert loaded == report
    assert loaded.to_dict() == report.to_dict()
    assert loaded.scores == report.scores
    assert loaded.intervals == report.intervals
    assert loaded.worst_images == report.worst_images
    assert loaded.regions["boundary"] == part
    for a, b in zip(loaded.classes.sums, report.classes.sums, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert loaded.protocol == report.protocol


def test_undefined_scores_survive(tmp_path):
    report = CalibrationMeter(3, per_image=True).compute()
    assert np.isnan(report.ece) and np.isnan(report.image_ece)
    report.save(tmp_path / "empty.json")
    assert "NaN" not in (tmp_path / "empty.json").read_text()
    assert Report.load(tmp_path / "empty.json") == report
    assert np.isnan(report_of().class_iou[-1])


def test_file_has_scores_and_protocol_for_readers(tmp_path):
    report = report_of()
    report.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["scores"]["ece"] == report.ece
    assert data["class_scores"]["ece"] == report.class_ece.tolist()
    protocol = data["protocol"]
    assert (protocol["num_bins"], protocol["edge_rule"]) == (15, "right")
    assert (protocol["ignore_index"], protocol["average"]) == (255, "pixel")
    assert (protocol["images"], protocol["pixels"]) == (5, 5 * 10 * 9)
    assert protocol["region"] == "all" and protocol["version"]


def test_frozen():
    report = report_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.nll_sum = 0.0
    for array in (report.confusion, report.top.count, report.classes.hits, report.fine.wrong):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_reports_differ_where_their_numbers_do():
    assert report_of() == report_of()
    assert report_of() != report_of(1)
    assert report_of() != report_of(edge_rule="left")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.update(format="other"), "format 'segcal-report'"),
        (lambda d: d.update(format_version=99), "format_version 1, but got 99"),
        (lambda d: d.pop("top"), "complete report"),
        (lambda d: d["protocol"].update(num_bins="many"), "complete report"),
        (lambda d: d["fine"].update(wrong="few"), "bad.json"),
        (lambda d: d["top"]["count"].pop(), "top tables of"),
        (lambda d: d["confusion"].pop(), "confusion tables of"),
    ],
)
def test_bad_files_are_named(tmp_path, spoil, message):
    data = report_of().to_dict()
    spoil(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        Report.load(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_files_that_are_no_report(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad.json"):
        Report.load(path)


def test_tables_are_reliability_diagrams():
    report = report_of()
    filled = report.top.count > 0
    assert np.all(report.top.confidence[filled] > report.top.edges[:-1][filled])
    assert np.all(report.top.confidence[filled] <= report.top.edges[1:][filled])
    assert np.isnan(report.top.accuracy[~filled]).all()
    one = report.classes[2]
    assert np.array_equal(one.count, report.classes.count[2])
    assert report.classes.count.sum(1).tolist() == [report.protocol.pixels] * K


@pytest.mark.parametrize("name", ["edges", "correct", "wrong"])
def test_fine_histogram_by_class_of_another_size_is_refused(name):
    data = report_of().to_dict()
    data["class_fine"][name] = data["class_fine"][name][1:]
    with pytest.raises(ValueError, match="class_fine tables of"):
        Report.from_dict(data)


def test_fine_histogram_holds_all_predictions():
    report = report_of()
    fine = report.fine
    assert np.all(np.diff(fine.edges) > 0) and (fine.edges[0], fine.edges[-1]) == (0, 1)
    assert fine.correct.sum() == report.top.hits.sum()
    assert fine.wrong.sum() == (report.top.count - report.top.hits).sum()
    assert fine.confidence_sum.sum() == pytest.approx(report.top.confidence_sum.sum())
    count = fine.correct + fine.wrong
    mean = fine.confidence_sum[count > 0] / count[count > 0]
    assert np.all((mean > fine.edges[:-1][count > 0]) & (mean <= fine.edges[1:][count > 0]))


def test_a_notebook_shows_scores_and_protocol():
    report = report_of(per_image=True)
    page = report._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") > 5
    assert f"<th>ECE (%)</th><td>{SCORES['ece'].number(report.ece)}</td>" in page
    assert SCORES["ece"].number(report.intervals["ece"].low) in page and "450 pixels" in page
    assert f"ECE {SCORES['ece'].text(report.ece)}" in repr(report) and "array" not in repr(report)
