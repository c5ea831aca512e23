"""What the entries of a dict of names declare: which options each takes, and words for the help."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any


def describe(about: Mapping[str, str]) -> str:
    """The names with what each of them is, for a help text; names of one kind share its words."""
    names: dict[str, list[str]] = {}
    for name, words in about.items():
        names.setdefault(words, []).append(name)
    return "; ".join(f"{', '.join(group)} ({words})" for words, group in names.items())


def unfit_option(config: Any, taken: Collection[str]) -> str | None:
    """The first option of a dataclass that is not at its default although it is not `taken`."""
    for field in fields(config):
        if field.name not in taken and getattr(config, field.name) != field.default:
            return field.name
    return None
