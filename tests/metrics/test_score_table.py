"""The table of scores: complete, declared once, and read by everything that prints a score."""

import ast
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from segcal import CalibrationMeter, Report
from segcal.metrics.scores import LOGGED, SCORES, UNITS, Score, ScoreTable
from segcal.viz import tables
from segcal.viz.page import PageRow, render_page
from tests.support import ROOT
from tests.support.synthetic_reports import constant_report, synthetic_report

SURE = constant_report(0.9, 7)


def test_every_score_is_on_the_report():
    kept = synthetic_report(3, images=2, per_image=True)
    for name, score in SCORES.items():
        value = getattr(replace(kept, changed=1), name)
        assert score.name == name and getattr(Report, name) is score
        assert score.unit in UNITS and score.definition, name
        if score.scope == "classes":
            assert value.shape == (3,) and np.isfinite(value).all(), name
        else:
            assert type(value) is float and math.isfinite(value), name
        assert (name in kept.scores) == (score.scope == "pixels"), name


def test_scores_of_images_need_images():
    for name, score in SCORES.items():
        if score.scope == "images":
            assert math.isnan(getattr(synthetic_report(images=2), name))


def test_no_two_scores_print_alike():
    headings = [score.heading for score in SCORES.values()]
    assert len(set(headings)) == len(headings)
    places = [score.log for score in LOGGED]
    assert len(set(places)) == len(places)


def test_directions():
    """A calibrated network beats one that is less accurate, too sure here and too unsure there."""
    good = report_of_groups((0.995, 398, 400), (0.4, 20, 50))
    bad = report_of_groups((0.98, 100, 200), (0.45, 130, 200))
    wrong = []
    for name, score in SCORES.items():
        sign = {"higher": 1, "lower": -1, "neither": 0}[score.better]
        if score.scope == "calibrator":
            continue
        if sign and not np.all(sign * (getattr(good, name) - getattr(bad, name)) > 0):
            wrong.append(name)
    assert wrong == []


def report_of_groups(*groups):
    """The report of images of one pixel in 3 classes, by groups of (confidence, right, total)."""
    meter = CalibrationMeter(3, per_image=True)
    for confidence, right, total in groups:
        labels = torch.arange(total) % 3
        predicted = torch.where(torch.arange(total) < right, labels, (labels + 1) % 3)
        probs = torch.full((total, 3), (1 - confidence) / 2, dtype=torch.float64)
        probs[torch.arange(total), predicted] = confidence
        meter.update_probs(probs, labels)
    return meter.compute()


@pytest.mark.parametrize(
    ("name", "heading", "title", "number", "text", "brief"),
    [
        ("ece", "ECE (%)", "ECE", "12.35", "12.35 %", "12.35 %"),
        ("sce", "SCE (1e-3)", "SCE", "123.46", "123.46e-3", "123.46e-3"),
        ("accuracy", "accuracy (%)", "Accuracy", "12.35", "12.35 %", "12.3 %"),
        ("miou", "mIoU (%)", "mIoU", "12.35", "12.35 %", "12.35 %"),
        ("nll", "NLL (nats)", "NLL", "0.1235", "0.1235", "0.1235"),
        ("class_ece", "class-j-ECE (%)", "Class-j-ECE", "12.35", "12.35 %", "12.35 %"),
    ],
)
def test_printed_by_hand(name, heading, title, number, text, brief):
    score, value = SCORES[name], 0.123456
    assert (score.heading, score.title) == (heading, title)
    assert (score.number(value), score.text(value), score.brief(value)) == (number, text, brief)
    assert score.number(math.nan) == "–"


def test_log_line_by_hand():
    assert tables.describe_scores(SURE.scores) == (
        "accuracy 70.00 %, mIoU 35.00 %, NLL 0.7645, ECE 20.00 %, SCE 200.00e-3"
    )
    record = {"holdout/ece": 0.2, "holdout/nll": 0.5, "holdout/miou": None}
    assert tables.describe_scores(record, "holdout/") == "NLL 0.5000, ECE 20.00 %"


def test_a_new_score_is_one_entry(monkeypatch):
    """Report, report.json, tables, page and log follow the entry."""
    entry = Score(
        "doubt", "1e-3", lambda report: 1 - report.mean_confidence, "-", table=True, log=9
    )
    entry.__set_name__(ScoreTable, "doubt")
    monkeypatch.setattr(ScoreTable, "doubt", entry, raising=False)
    monkeypatch.setitem(SCORES, "doubt", entry)
    monkeypatch.setattr(tables, "LOGGED", (*LOGGED, entry))
    assert SURE.doubt == pytest.approx(0.1)
    assert json.loads(json.dumps(SURE.to_dict()))["scores"]["doubt"] == SURE.doubt
    assert "| doubt (1e-3) |" in tables.to_markdown({"a": SURE}).splitlines()[0]
    assert tables.to_csv({"a": SURE}).splitlines()[0].count("doubt (1e-3)") == 1
    page = re.sub(r"<.*?>", "", render_page([PageRow("a", SURE)]))
    assert "doubt (1e-3)" in page and "100.00" in page
    assert tables.describe_scores(SURE.scores).endswith(", doubt 100.00e-3")


# Units, scales and headings are declared nowhere else -----------------------------------------

SOURCES = [
    path
    for folder in ("segcal", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".html") and path != ROOT / "segcal/metrics/scores.py"
]
SCALES = {unit.scale for unit in UNITS.values()} - {1}


def declarations(path, text):
    """What in a source file gives a score a unit or a scale of its own."""
    if path.suffix == ".html":
        yield from (score.heading for score in SCORES.values() if score.heading in text)
        yield from re.findall(r"\b1000? \* \w[\w.]*", text)
        return
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                known = [*(score.heading for score in SCORES.values()), "(1e-3)"]
                yield from (heading for heading in known if heading in node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for factor, value in ((node.left, node.right), (node.right, node.left)):
                scaled = isinstance(factor, ast.Constant) and factor.value in SCALES
                if scaled and names_in(value) & set(SCORES):
                    yield ast.unparse(node)


def names_in(node):
    """The last name of an attribute or of a key: `report.ece`, `scores["ece"]`, `x.ece[c]`."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return {key} | names_in(node.value)
    return set()


def test_units_are_declared_once():
    found = {path: list(declarations(path, path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {str(path): several for path, several in found.items() if several} == {}


SECOND = [
    ('head = "| ECE (%) |"', ["ECE (%)"]),
    ('f"{name}: SCE (1e-3) of {x}"', ["SCE (1e-3)", "(1e-3)"]),
    ('f"{100 * report.ece:.2f} %"', ["100 * report.ece"]),
    ("values = scores['sce'] * 1e3", ["scores['sce'] * 1000.0"]),
    ("100 * first.class_ece[c]", ["100 * first.class_ece[c]"]),
    ('"confidence (%)", 100 * bins.confidence', []),
    ('def f():\n    """ECE (%)"""', []),
]


def test_a_second_declaration_is_found(tmp_path):
    for source, found in SECOND:
        assert list(declarations(tmp_path / "x.py", source)) == found
