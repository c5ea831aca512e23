"""Conditions on scores, such as ece>0.05, at which an evaluation counts as failed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from segcal.metrics.report import Report
from segcal.metrics.scores import SCORES


@dataclass(frozen=True)
class Condition:
    """A score, < or >, and a limit: fractions, as in Python and in report.json."""

    score: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """The condition in a text such as ece>0.05 or coverage_at_risk_1<0.6."""
        known = [name for name, score in SCORES.items() if score.scope != "classes"]
        number = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
        found = re.fullmatch(rf"\s*(\w+)\s*([<>])\s*({number})\s*", text)
        if found is None or found[1] not in known:
            raise ValueError(
                f"{text!r} is no condition: write a score, < or >, and a fraction, such as "
                f"ece>0.05; the scores are {', '.join(known)}"
            )
        return cls(found[1], found[2], float(found[3]))

    def broken_by(self, report: Report) -> str:
        """Why the report fails, in one line; empty if it does not. An unknown score fails."""
        value, score = getattr(report, self.score), SCORES[self.score]
        if math.isnan(value):
            return f"{score.label} is not known"
        if not (value > self.limit if self.sign == ">" else value < self.limit):
            return ""
        more = "more" if self.sign == ">" else "less"
        return f"{score.label} is {score.text(value)}, {more} than {score.text(self.limit)}"
