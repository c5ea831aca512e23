"""Regions of an image to evaluate separately: boundaries, interiors, groups of classes.

A region is a function from labels to a mask of the pixels that a meter counts; see
`segcal.metrics.update_together`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

Region = Callable[[Tensor], Tensor]  # (N, *S) labels, or (N, K, *S) of sigmoids -> the same, bool
REGIONS = {
    "boundary:W": "pixels with another label within W rows and columns (and slices)",
    "interior:W": "all other pixels",
    "classes:A+B": "pixels whose label is one of these numbers",
    "foreground": "all pixels but those of class 0",
}


def boundary(width: int = 3) -> Region:
    """The band of `width` pixels on both sides of every label edge.

    A pixel belongs to it if another label occurs within `width` rows and columns, and slices of a
    volume. The ignore index counts as a label here, because VOC ignores a rim around every object.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be an integer >= 1, but it is {width!r}")

    def near_an_edge(labels: Tensor) -> Tensor:
        if labels.ndim not in (3, 4):
            raise ValueError(
                f"Expected labels of shape (N, H, W) or (N, D, H, W), but got {tuple(labels.shape)}"
            )
        values = labels.float()  # exact for labels below 2**24
        reach = min(width, max(labels.shape[1:]))  # a wider window holds no more
        return _window_max(values, reach) != -_window_max(-values, reach)

    return near_an_edge


def interior(width: int = 3) -> Region:
    """All pixels outside `boundary(width)`."""
    edges = boundary(width)
    return lambda labels: ~edges(labels)


def class_group(classes: Iterable[int]) -> Region:
    """The pixels whose label is one of `classes`."""
    group = sorted(set(classes))
    if not group:
        raise ValueError("Expected at least one class in a group, but got none")
    return lambda labels: torch.isin(labels, torch.tensor(group, device=labels.device))


def named_regions(
    names: Iterable[str], num_classes: int, *, multilabel: bool = False
) -> dict[str, Region]:
    """The regions with names such as boundary:3, interior:3 and classes:1+2, by name.

    Of K sigmoid outputs, boundary and interior follow each class's own labels, classes are the
    decisions of these classes, and foreground is where any class is present.
    """

    def of_each_class(region: Region) -> Region:
        return lambda labels: region(labels.flatten(0, 1)).view_as(labels)  # (N, K, *S)

    def any_present(labels: Tensor) -> Tensor:
        return (labels == 1).any(1, keepdim=True).expand_as(labels)

    def decisions_of(group: list[int]) -> Region:
        return lambda labels: torch.zeros_like(labels, dtype=torch.bool).index_fill(
            1, torch.tensor(group, device=labels.device), True
        )

    regions: dict[str, Region] = {}
    for name in names:
        kind, _, value = name.partition(":")
        numbers = [int(number) if number.isdecimal() else -1 for number in value.split("+")]
        if kind in ("boundary", "interior") and len(numbers) == 1 and numbers[0] >= 1:
            region = (boundary if kind == "boundary" else interior)(numbers[0])
            regions[name] = of_each_class(region) if multilabel else region
        elif kind == "classes" and all(0 <= number < num_classes for number in numbers):
            regions[name] = decisions_of(numbers) if multilabel else class_group(numbers)
        elif name == "foreground":
            regions[name] = any_present if multilabel else lambda labels: labels != 0
        else:
            raise ValueError(
                f"Expected regions such as {', '.join(REGIONS)} with a width W of at least 1 and "
                f"classes below {num_classes}, but got {name!r}"
            )
    return regions


def classes_outside(region: str, num_classes: int) -> list[int]:
    """The classes that no label in a region of `REGIONS` has: there they are only predicted.

    They are no classes of the region, and their IoU and Dice, which would be 0, do not count.
    """
    kind, _, value = region.partition(":")
    if region == "foreground":
        return [0]
    if kind != "classes":
        return []
    inside = value.split("+")
    return [c for c in range(num_classes) if str(c) not in inside]


def _window_max(values: Tensor, width: int) -> Tensor:
    """The largest value within `width` of each element, one axis after the other for speed."""
    for axis in range(1, values.ndim):
        lines = values.movedim(axis, -1)
        pooled = max_pool1d(lines.flatten(1, -2), 2 * width + 1, stride=1, padding=width)
        values = pooled.view(lines.shape).movedim(-1, axis)
    return values
