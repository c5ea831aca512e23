"""Evaluate networks, runs or saved predictions: report, diagrams, overlays, page."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcal.commands.options import (
    DATA,
    FORMAT,
    MEMBERS,
    NETWORK,
    PAGE,
    POSTHOC,
    RESAMPLES,
    UNITS,
    add_options,
    network_options,
    show,
    typed,
)

if TYPE_CHECKING:
    from segcal.evaluation.evaluate import Evaluation
    from segcal.metrics.objects import ObjectRule
    from segcal.sources import Source

Pair = tuple[Path, str]  # an input and what tables call it

OPTIONS = {
    "--names A,B": "what tables call the inputs",
    **NETWORK,
    "--split test|holdout=test": "part of the data to evaluate a run on",
    "--limit N": "evaluate only N images, evenly spaced; post-hoc fits still use all",
    "--shift SHIFTS *": "also evaluate under shifts of the test images, separated by commas: "
    "fog:3, fog:1,3,5, all (every corruption at severity 3), all:1,3,5, rotation:45, domain:sketch",
    "--shift-data ROOT *": "also evaluate on the test images of this folder, in the layout of the "
    "run's data; for --model: NAME:ROOT",
    "--posthoc METHODS": "post-hoc methods to fit on the hold-out, separated by commas: " + POSTHOC,
    "--fit-shift SHIFTS": "for --posthoc ts@shift and ts@set (and any other method @shift): "
    "changes of the hold-out to fit on; default: all:1,3. The family of a corruption that is "
    "tested is left out: noise, blur, weather or digital",
    "--fit-ood DIR": "for ts@ood: a folder of images of something else, where predictions should "
    "be unsure",
    "--fit-target DIR": "for ts@target and ts@set: a folder of unlabelled images like those to "
    "come; default: the test images, whose labels are not looked at",
    "--out DIR": "folder of the results; default: eval in the folder of the run; for several "
    "inputs, comparison beside the first",
    "--shard K/N": "evaluate only every N-th image from the K-th on; segcal merge adds up the "
    "shards",
    "--skip-bad": "leave out files that cannot be used, list them",
    "--regions REGIONS": "regions to evaluate as well, separated by commas: boundary:W (pixels "
    "with another label within W rows and columns), interior:W (all others), classes:A+B (pixels "
    "with these labels), foreground (all but class 0)",
    "--protocol PROTOCOLS": "protocols of other papers to compute as well, separated by commas: "
    "pooled (all pixels together, the default), image (mean over images), foreground (pooled "
    "without class 0), batch:N (mean over batches of N images, weighted by pixels)",
    "--operate TARGETS": "targets accuracy=A, risk=R, coverage=C, or object-precision=P with "
    "--objects, separated by commas: choose the confidence threshold that reaches each on the "
    "hold-out, and check it on the test images",
    "--conformal miss=A": "class sets that miss the label in at most a share A of the pixels of "
    "an image, on average over images: chosen on the hold-out, and checked on the test images",
    "--num-bins N=15": "bins of confidence",
    **RESAMPLES,
    "--overlays WHICH=worst": "images to draw: worst, random, none, or names separated by commas",
    "--num-overlays COUNT=4": "how many images to draw",
    "--fail-if CONDITION *": "exit with status 3 if a score, as a fraction, is beyond a limit: "
    '"ece>0.05" or "coverage_at_risk_1<0.6", by its name in report.json; may be repeated; holds '
    "for the last of --posthoc, or else for the network as it is",
    "--model-card FILE.md": "also write data, protocol, scores with intervals and a figure for a "
    "model card",
    **PAGE,
    **UNITS,
}
OBJECTS = {
    "--objects classes:A,B": "evaluate the objects of these classes too",
    "--object-match HOW": "when a predicted object is real: iou (default), overlap with a true "
    "one, or centre inside it",
    "--object-iou T": "least IoU of a real object; default: 0.5",
    "--object-confidence RULE": "mean (default) or min of the probability in the object, its mean "
    "on the border, or the score in --object-maps",
    "--object-min-size N": "leave out objects of fewer pixels",
    "--object-calibrate HOW": "fit a map from confidence to probability on the objects of the "
    "hold-out: ts, beta or isotonic",
    "--object-labels DIR ...": "folders of true instance maps, named like the images",
    "--object-maps DIR ...": "folders of predicted instance maps, named like the images",
}
MODEL = {
    "--model SPEC ...": "networks to evaluate on --data: torchvision:NAME[@WEIGHTS], hf:ORG/NAME "
    "or hf:FOLDER (transformers), smp:ORG/NAME or smp:FOLDER, timm:NAME[@FILE], FILE.onnx, "
    "FILE.pt2, or FILE.py:FUNCTION, which returns a module or a module and a function from an RGB "
    "image to its input; several are compared",
    **DATA,
}
VIEWS = {
    **MEMBERS,
    "--tta VIEWS": "mean over augmented images: flip, scale:0.75,1.25 or flip,scale:0.75,1.25",
    "--mc-dropout COUNT=0": "mean over this many passes with dropout at work",
    "--uncertainty": "compare entropy and margin with confidence as finders of errors; where "
    "members are pooled, this and the spread of the members are always compared",
}
PREDICTIONS = {
    "--predictions DIR ...": "saved predictions to evaluate; several are compared",
    "--fit-predictions DIR ...": "saved predictions to fit --posthoc on, one for each of "
    "--predictions",
    "--fit-labels DIR ...": "folder of the labels of --fit-predictions; default: as --labels",
    **FORMAT,
    "--labels DIR ...": "folder of the labels; several folders are of several raters, who count "
    "alike",
    "--images DIR": "folder of images to draw on",
    "--num-classes N": "number of classes; default: of the first file",
    "--class-names A,B": "names of the classes, in order",
    "--ignore-index LABEL": "ignored label; default: 255 (-100 if that is a class)",
    "--align-corners": "resize small predictions with align_corners=True, as in torch's "
    "interpolate",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to evaluate, and how."""
    about = "folder of a run, or a report.json; several are compared"
    parser.add_argument("inputs", nargs="*", type=Path, metavar="RUN", help=about)
    add_options(parser, OPTIONS)
    for title, more, table in (
        ("objects", "Connected components; see docs/objects.md.", OBJECTS),
        ("any network", "docs/networks.md has examples. A FILE.py is code, and it runs.", MODEL),
        ("members", "Ensembles, and several views of one network.", VIEWS),
        ("saved predictions", "docs/predictions.md has the format.", PREDICTIONS),
    ):
        add_options(parser.add_argument_group(title, more), table)


def run(options: argparse.Namespace) -> int:
    """Evaluate each input, save and print what was found, and compare several."""
    from segcal import distributed
    from segcal.evaluation.folder import (
        load_evaluation,
        require_writable,
        write_comparison,
        write_model_card,
    )
    from segcal.sources.readers import name_of
    from segcal.viz.tables import distinct_names

    inputs = [*options.inputs, *options.predictions, *map(Path, options.model)]
    _check(options, inputs)
    specs = {spec: name_of(spec) for spec in options.model}
    pairs = list(
        zip(inputs, distinct_names([specs.get(str(path), path) for path in inputs]), strict=True)
    )
    rows = [pairs] if options.ensemble else [[pair] for pair in pairs]
    names = options.names or (["ensemble"] if options.ensemble else [name for _, name in pairs])
    if len(set(names)) < len(names) or len(names) != len(rows):
        raise ValueError(f"--names needs {len(rows)} different names, one for each row")
    beside = Path("evals") if options.model else inputs[0].parent
    folders = [
        (options.out if len(rows) == 1 else None)
        or (beside / "ensemble" if options.ensemble else _folder(row[0][0], name, options))
        for row, name in zip(rows, names, strict=True)
    ]
    comparison = options.out or beside / "comparison"
    places = [folder for folder in folders if folder.suffix != ".json"]
    places += [comparison] if len(rows) > 1 else []
    for i, place in enumerate(places):
        require_writable(place)
        if place.resolve() in [other.resolve() for other in places[:i]]:
            raise ValueError(f"two results would be in {place}: evaluate one at a time, with --out")
    device = distributed.choose_device(options.device)
    with distributed.process_group(device):
        evaluations: list[Evaluation] = []
        for row, name, folder in zip(rows, names, folders, strict=True):
            if folder.suffix == ".json":
                evaluations.append(load_evaluation(folder))
                continue
            evaluations.append(_evaluate(row, name, folder, options, device))
            page = evaluations[-1].save(folder)
            if distributed.rank() == 0:
                _say(evaluations[-1])
                if len(rows) == 1:
                    _sum_up(evaluations)
                show(page, browser=options.open and len(rows) == 1)
        if len(rows) > 1:
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


def _check(options: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """Raise if what was typed does not go together."""
    reports = [path for path in inputs if path.suffix == ".json"]
    fits = options.fit_predictions
    wrong = ""
    if not inputs:
        wrong = "name the folder of a run, --model SPEC or --predictions DIR: see --help"
    elif fits and len(fits) != len(options.predictions):
        wrong = "--fit-predictions needs one folder for each of --predictions"
    elif options.fit_labels and not fits:
        wrong = "--fit-labels needs --fit-predictions"
    elif options.model and not options.data:
        wrong = "--model needs --data NAME:ROOT, the images to evaluate it on"
    elif len(inputs) == len(reports) == 1:
        wrong = f"{reports[0]} is a report already: segcal report writes its page"
    elif options.calibrate == "members" and len(options.posthoc) != 1:
        wrong = "--calibrate members needs one method in --posthoc"
    elif options.ensemble and reports:
        wrong = "a report.json has no predictions, so it is no member of an ensemble"
    elif options.ensemble and fits and len(fits) < len(inputs):
        wrong = "every member needs a hold-out: see --fit-predictions"
    if wrong:
        raise ValueError(wrong)


def _folder(path: Path, name: str, options: argparse.Namespace) -> Path:
    """Where the results of one input go; a report stays where it is."""
    if path.suffix == ".json":
        return path
    parts = [name if str(path) in options.model else "eval"]
    parts += [] if options.limit is None else [f"limit-{options.limit}"]
    parts += [re.sub("[:,]", "-", options.tta)] if options.tta else []
    parts += [f"dropout-{options.mc_dropout}"] if options.mc_dropout else []
    parts += [f"{options.shard[0] + 1}-of-{options.shard[1]}"] if options.shard else []
    if str(path) in options.model:
        return Path("evals") / "-".join(parts)
    return (path.parent if path.is_file() else path) / "-".join(parts)


def _evaluate(
    row: Sequence[Pair], name: str, folder: Path, options: argparse.Namespace, device: Any
) -> Evaluation:
    """Evaluate an input, or the ensemble of several."""
    from segcal.data.shift import Shift
    from segcal.evaluation.evaluate import evaluate_source
    from segcal.evaluation.holdout import calibrate_members
    from segcal.posthoc import label
    from segcal.sources.members import Members

    fit_of = dict(zip(options.predictions, options.fit_predictions, strict=False))
    sources = [_open(path, options, device) for path, _ in row]
    for source, (_, title) in zip(sources, row, strict=True):
        source.name = title
    fits = [
        _open(fit_of[path], options, device, options.fit_labels)
        for path, _ in row
        if path in fit_of
    ]
    source, fit, posthoc = sources[0], fits[0] if fits else None, options.posthoc
    if options.ensemble:
        source = Members(sources, pool=options.pool)
    if options.calibrate == "members":
        source = calibrate_members(source, posthoc[0], fits)
        name, posthoc = f"{name}, members + {label(posthoc[0])}", ()
    if isinstance(source, Members) and fits:  # hold-outs of folds may be of different images
        chosen = posthoc or options.operate or options.conformal or options.object_calibrate
        fit = source.with_members(fits) if chosen else None
    source.name, source.group = name, options.group or source.group
    source = source if options.limit is None else source.limited(options.limit)
    return evaluate_source(
        source if options.shard is None else source.shard(*options.shard),
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
        uncertainty=options.uncertainty or None,
        objects=_rule(options),
        num_bins=options.num_bins,
        resamples=options.resamples,
        overlays=options.overlays,
        num_overlays=options.num_overlays,
        cache=folder,
    )


def _open(
    path: Path, options: argparse.Namespace, device: Any, labels: Sequence[Path] = ()
) -> Source:
    from segcal.sources import open_source
    from segcal.sources.network import LoaderSource, RunSource
    from segcal.sources.saved import PredictionFormat

    views = options.tta, options.mc_dropout
    if str(path) in options.model or path in options.inputs:
        stated = typed(options, RunSource)
        if str(path) in options.model:
            stated = {**network_options(options), "data": options.data}
        source = open_source(str(path), **{**stated, "device": device})
        if not any(views):
            return source
        if isinstance(source, LoaderSource):
            return source.with_views(*views)
    if any(views):
        raise ValueError(
            "--tta and --mc-dropout need the network: pass a run or --model, not saved predictions"
        )
    stated = typed(options, PredictionFormat)
    stated |= {"labels": labels or options.labels or None, "skip_bad": options.skip_bad}
    return open_source(path, format=options.format, **stated)


def _rule(options: argparse.Namespace) -> ObjectRule | None:
    """The rule of --objects with the other options of objects that were typed."""
    from segcal.metrics.objects import ObjectRule

    stated = {
        name.removeprefix("object_"): value
        for name, value in vars(options).items()
        if name.startswith("object_") and value not in (None, ())
    }
    if options.objects is None and stated:
        option = next(iter(stated)).replace("_", "-")
        raise ValueError(f"--object-{option} needs --objects, such as --objects classes:1")
    return None if options.objects is None else ObjectRule.parse(options.objects, **stated)


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
