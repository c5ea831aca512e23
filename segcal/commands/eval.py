"""Evaluate runs, or predictions saved by any framework: report, diagrams, overlays, page."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcal.commands.options import (
    add_data,
    add_format,
    add_members,
    add_network,
    add_page,
    add_posthoc,
    add_resamples,
    add_units,
    at_least,
    checked,
    names,
    network_options,
    show,
    typed,
)

if TYPE_CHECKING:
    from segcal.evaluation.evaluate import Evaluation
    from segcal.metrics.conditions import Condition
    from segcal.metrics.objects import ObjectRule
    from segcal.sources import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to evaluate, and how."""
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a report.json; several are compared",
    )
    add("--names", type=names, default=(), metavar="A,B", help="what tables call the inputs")
    add_network(parser)
    add(
        "--split",
        choices=("test", "holdout"),
        default="test",
        help="part of the data to evaluate a run on; default: test",
    )
    add(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="evaluate only N images, evenly spaced; post-hoc fits still use all",
    )
    add(
        "--shift",
        action="append",
        default=[],
        metavar="SHIFTS",
        help="also evaluate runs under shifts of the test images, separated by commas: fog:3, "
        "fog:1,3,5, all (every corruption at severity 3), all:1,3,5, rotation:45, domain:sketch",
    )
    add(
        "--shift-data",
        type=Path,
        action="append",
        default=[],
        metavar="ROOT",
        help="also evaluate runs on the test images of this folder, in the layout of their data",
    )
    add_posthoc(parser, "METHODS", "post-hoc methods to fit on the hold-out, separated by commas")
    add(
        "--fit-shift",
        metavar="SHIFTS",
        help="for --posthoc ts@shift and ts@set (and any other method @shift): changes of the "
        "hold-out to fit on; default: all:1,3. The family of a corruption that is tested is left "
        "out: noise, blur, weather or digital",
    )
    add(
        "--fit-ood",
        type=Path,
        metavar="DIR",
        help="for ts@ood: a folder of images of something else, where predictions should be unsure",
    )
    add(
        "--fit-target",
        type=Path,
        metavar="DIR",
        help="for ts@target and ts@set: a folder of unlabelled images like those to come; default: "
        "the test images, whose labels are not looked at",
    )
    add(
        "--out",
        type=Path,
        help="folder of the results; default: eval in the folder of the run; for several inputs, "
        "comparison beside the first",
    )
    add(
        "--shard",
        type=checked(_shard),
        metavar="K/N",
        help="evaluate only every N-th image from the K-th on; segcal merge adds up the shards",
    )
    add("--skip-bad", action="store_true", help="leave out files that cannot be used, list them")
    add(
        "--regions",
        type=names,
        default=(),
        metavar="REGIONS",
        help="regions to evaluate as well, separated by commas: boundary:W (pixels with another "
        "label within W rows and columns), interior:W (all others), classes:A+B (pixels with these "
        "labels), foreground (all but class 0)",
    )
    add(
        "--protocol",
        type=names,
        default=(),
        metavar="PROTOCOLS",
        help="protocols of other papers to compute as well, separated by commas: pooled (all "
        "pixels together, the default), image (mean over images), foreground (pooled without "
        "class 0), batch:N (mean over batches of N images, weighted by pixels)",
    )
    add(
        "--operate",
        type=names,
        default=(),
        metavar="TARGETS",
        help="targets accuracy=A, risk=R, coverage=C, or object-precision=P with --objects, "
        "separated by commas: choose the confidence threshold that reaches each on the hold-out, "
        "and check it on the test images",
    )
    add(
        "--conformal",
        type=names,
        default=(),
        metavar="miss=A",
        help="class sets that miss the label in at most a share A of the pixels of an image, on "
        "average over images: chosen on the hold-out, and checked on the test images",
    )
    add("--num-bins", type=at_least(1), default=15, help="bins of confidence; default: 15")
    add_resamples(parser)
    add(
        "--overlays",
        default="worst",
        help="images to draw: worst, random, none, or names separated by commas; default: worst",
    )
    add("--num-overlays", type=at_least(0), default=4, help="how many images to draw; default: 4")
    add(
        "--fail-if",
        action="append",
        type=checked(_condition),
        default=[],
        metavar="CONDITION",
        help='exit with status 3 if a score, as a fraction, is beyond a limit: "ece>0.05" or '
        '"coverage_at_risk_1<0.6", by its name in report.json; may be repeated; holds for the last '
        "of --posthoc, or else for the network as it is",
    )
    add(
        "--model-card",
        type=Path,
        metavar="FILE.md",
        help="also write data, protocol, scores with intervals and a figure for a model card",
    )
    add_page(parser)
    add_units(parser)
    _add_objects(parser)
    _add_models(parser)
    _add_members(parser)
    _add_predictions(parser)


def _add_objects(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("objects", "Connected components; see docs/objects.md.")
    add = group.add_argument
    add("--objects", metavar="classes:A,B", help="evaluate the objects of these classes too")
    add(
        "--object-match",
        metavar="HOW",
        help="when a predicted object is real: iou (default), overlap with a true one, or centre "
        "inside it",
    )
    add("--object-iou", type=float, metavar="T", help="least IoU of a real object; default: 0.5")
    add(
        "--object-confidence",
        metavar="RULE",
        help="mean (default) or min of the probability in the object, its mean on the border, or "
        "the score in --object-maps",
    )
    add(
        "--object-min-size", type=at_least(1), metavar="N", help="leave out objects of fewer pixels"
    )
    add(
        "--object-calibrate",
        metavar="METHOD",
        help="fit a map from confidence to probability on the objects of the hold-out: ts, beta or "
        "isotonic",
    )
    for name, what in (("labels", "true"), ("maps", "predicted")):
        add(
            f"--object-{name}",
            nargs="+",
            type=Path,
            metavar="DIR",
            help=f"folders of {what} instance maps, named like the images",
        )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "any network", "docs/networks.md has examples. A FILE.py is code, and it runs."
    )
    group.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="SPEC",
        help="networks to evaluate on --data: torchvision:NAME[@WEIGHTS], hf:ORG/NAME or hf:FOLDER "
        "(transformers), smp:ORG/NAME or smp:FOLDER, timm:NAME[@FILE], FILE.onnx, FILE.pt2, or "
        "FILE.py:FUNCTION, which returns a module or a module and a function from an RGB image to "
        "its input; several are compared",
    )
    add_data(group)


def _add_members(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("members", "Ensembles, and several views of one network.")
    add = group.add_argument
    add_members(group)
    add(
        "--tta",
        default="",
        metavar="VIEWS",
        help="mean over augmented images: flip, scale:0.75,1.25 or flip,scale:0.75,1.25",
    )
    add(
        "--mc-dropout",
        type=at_least(0),
        default=0,
        metavar="N",
        help="mean over N passes with the dropout layers at work: modules such as nn.Dropout; "
        "dropout that a network calls as a function, as inside attention, stays off",
    )
    add(
        "--uncertainty",
        action="store_const",
        const=True,
        help="compare entropy and margin with confidence as finders of errors; where members are "
        "pooled, this and the spread of the members are always compared",
    )


def _add_predictions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("saved predictions", "docs/predictions.md has the format.")
    add = group.add_argument
    add(
        "--predictions",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="saved predictions to evaluate; several are compared",
    )
    add(
        "--fit-predictions",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="saved predictions to fit --posthoc on, one for each of --predictions",
    )
    add(
        "--fit-labels",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder of the labels of --fit-predictions; default: as --labels",
    )
    add(
        "--format",
        choices=("segcal", "nnunet"),
        default="segcal",
        help="format of the files; nnunet: of nnUNetv2_predict --save_probabilities, with --labels",
    )
    add_format(group)
    add(
        "--labels",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder of the labels; several folders are of several raters, who count alike",
    )
    add("--images", type=Path, metavar="DIR", help="folder of images to draw on")
    add("--num-classes", type=at_least(1), help="number of classes; default: of the first file")
    add("--class-names", type=names, metavar="A,B,...", help="names of the classes, in order")
    add("--ignore-index", type=int, help="ignored label; default: 255 (-100 if that is a class)")
    add(
        "--align-corners",
        action="store_const",
        const=True,
        help="resize small predictions with align_corners=True, as in torch's interpolate",
    )


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{text} is no shard K/N such as 1/4, the first of four parts")
    return int(number) - 1, int(count)


def _condition(text: str) -> Condition:
    from segcal.metrics.conditions import Condition

    return Condition.parse(text)


def run(options: argparse.Namespace) -> int:
    """Evaluate each input, save and print what was found, and compare several."""
    from segcal import distributed
    from segcal.data.shift import Shift
    from segcal.evaluation.evaluate import evaluate_source
    from segcal.evaluation.folder import (
        load_evaluation,
        require_writable,
        write_comparison,
        write_model_card,
    )
    from segcal.evaluation.holdout import calibrate_members
    from segcal.posthoc import label
    from segcal.sources.members import Members
    from segcal.sources.readers import name_of
    from segcal.viz.tables import distinct_names

    inputs = [*options.inputs, *options.predictions, *map(Path, options.model)]
    fits = options.fit_predictions or [None] * len(options.predictions)
    if not inputs:
        raise ValueError(
            "name the folder of a run, --model SPEC or --predictions DIR; see segcal eval --help"
        )
    if len(fits) != len(options.predictions):
        raise ValueError("--fit-predictions needs one folder for each of --predictions")
    if options.fit_labels and not options.fit_predictions:
        raise ValueError("--fit-labels needs --fit-predictions")
    fit_of = dict(zip(options.predictions, fits, strict=True))
    if options.model and not options.data:
        raise ValueError("--model needs --data NAME:ROOT, the images to evaluate it on")
    if [path.suffix for path in inputs] == [".json"]:
        raise ValueError(f"{inputs[0]} is a report already: segcal report writes its page")
    if options.calibrate == "members" and not (options.ensemble and len(options.posthoc) == 1):
        raise ValueError("--calibrate members needs --ensemble, and one method in --posthoc")
    known = {model: name_of(model) for model in options.model}
    titles = distinct_names([known.get(str(path), path) for path in inputs])
    beside = Path("evals") if options.model else inputs[0].parent
    if options.ensemble and any(path.suffix == ".json" for path in inputs):
        raise ValueError("a report.json has no predictions, so it is no member of an ensemble")
    groups = [inputs] if options.ensemble else [[path] for path in inputs]
    members = [titles] if options.ensemble else [[title] for title in titles]
    rows = options.names or (["ensemble"] if options.ensemble else titles)
    if len(set(rows)) < len(rows) or len(rows) != len(groups):
        raise ValueError(f"--names needs {len(groups)} different names, one for each row")
    folders = [options.out or beside / "ensemble"]
    if not options.ensemble:
        folders = [
            _folder(path, name, options, alone=len(inputs) == 1)
            for path, name in zip(inputs, rows, strict=True)
        ]
    comparison = options.out or beside / "comparison"
    places = [folder for folder in folders if folder.suffix != ".json"]
    places += [comparison] if len(groups) > 1 else []
    for i, place in enumerate(places):
        require_writable(place)
        if place.resolve() in [other.resolve() for other in places[:i]]:
            raise ValueError(f"two results would be in {place}: evaluate one at a time, with --out")
    device = distributed.choose_device(options.device)
    with distributed.process_group(device):
        evaluations: list[Evaluation] = []
        for paths, name, named, folder in zip(groups, rows, members, folders, strict=True):
            if paths[0].suffix == ".json":
                evaluations.append(load_evaluation(paths[0]))
                continue
            sources, fit_on = [], []
            for path, title in zip(paths, named, strict=True):
                sources.append(_open(path, options, device))
                sources[-1].name = title
                saved = fit_of.get(path)
                if saved is not None:
                    fit_on.append(_open(saved, options, device, options.fit_labels))
            source, fit = sources[0], fit_on[0] if fit_on else None
            posthoc = options.posthoc
            if options.ensemble:
                source = Members(sources, pool=options.pool)
                if fit_on and len(fit_on) < len(sources):
                    raise ValueError("every member needs a hold-out: see --fit-predictions")
                fit = Members(fit_on, pool=options.pool) if fit_on else None
                if options.calibrate == "members":
                    source = calibrate_members(source, posthoc[0], fit)
                    if fit is not None:
                        fit = Members(fit_on, pool=options.pool, calibrators=source.calibrators)
                    name, posthoc = f"{name}, members + {label(posthoc[0])}", ()
            source.name, source.group = name, options.group or source.group
            evaluation = evaluate_source(
                _part(source, options),
                holdout=fit,
                posthoc=posthoc,
                shifts=[*options.shift, *(Shift("data", str(root)) for root in options.shift_data)],
                fit_shift=options.fit_shift,
                fit_ood=options.fit_ood,
                fit_target=options.fit_target,
                regions=options.regions,
                protocols=options.protocol,
                operate=options.operate,
                conformal=options.conformal,
                uncertainty=options.uncertainty,
                objects=_rule(options),
                num_bins=options.num_bins,
                resamples=options.resamples,
                overlays=options.overlays,
                num_overlays=options.num_overlays,
                cache=folder,
            )
            evaluations.append(evaluation)
            page = evaluation.save(folder)
            if distributed.rank() == 0:
                _say(evaluation)
                if len(groups) == 1:
                    _sum_up(evaluations)
                show(page, browser=options.open and len(groups) == 1)
        if len(groups) > 1:
            page = write_comparison(evaluations, comparison)
            if distributed.rank() == 0:
                _sum_up(evaluations)
                show(page, browser=options.open)
        if options.model_card is not None:
            write_model_card(evaluations, options.model_card)
        broken = [line for evaluation in evaluations for line in evaluation.broken(options.fail_if)]
        if distributed.rank() == 0 and broken:
            print(*(f"failed: {line}" for line in broken), sep="\n")
    return 3 if broken else 0


def _folder(path: Path, title: str, options: argparse.Namespace, *, alone: bool) -> Path:
    """Where the results of an input go."""
    if path.suffix == ".json":
        return path
    if alone and options.out is not None:
        return options.out
    how = "" if options.limit is None else f"-limit-{options.limit}"
    if options.tta:
        how += "-" + re.sub("[:,]", "-", options.tta)
    if options.mc_dropout:
        how += f"-dropout-{options.mc_dropout}"
    if options.shard is not None:
        how += f"-{options.shard[0] + 1}-of-{options.shard[1]}"
    if str(path) in options.model:
        return Path("evals") / f"{title}{how}"
    return (path.parent if path.is_file() else path) / f"eval{how}"


def _open(
    path: Path, options: argparse.Namespace, device: Any, labels: Path | None = None
) -> Source:
    from segcal.sources import open_source
    from segcal.sources.network import LoaderSource, RunSource
    from segcal.sources.saved import PredictionFormat

    if str(path) in options.model or path in options.inputs:
        if str(path) in options.model:
            stated = {**network_options(options), "data": options.data}
        else:
            stated = typed(options, RunSource)
        source = open_source(str(path), **{**stated, "device": device})
        if not (options.tta or options.mc_dropout):
            return source
        if isinstance(source, LoaderSource):
            return source.with_views(options.tta, options.mc_dropout)
    if options.tta or options.mc_dropout:
        raise ValueError(
            "--tta and --mc-dropout need the network: pass a run or --model, not saved predictions"
        )
    stated = typed(options, PredictionFormat)
    stated |= {"labels": labels or options.labels, "skip_bad": options.skip_bad}
    return open_source(path, format=options.format, **stated)


def _rule(options: argparse.Namespace) -> ObjectRule | None:
    """The rule of --objects with the other options of objects that were typed."""
    from segcal.metrics.objects import ObjectRule

    stated = {
        name.removeprefix("object_"): value
        for name, value in vars(options).items()
        if name.startswith("object_") and value is not None
    }
    if options.objects is None and stated:
        option = next(iter(stated)).replace("_", "-")
        raise ValueError(f"--object-{option} needs --objects, such as --objects classes:1")
    return None if options.objects is None else ObjectRule.parse(options.objects, **stated)


def _part(source: Source, options: argparse.Namespace) -> Source:
    if options.limit is not None:
        source = source.limited(options.limit)
    return source if options.shard is None else source.shard(*options.shard)


def _say(evaluation: Evaluation) -> None:
    from segcal.evaluation.evaluate import title
    from segcal.viz.tables import describe_report

    for method in evaluation.methods:
        report = evaluation.reports[method]
        print(f"{title(evaluation.name, method)}: {describe_report(report)}")
    print(*evaluation.notes, sep="\n", end="\n" * bool(evaluation.notes))
    if evaluation.skipped:
        print(f"left out {len(evaluation.skipped)} files; the report lists them")


def _sum_up(evaluations: Sequence[Evaluation]) -> None:
    """Print one table of all networks under shift, if there are shifts, and the main result."""
    from segcal.evaluation.folder import compare
    from segcal.viz.page import headline
    from segcal.viz.tables import CLEAN, shift_text

    rows = [row for evaluation in evaluations for row in evaluation.rows()]
    if shifted := {r.name: {CLEAN: r.report, **r.shifts} for r in rows if r.shifts}:
        print(f"\n{shift_text(shifted)}\n")
    print("".join(phrase.text for phrase in headline(rows, compare(evaluations))))
