"""How the commands read what was typed, and the options that several of them have.

This module and the files of the commands import nothing heavy at their top, so that help and
typing mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
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

    return checked(number)


def add_network(parser: argparse._ActionsContainer) -> None:
    """The options of every command that computes with the network of a run."""
    add = parser.add_argument
    add("--weights", choices=("best", "last"), default="best", help="checkpoint; default: best")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps; default: auto")
    add("--batch-size", type=at_least(1), help="images per batch; default: as in training")
    add("--workers", type=at_least(0), default=2, help="processes that read images; default: 2")


def add_data(parser: argparse._ActionsContainer) -> None:
    """The options of a network by name: its data, and how images become its input."""
    add = parser.add_argument
    data = "NAME:ROOT[:SPLIT]"
    add(
        "--data",
        metavar=data,
        help="data set to evaluate --model on: voc2012, cityscapes, ade20k, camvid, acdc, "
        "coco_stuff, oxford_pet, masks (your own folders) and others; SPLIT is test, val or train",
    )
    add("--holdout", metavar=data, help="data set that calibrators are fitted on")
    add(
        "--holdout-fraction",
        type=float,
        metavar="F",
        help="cut this share of the images off as hold-out, and evaluate the rest",
    )
    add(
        "--group",
        metavar="REGEX",
        help="images whose names share what this finds belong together: frames of one video, "
        "slices of one patient",
    )
    add("--label-map", type=Path, metavar="FILE", help="YAML: label of the data: class of --model")
    add_input(parser)


def add_input(parser: argparse._ActionsContainer) -> None:
    """The options of a network by name that say how images become its input."""
    add = parser.add_argument
    add("--input-size", type=checked(size), metavar="HxW", help="resize images to this size")
    add("--mean", type=checked(numbers), metavar="R,G,B", help="of the channels, on a 0-1 scale")
    add("--std", type=checked(numbers), metavar="R,G,B", help="of the channels, on a 0-1 scale")
    add(
        "--outputs",
        choices=("logits", "probs", "scores"),
        help="what the network gives, where that is not known: scores lie between 0 and 1 and need "
        "not sum to 1, and are divided by their sum",
    )
    add("--classes", type=Path, metavar="FILE", help="YAML: new class: [classes of --model]")
    add("--tile", type=at_least(16), metavar="N", help="run --model on tiles of N x N pixels")
    add("--overlap", type=at_least(0), default=64, help="pixels that tiles share; default: 64")
    add("--amp", action="store_true", help="run --model in half precision")


def add_format(parser: argparse._ActionsContainer) -> None:
    """The options that say what files of saved predictions hold."""
    add = parser.add_argument
    add(
        "--kind",
        choices=("logits", "probs", "sigmoid_logits", "sigmoid_probs"),
        help="content of the files, of a softmax or of K sigmoids; default: from the keys of .npz",
    )
    add("--layout", choices=("chw", "hwc"), help="order of the axes of an image; default: chw")
    add("--axes", choices=("xyz", "zyx"), help="order of the axes of a volume's predictions")


def typed(options: argparse.Namespace, taken_by: Callable[..., Any]) -> dict[str, Any]:
    """The options that were typed and that a function or class takes, by name."""
    names = signature(taken_by).parameters
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def network_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a network by name, for `segcal.open_source`."""
    from segcal.sources.named import open_network

    found = typed(options, open_network)
    found.pop("images", None)  # of saved predictions, or a folder to predict
    return found


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


def add_members(parser: argparse._ActionsContainer) -> None:
    """The options of ensembles and of views of a network."""
    add = parser.add_argument
    add(
        "--ensemble",
        action="store_true",
        help="all inputs are members of one ensemble: the mean of their probabilities is evaluated",
    )
    add(
        "--pool",
        choices=("probs", "logits"),
        default="probs",
        help="what members are the mean of; default: probs",
    )
    add(
        "--calibrate",
        choices=("pooled", "members"),
        default="pooled",
        help="fit --posthoc to the ensemble, or one method to each member before the mean",
    )


def add_posthoc(parser: argparse._ActionsContainer, metavar: str, what: str) -> None:
    """The option --posthoc."""
    known = ", ".join(f"{name} ({method.about})" for name, method in METHODS.items())
    sigmoid = ", ".join(name for name, method in METHODS.items() if method.multilabel)
    parser.add_argument(
        "--posthoc",
        type=checked(method_names),
        default=(),
        metavar=metavar,
        help=f"{what}: none, {known}; for sigmoid outputs: {sigmoid}",
    )


def add_page(parser: argparse._ActionsContainer) -> None:
    """The option of every command that writes a page."""
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def add_resamples(parser: argparse._ActionsContainer, low: int = 0) -> None:
    """The option --resamples; with `low` 0 it may turn the intervals off."""
    parser.add_argument(
        "--resamples",
        type=at_least(low),
        default=1000,
        help="resamples behind the 95 %% intervals; default: 1000"
        + ("; 0 for no intervals" if low == 0 else ""),
    )


def add_units(parser: argparse._ActionsContainer) -> None:
    """The option --units, which `segcal.cli` reads."""
    parser.add_argument(
        "--units",
        choices=("paper", "percent"),
        default="paper",
        help="print SCE and AURC in 1e-3 as papers do, or every fraction in %%; default: paper",
    )


def show(page: Path, *, browser: bool) -> None:
    """Print where a page is, and open it if asked."""
    print(f"report: {page}")
    if browser:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            print("there is no browser to open it")
