"""Names, shares and units that diagrams and tables read from reports."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from segcal.metrics import Report


def named(report: Report | Mapping[str, Report]) -> Mapping[str, Report]:
    """Reports by name; a single report gets the empty name.

    Raises:
        ValueError: there are no reports, or their classes differ.
    """
    reports = report if isinstance(report, Mapping) else {"": report}
    if not reports:
        raise ValueError("Expected at least one report, but got none")
    sizes = {each.protocol.num_classes for each in reports.values()}
    if len(sizes) > 1:
        raise ValueError(f"Expected reports of the same classes, but got {sorted(sizes)} classes")
    names = dict.fromkeys(each.class_names for each in reports.values() if each.class_names)
    if len(names) > 1:
        pairs = zip(*list(names)[:2], strict=True)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"Expected reports of the same classes, but got {one!r} and {other!r}")
    return reports


def class_names(report: Report) -> list[str]:
    """The K names of the classes; their numbers if the report has no names."""
    return list(report.class_names or map(str, range(report.protocol.num_classes)))


def worst_classes(report: Report, limit: int) -> list[int]:
    """The `limit` classes with the largest class-j-ECE, by number."""
    if limit < 1:
        raise ValueError(f"Expected limit to be at least 1, but got {limit}")
    order = np.argsort(-report.class_ece, kind="stable")[:limit]  # NaN comes last
    return sorted(int(c) for c in order)


def share(count: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B,) counts divided by their sum; zeros if all are zero."""
    return count / max(int(count.sum()), 1)


def counted(report: Report) -> str:
    """What is counted: "pixels", or "samples" where each image is one (classification)."""
    return "pixels" if report.protocol.pixels > report.protocol.images else "samples"
