"""The options of every command but `train`, whose options are the fields of `TrainConfig`.

A command is imported after its options are read. This module imports nothing heavy, so that help
and typing mistakes are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from segcal.posthoc import METHODS, method_names
from segcal.settings import list_entries

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


def late(module: str, name: str) -> Callable[[str], Any]:
    """A function as `checked` makes it, imported when it is used: it loads torch, unlike help."""
    return checked(lambda text: getattr(import_module(module), name)(text))


def parse_eval(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Evaluate runs, or predictions saved by any framework: report, diagrams, overlays, page."""
    parser = Parser(prog, parse_eval.__doc__ or "")
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a report.json; several are compared",
    )
    _add_run_options(parser)
    parser.add_argument(
        "--split",
        choices=("test", "holdout"),
        default="test",
        help="part of the data to evaluate a run on; default: test",
    )
    parser.add_argument(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="evaluate runs on only N images, evenly spaced; post-hoc fits still use all",
    )
    parser.add_argument(
        "--shift",
        type=late("segcal.data.shift", "parse_shifts"),
        action="extend",
        default=[],
        metavar="SHIFTS",
        help="also evaluate runs under shifts of the test images, separated by commas: fog:3, "
        "fog:1,3,5, all (every corruption at severity 3), all:1,3,5, rotation:45, domain:sketch",
    )
    parser.add_argument(
        "--shift-data",
        type=Path,
        action="append",
        default=[],
        metavar="ROOT",
        help="also evaluate runs on the test images of this folder, in the layout of their data",
    )
    _add_posthoc(parser, "METHODS", "post-hoc methods to fit on the hold-out, separated by commas")
    _add_result_options(parser)
    _add_prediction_options(parser)
    options = parser.parse(arguments)
    if not options.inputs and not options.predictions:
        parser.error("Expected the folder of a run, or --predictions, but got neither")
    if not options.predictions and [path.suffix for path in options.inputs] == [".json"]:
        parser.error(
            f"Expected a run, or several reports to compare, but got {options.inputs[0]} alone: "
            "segcal report writes its page"
        )
    on_holdout = options.inputs and options.split == "holdout"
    shifted = options.shift or options.shift_data
    if on_holdout and (options.posthoc or options.operate or options.conformal):
        parser.error(
            "Expected --split test with --posthoc, --operate and --conformal: on the hold-out they "
            "would be evaluated on what they were fitted on"
        )
    if on_holdout and shifted:
        parser.error("Expected --split test with --shift: it changes the test images alone")
    if options.predictions and shifted:
        parser.error("Expected runs with --shift, but got --predictions")
    if options.ray is not None and not options.predictions:
        parser.error("Expected --predictions with --ray, but got runs")
    if options.predictions and options.limit is not None:
        parser.error("Expected runs with --limit, but got --predictions")
    if len(options.fit_predictions) not in (0, len(options.predictions)):
        parser.error(
            f"Expected one --fit-predictions for each of {len(options.predictions)} "
            f"--predictions, but got {len(options.fit_predictions)}"
        )
    return options


def parse_export(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Write the network of a run, with a post-hoc method if one is given, as .pt2 or .onnx."""
    parser = Parser(prog, parse_export.__doc__ or "")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, ending in .pt2 or .onnx"
    )
    _add_posthoc(parser, "METHOD", "post-hoc method to fit on the hold-out")
    parser.add_argument(
        "--size",
        type=checked(size),
        metavar="HxW",
        help="input size of the exported network; default: that of the first test image",
    )
    _add_run_options(parser)
    options = parser.parse(arguments)
    if len(options.posthoc) > 1:
        parser.error(f"Expected one post-hoc method, but got {', '.join(options.posthoc)}")
    return options


def parse_report(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Write the page, tables and figures again from reports, without any network."""
    parser = Parser(prog, parse_report.__doc__ or "")
    parser.add_argument(
        "reports",
        nargs="+",
        type=Path,
        metavar="REPORT",
        help="a report.json, or the folder of an evaluated run, which has several",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write; default: comparison, beside the first input"
    )
    _add_page_options(parser)
    return parser.parse(arguments)


def parse_merge(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Add up the states of evaluations of parts of a data set."""
    parser = Parser(prog, parse_merge.__doc__ or "")
    _add_states(parser, "of a part of the images")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the merged state, .npz")
    parser.add_argument("--report", type=Path, metavar="DIR", help="folder of the page and tables")
    _add_static(parser)
    _add_resamples(parser, low=0)
    return parser.parse(arguments)


def parse_compare(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Compare models with the first on the same images, with 95 % intervals of the differences."""
    parser = Parser(prog, parse_compare.__doc__ or "")
    _add_states(parser, "of a model. The others are compared with the first")
    parser.add_argument(
        "--shift",
        action="store_true",
        help="compare under each shift and in the mean; STATE is a folder of `segcal eval --shift`",
    )
    _add_resamples(parser, low=1)
    options = parser.parse(arguments)
    if len(options.states) < 2:
        parser.error(f"Expected two states or more to compare, but got {len(options.states)}")
    return options


def parse_sweep(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Train and evaluate a grid defined by a YAML file, and write its tables. Resumable."""
    parser = Parser(prog, parse_sweep.__doc__ or "")
    parser.add_argument(
        "sweeps",
        nargs="+",
        metavar="SWEEP.yaml",
        help="definition of the sweep: a file, or the name of one that comes with segcal",
    )
    parser.add_argument(
        "--small", action="store_true", help="run the version that the file calls small"
    )
    add_grid_options(parser, Path("runs/sweep"))
    return parser.parse(arguments)


def add_grid_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """Where and how a grid is made; `out` is the default folder."""
    parser.add_argument(
        "--out", type=Path, default=out, help=f"folder of the runs and the tables; default: {out}"
    )
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        metavar="N",
        help="number of seeds of each method; default: as in the file",
    )
    parser.add_argument(
        "--no-tune",
        dest="tune",
        action="store_false",
        help="use the first value of every list of hyper-parameters instead of choosing",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of runs to reuse: complete runs with the same settings are not trained again",
    )
    parser.add_argument("--data", type=Path, help="data folder, in place of data/ in the config")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps; default: auto"
    )
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="file to put the tables in")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and its cost; train nothing"
    )
    parser.add_argument(
        "--jobs", type=at_least(1), default=1, metavar="N", help="runs at a time; default: 1"
    )
    _add_ray(parser, "train")
    parser.add_argument(
        "--cpus-per-run",
        type=checked(_positive),
        default=1.0,
        metavar="N",
        help="with --ray, CPU cores of a run; default: 1",
    )
    parser.add_argument(
        "--gpus-per-run",
        type=checked(_share),
        metavar="N",
        help="with --ray, GPUs of a run, may be a fraction; default: 1 if there are any",
    )
    parser.add_argument(
        "--no-train",
        dest="train",
        action="store_false",
        help="train nothing: evaluate and show what is already trained",
    )


def _add_ray(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help=f"{what} on a Ray cluster: its address, auto for a running one, or no value to start "
        "one on this machine",
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ValueError(f"expected a number of at least 0, but got {text}")
    return value


def _positive(text: str) -> float:
    if _share(text) == 0:
        raise ValueError(f"expected a number above 0, but got {text}")
    return _share(text)


def _add_run_options(parser: Parser) -> None:
    """The options of every command that opens a run."""
    parser.add_argument(
        "--weights",
        choices=("best", "last"),
        default="best",
        help="checkpoint of the run; default: best",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps; default: auto"
    )
    parser.add_argument(
        "--batch-size", type=at_least(1), help="images per batch; default: as in training"
    )
    parser.add_argument(
        "--workers", type=at_least(0), default=2, help="processes that read images; default: 2"
    )


def _add_posthoc(parser: Parser, metavar: str, what: str) -> None:
    parser.add_argument(
        "--posthoc",
        type=checked(method_names),
        default=(),
        metavar=metavar,
        help=f"{what}: none; {list_entries(METHODS)}; sigmoid outputs: "
        + ", ".join(name for name, method in METHODS.items() if method.multilabel),
    )


def _add_result_options(parser: Parser) -> None:
    """What an evaluation computes and writes."""
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results; default: eval in the folder of the run; for several inputs, "
        "comparison beside the first",
    )
    parser.add_argument(
        "--save-state",
        action="store_true",
        help="also write state.npz, the sums behind each report, for segcal merge and compare",
    )
    parser.add_argument(
        "--shard",
        type=checked(shard),
        default="1/1",
        metavar="K/N",
        help="evaluate only every N-th image from the K-th on, and save the state for segcal merge",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out files that cannot be used, and list them"
    )
    parser.add_argument(
        "--regions",
        type=names,
        default=(),
        metavar="REGIONS",
        help="regions to evaluate as well, separated by commas: boundary:W (pixels with another "
        "label within W rows and columns), interior:W (all others), classes:A+B (pixels with these "
        "labels), foreground (all but class 0)",
    )
    parser.add_argument(
        "--protocol",
        type=late("segcal.metrics.protocols", "parse_protocols"),
        default=(),
        metavar="PROTOCOLS",
        help="protocols of other papers to compute as well, separated by commas: pooled (all "
        "pixels together, the default), image (mean over images), foreground (pooled without "
        "class 0), batch:N (mean over batches of N images, weighted by pixels)",
    )
    parser.add_argument(
        "--operate",
        type=late("segcal.metrics.triage", "parse_targets"),
        default=(),
        metavar="TARGETS",
        help="targets accuracy=A, risk=R or coverage=C, separated by commas: choose the confidence "
        "threshold that reaches each on the hold-out, and check it on the test images",
    )
    parser.add_argument(
        "--conformal",
        type=late("segcal.metrics.triage", "parse_misses"),
        default=(),
        metavar="miss=A",
        help="class sets that miss the label in at most a share A of the pixels of an image, on "
        "average over images: chosen on the hold-out, and checked on the test images",
    )
    parser.add_argument(
        "--num-bins", type=at_least(1), default=15, help="bins of confidence; default: 15"
    )
    _add_resamples(parser, low=0)
    parser.add_argument(
        "--overlays",
        default="worst",
        help="images to draw: worst, random, none, or names separated by commas; default: worst",
    )
    parser.add_argument(
        "--num-overlays", type=at_least(0), default=4, help="how many images to draw; default: 4"
    )
    _add_page_options(parser)


def _add_prediction_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "saved predictions", "The format is described in docs/predictions.md."
    )
    group.add_argument(
        "--predictions",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="saved predictions to evaluate; several are compared",
    )
    group.add_argument(
        "--fit-predictions",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="saved predictions to fit --posthoc on, one for each of --predictions",
    )
    group.add_argument(
        "--format",
        choices=("segcal", "nnunet"),
        default="segcal",
        help="format of the files; nnunet: of nnUNetv2_predict --save_probabilities, with --labels",
    )
    group.add_argument(
        "--kind",
        choices=("logits", "probs", "sigmoid_logits", "sigmoid_probs"),
        help="content of the files, of a softmax or of K sigmoids; default: from the keys of .npz",
    )
    group.add_argument(
        "--layout", choices=("chw", "hwc"), help="order of the axes of an image; default: chw"
    )
    group.add_argument("--labels", type=Path, metavar="DIR", help="folder of the labels")
    group.add_argument("--images", type=Path, metavar="DIR", help="folder of images to draw on")
    group.add_argument(
        "--num-classes", type=at_least(1), help="number of classes; default: as in the first file"
    )
    group.add_argument(
        "--class-names", type=names, metavar="A,B,...", help="names of the classes, in order"
    )
    group.add_argument(
        "--ignore-index", type=int, help="ignored label; default: 255 (-100 if a class)"
    )
    group.add_argument(
        "--align-corners",
        action="store_const",
        const=True,
        help="resize small predictions with align_corners=True, as in torch's interpolate",
    )
    _add_ray(group, "evaluate the files")


def _add_page_options(parser: Parser) -> None:
    _add_static(parser)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def _add_static(parser: Parser) -> None:
    parser.add_argument(
        "--static",
        action="store_true",
        help="write a page without interactive plots and tables, for mail and print",
    )


def _add_states(parser: Parser, what: str) -> None:
    parser.add_argument(
        "states",
        nargs="+",
        type=Path,
        metavar="STATE",
        help="a state.npz that `segcal eval --save-state` or `CalibrationMeter.save` wrote, "
        f"or its folder: the state {what}",
    )


def _add_resamples(parser: Parser, *, low: int) -> None:
    none = "; 0 for no intervals" if low == 0 else ""
    parser.add_argument(
        "--resamples",
        type=at_least(low),
        default=1000,
        help=f"resamples of the bootstrap over images; default: 1000{none}",
    )
