"""The place for what the command lines of segcal.commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are one line: a ValueError instead of usage and exit."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise ValueError(f"{message}; see {self.prog} --help")


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def at_least(low: int) -> Callable[[str], int]:
    """A whole number that is not below `low`."""

    def number(text: str) -> int:
        value = int(text) if text.lstrip("-").isdigit() else None
        if value is None or value < low:
            raise ValueError(f"expected a whole number of at least {low}, but got {text}")
        return value

    return checked(number)


def shard(text: str) -> tuple[int, int]:
    """K/N, the K-th of N parts, as (K - 1, N)."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"expected K/N such as 1/4, the first of four parts, but got {text}")
    return int(number) - 1, int(count)


def checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """`read` as the type of an argument: what it raises is said in its own words."""

    def value(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value
