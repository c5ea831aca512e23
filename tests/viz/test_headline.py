"""What is said of several networks, such as those of `make demo`, is what their numbers say."""

import re
from statistics import fmean

import numpy as np
import pytest

from segcal.viz import PageRow
from segcal.viz.page import headline
from tests.support.synthetic_reports import synthetic_report

SHIFTS = ("fog:3", "contrast:3")


@pytest.mark.parametrize("seed", range(5))
def test_the_summary_of_a_comparison_is_true_whichever_network_is_best(seed):
    sharpness = np.random.default_rng(seed).uniform(0.5, 3, (4, 3))
    rows = []
    for name, (clean, *shifted) in zip(("a", "a + TS", "b", "b + TS"), sharpness, strict=True):
        reports = [synthetic_report(sharpness=s, images=2, side=16, seed=seed) for s in shifted]
        report = synthetic_report(sharpness=clean, images=2, side=16, seed=seed)
        rows.append(PageRow(name, report, shifts=dict(zip(SHIFTS, reports, strict=True))))
    text = "".join(phrase.text for phrase in headline(rows)).replace("\u00a0", " ")
    clean = {row.name: 100 * row.report.ece for row in rows}
    means = {row.name: 100 * fmean(r.ece for r in row.shifts.values()) for row in rows}
    for pattern, of, chosen in (
        (r"^(.+?) has the lowest ECE, ([\d.]+) %", clean, min),
        (r"The ECE of (.+?) is the highest, ([\d.]+) %", clean, max),
        (r"Under 2 shifts (.+?) has the lowest mean ECE, ([\d.]+) %", means, min),
    ):
        ((name, value),) = re.findall(pattern, text)
        assert name == chosen(of, key=of.__getitem__)
        assert float(value) == pytest.approx(of[name], abs=0.0051)
