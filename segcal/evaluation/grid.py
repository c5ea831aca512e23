"""The place for the table of the paper that sets train-time against post-hoc calibration."""

from __future__ import annotations

from collections.abc import Mapping

from segcal.metrics import Report

_SCORES = (("sce", "SCE (1e-3)", 1000), ("ece", "ECE (%)", 100))


def posthoc_markdown(reports: Mapping[tuple[str, str], Report]) -> str:
    """A Markdown table, one row a network, one column a post-hoc method, for SCE and for ECE.

    The best method of each row is in bold, if any is better as printed.

    Args:
        reports: by (name of the network, short name of the method).
    """
    runs = list(dict.fromkeys(run for run, _ in reports))
    methods = list(dict.fromkeys(method for _, method in reports))
    headings = [f"{head} {method}" for _, head, _ in _SCORES for method in methods]
    lines = ["| model | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
    for run in runs:
        cells: list[str] = []
        for score, _, scale in _SCORES:
            texts = [_text(reports.get((run, method)), score, scale) for method in methods]
            known = [float(text) for text in texts if text != "–"]
            best = min(known) if len(set(known)) > 1 else None
            cells += [f"**{t}**" if t != "–" and float(t) == best else t for t in texts]
        name = " ".join(run.split()).replace("|", "\\|")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _text(report: Report | None, score: str, scale: float) -> str:
    return "–" if report is None else f"{getattr(report, score) * scale:.2f}"
