"""Reads command lines: one spelling of every option, and one line for every mistake.

Imports nothing heavy, so that `segcal COMMAND --help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, TypeVar

_T = TypeVar("_T")


def spell(arguments: Sequence[str], separator: Literal["-", "_"]) -> list[str]:
    """The arguments with `separator` between the words of every option's name.

    `--batch-size` and `--batch_size` become one. Values stay as they are, and so does everything
    after `--`.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    spelled = [_spell_option(word, separator) for word in arguments[:end]]
    return [*spelled, *arguments[end:]]


def _spell_option(word: str, separator: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', separator).replace('_', separator)}{equals}{value}"


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes raise a ValueError of one line, instead of usage and exit."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options; names may have hyphens or underscores, and stand before or after inputs."""
        return self.parse_intermixed_args(spell(arguments, "-"))

    def error(self, message: str) -> NoReturn:
        """Raise `message` with a pointer to the help."""
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


def size(text: str) -> tuple[int, int]:
    """HxW as (H, W)."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ValueError(f"expected HxW such as 480x640, but got {text}")
    return int(height), int(width)


def checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """`read` as the type of an argument, whose ValueErrors keep their own words."""

    def value(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value
