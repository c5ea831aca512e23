"""What the entries of a dict of names declare: which options each takes, and words for the help."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any


def describe(entries: Mapping[str, Any]) -> str:
    """The names with what each is `about`, for a help text; names of one kind share the words."""
    names: dict[str, list[str]] = {}
    for name, entry in entries.items():
        names.setdefault(entry.about, []).append(name)
    return "; ".join(f"{', '.join(group)} ({words})" for words, group in names.items())


def unfit_option(config: Any, taken: Collection[str]) -> str | None:
    """The first option of a dataclass that is not at its default although it is not `taken`."""
    for field in fields(config):
        if field.name not in taken and getattr(config, field.name) != field.default:
            return field.name
    return None
