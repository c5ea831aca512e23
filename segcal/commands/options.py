"""How the commands read what was typed, and the options that several of them have.

Options are tables from what is typed to what it means; `add_options` reads them. This module and
the files of the commands import nothing heavy at their top, so that help and typing mistakes are
answered at once.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from segcal.posthoc import METHODS, method_names

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes raise a ValueError of one line, instead of usage and exit."""

    def __init__(self, prog: str, description: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=layout)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options; names may have hyphens or underscores, and stand before or after inputs."""
        words = list(arguments)
        end = words.index("--") if "--" in words else len(words)
        for i, word in enumerate(words[:end]):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                words[i] = name.replace("_", "-") + equals + value
        options = self.parse_intermixed_args(words)
        options.typed = shlex.join([*self.prog.split(), *arguments])
        return options

    def error(self, message: str) -> NoReturn:
        """Raise `message` with a pointer to the help."""
        raise ValueError(f"{message}; see {self.prog} --help")


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` as the type of an argument, whose ValueErrors keep their own words."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def at_least(low: int) -> Callable[[str], int]:
    """A whole number that is not below `low`."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < low:
            raise ValueError(f"{text} is no whole number of at least {low}")
        return int(text)

    return number


def size(text: str) -> tuple[int, int]:
    """HxW as (H, W)."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ValueError(f"{text} is no size HxW such as 480x640")
    return int(height), int(width)


def numbers(text: str) -> tuple[float, ...]:
    """Three numbers with commas between them."""
    found = tuple(float(word) for word in text.split(","))
    if len(found) != 3:
        raise ValueError(f"{text} must be three numbers, for red, green and blue")
    return found


def shard(text: str) -> tuple[int, int]:
    """K/N as (k, n), with k counted from 0."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{text} is no shard K/N such as 1/4, the first of four parts")
    return int(number) - 1, int(count)


def moved(text: str) -> tuple[Path, Path]:
    """DIR or OLD=DIR as (DIR, OLD)."""
    old, _, new = text.rpartition("=")
    return Path(new), Path(old or new)


def condition(text: str) -> Any:
    """A `Condition`."""
    from segcal.metrics.conditions import Condition  # loads torch

    return Condition.parse(text)


# What the word after an option is read as; other words are text.
KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("DIR", "ROOT", "RUN", "FILE", "FILE.md", "STATE", "REPORT"), Path),
    **dict.fromkeys(("A,B", "REGIONS", "PROTOCOLS", "TARGETS", "FILES", "miss=A"), names),
    **dict.fromkeys(("METHOD", "METHODS"), method_names),
    **dict.fromkeys(("F", "T", "SHARE"), float),
    "N": at_least(1),
    "COUNT": at_least(0),
    "LABEL": int,
    "HxW": size,
    "R,G,B": numbers,
    "K/N": shard,
    "OLD=DIR": moved,
    "CONDITION": condition,
}


def add_options(parser: argparse._ActionsContainer, table: Mapping[str, str]) -> None:
    """Add the options of a table: what is typed, and what it means.

    --open             is given or not
    --limit N          has one value, of the kind that `KINDS` says
    --num-bins N=15    has a default
    --pool a|b=a       is one of these words
    --model SPEC ...   has one value or more
    --shift SHIFTS *   has one value, and may be given several times
    """
    for typed, text in table.items():
        found = re.fullmatch(r"(\S+)(?: ([^\s=]+(?:=[A-Z]+)?)(?:=(\S+))?( \.\.\.| \*)?)?", typed)
        assert found is not None
        flag, word, default, many = found.groups()
        if word is None:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        kind = KINDS.get(word, str)
        more: dict[str, Any] = {"help": text, "type": checked(kind), "metavar": word}
        if "|" in word:
            more |= {"choices": word.split("|"), "metavar": None}
        if kind in (names, method_names):
            more["default"] = ()
        if default is not None:
            more |= {"default": kind(default), "help": f"{text}; default: {default}"}
        if many == " ...":
            more |= {"nargs": "+", "default": ()}
        elif many == " *":
            more |= {"action": "append", "default": []}
        parser.add_argument(flag, **more)


# The options of every command that computes with a network.
NETWORK = {
    "--weights best|last=best": "checkpoint of a run",
    "--device NAME=auto": "auto, cpu, cuda, cuda:1 or mps",
    "--batch-size N": "images per batch; default: as in training",
    "--workers COUNT=2": "processes that read images",
}
# How images become the input of a network by name.
INPUT = {
    "--input-size HxW": "resize images to this size",
    "--mean R,G,B": "of the channels, on a 0-1 scale",
    "--std R,G,B": "of the channels, on a 0-1 scale",
    "--outputs logits|probs|scores": "what the network gives, where that is not known: scores lie "
    "between 0 and 1 and need not sum to 1, and are divided by their sum",
    "--classes FILE": "YAML: new class: [classes of --model]",
    "--tile N": "run --model on tiles of N x N pixels",
    "--overlap COUNT=64": "pixels that tiles share",
    "--amp": "run --model in half precision",
}
# The data of a network by name.
DATA = {
    "--data NAME:ROOT[:SPLIT]": "data set of --model: voc2012, cityscapes, ade20k, camvid, acdc, "
    "coco_stuff, oxford_pet, masks (your own folders) and others; SPLIT is test, val or train",
    "--holdout NAME:ROOT[:SPLIT]": "data set that calibrators are fitted on",
    "--holdout-fraction F": "cut this share of the images off as hold-out, and evaluate the rest",
    "--group REGEX": "images whose names share what this finds belong together: frames of one "
    "video, slices of one patient",
    "--label-map FILE": "YAML: label of the data: class of --model",
    **INPUT,
}
# What files of saved predictions hold.
FORMAT = {
    "--format segcal|nnunet=segcal": "format of the files; nnunet: of nnUNetv2_predict "
    "--save_probabilities, with --labels",
    "--kind logits|probs|sigmoid_logits|sigmoid_probs": "content of the files, of a softmax or of "
    "K sigmoids; default: from the keys of .npz",
    "--layout chw|hwc": "order of the axes of an image; default: chw",
    "--axes xyz|zyx": "order of the axes of a volume's predictions",
}
MEMBERS = {
    "--ensemble": "all inputs are members of one ensemble: the mean of their probabilities",
    "--pool probs|logits=probs": "average the probabilities or the logits of the members",
    "--calibrate pooled|members=pooled": "fit --posthoc to the mean, or one method to each "
    "member (or view) before it",
}
_SIGMOID = ", ".join(name for name, method in METHODS.items() if method.multilabel)
POSTHOC = (
    f"none, {', '.join(f'{name} ({method.about})' for name, method in METHODS.items())}; "
    f"for sigmoid outputs: {_SIGMOID}"
)
PAGE = {"--open": "open the page in a browser"}
RESAMPLES = {"--resamples COUNT=1000": "resamples behind the 95 %% intervals; 0 for no intervals"}
UNITS = {  # `segcal.cli` reads it
    "--units paper|percent=paper": "print SCE and AURC in 1e-3 as papers do, or fractions in %%"
}


def typed(options: argparse.Namespace, taken_by: Callable[..., Any]) -> dict[str, Any]:
    """The options that were typed and that a function or class takes, by name."""
    given = {name: getattr(options, name, None) for name in signature(taken_by).parameters}
    nothing = (None, False, ())
    return {n: value for n, value in given.items() if not any(value is no for no in nothing)}


def network_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a network by name, for `segcal.open_source`."""
    from segcal.sources.named import open_network

    found = typed(options, open_network)
    found.pop("images", None)  # of saved predictions, or a folder to predict
    return found


def show(page: Path, *, browser: bool) -> None:
    """Print where a page is, and open it if asked."""
    print(f"report: {page}")
    if browser:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            print("there is no browser to open it")
