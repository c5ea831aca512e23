"""The folder that `Evaluation.save` writes and `load_evaluation` reads.

report.json               the report of the network as it is, and what the page says besides
report.html               the page
table.md  table.csv       the numbers as tables
shift.md  shift.csv       the scores under shift
objects.png               false and missed objects; objects.safetensors calibrates objects
figures/                  the diagrams
state.npz                 the sums behind report.json, for `segcal merge` and `segcal compare`
overlays/                 a panel for each chosen image, PNG, and the arrays behind it, NPZ
fog-3/                    report.json and state.npz under the shift fog:3
ts/                       report.json, state.npz, overlays/, fog-3/ of the post-hoc method ts, and
                          calibrator.safetensors
holdout.json              what `segcal.apply` needs to know of the hold-out; ts/ has its own
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from segcal import distributed
from segcal.evaluation.evaluate import Evaluation, Key, title
from segcal.files import Npz, atomic_write, locked, name_file
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.compare import Comparison, compare_models
from segcal.metrics.drift import HoldoutProfile
from segcal.metrics.report import to_plain
from segcal.posthoc import NONE, load_calibrator
from segcal.sources.network import check_history
from segcal.sources.source import digest
from segcal.viz import tables
from segcal.viz.overlay import Overlay
from segcal.viz.page import PageRow, write_page
from segcal.viz.plots import figure_png, reliability_diagram, write_figures

T = TypeVar("T")
log = logging.getLogger(__name__)
EVAL = "eval"  # the folder of results inside that of a run
REPORT, PAGE, STATE = "report.json", "report.html", "state.npz"
CALIBRATOR, PROFILE = "calibrator.safetensors", "holdout.json"
OBJECTS, GALLERY = "objects.safetensors", "objects.png"
_NEW = ".new"  # a folder of files that are not complete yet
_SEED = re.compile(r"[-_. ]?seed[-_=]?\d+")
_MOST_COMPARED = 12  # models; all pairs of the best take time
_MAX_NAME = 200  # bytes; systems allow 255, and an ending comes after it


def place(method: str, shift: str = "") -> Path:
    """The folder of one report inside a folder of results."""
    of_shift = file_name(shift.replace(":", "-", 1), "")
    return Path("" if method == NONE else file_name(method), of_shift)


def file_name(name: str, default: str = "image") -> str:
    """A name for a file: only letters, digits and + . _ -, no dot in front, not too long."""
    kept = re.sub(r"[^\w.+-]+", "-", name).encode("utf-8", "replace")[:_MAX_NAME]
    return kept.decode("utf-8", "ignore").strip(".-") or default


def state_file(path: Path) -> Path:
    """The saved state that `path` names: a file, or the one in a folder of results."""
    return path / STATE if path.is_dir() else path


def require_writable(folder: Path) -> None:
    """Raise if `folder` cannot be made or written to: better known before the work than after."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"results cannot be written to {folder}: {there} cannot be written to")


def store(
    folder: Path, report: Report, meter: CalibrationMeter | None, about: Mapping[str, Any]
) -> None:
    """Write one report and its state; `about` stands in the report's file besides.

    The report is removed first and written last: where it is, the state is its own.
    """
    (folder / REPORT).unlink(missing_ok=True)
    if meter is not None:
        folder.mkdir(parents=True, exist_ok=True)
        meter.save(folder / STATE)
    text = json.dumps({**report.to_dict(), "about": to_plain(dict(about))}, allow_nan=False)
    with atomic_write(folder / REPORT) as file:
        file.write(text + "\n")


def stored(folder: Path, key: str) -> tuple[Report, CalibrationMeter] | None:
    """The report and the meter that `store` wrote to `folder` under `key`, if they are whole."""
    try:
        report, about = _read(folder / REPORT)
        if about.get("key") == key:
            return report, CalibrationMeter.load(folder / STATE)
    except (OSError, ValueError):
        pass  # there is none, or it is damaged: it is made again
    return None


def save(evaluation: Evaluation, folder: Path) -> Path:
    """See `Evaluation.save`."""
    if distributed.rank() != 0:
        return folder / PAGE
    with _replacing(folder) as new:
        listed = {
            method: _write_overlays(some, new / place(method) / "overlays")
            for method, some in evaluation.overlays.items()
        }
        for name, saved in (
            (CALIBRATOR, evaluation.calibrators),
            (PROFILE, evaluation.profiles),
            (OBJECTS, evaluation.object_calibrators),
        ):
            for method, one in saved.items():
                one.save(new / place(method) / name)
        if evaluation.object_overlay is not None:
            (new / GALLERY).write_bytes(evaluation.object_overlay)
        write_pages(new, evaluation.name, [evaluation])
        about = {
            "name": evaluation.name,
            "methods": evaluation.methods,
            "shifts": evaluation.shifts,
            "notes": evaluation.notes,
            "skipped": evaluation.skipped,
            "overlays": listed,
            "config": evaluation.config,
            "history": [dict(record) for record in evaluation.history],
            # The same in all reports that were written together.
            "written": digest(*(report.scores for report in evaluation.reports.values())),
        }
        for key, report in evaluation.reports.items():
            method, shift = key if isinstance(key, tuple) else (key, "")
            mine = about if key == NONE else {name: about[name] for name in ("name", "written")}
            mine = {**mine, "method": method, "shift": shift, "key": evaluation.keys.get(key, "")}
            store(new / place(method, shift), report, evaluation.meters.get(key), mine)
    return folder / PAGE


@contextmanager
def _replacing(folder: Path, *, pages_alone: bool = False) -> Iterator[Path]:
    """A new folder to write to, whose files replace those in `folder` when the block ends well.

    If the block raises, `folder` is as it was. Each file moves by a rename, report.json last; then
    files of the earlier results (or pages) that have no successor are removed. A process that is
    killed in between leaves a report.json that can be read, the old one or the new.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / _NEW
    try:
        with locked(folder, wait=True):
            shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
            new.mkdir()
            try:
                old = _pages(folder) if pages_alone else _pages(folder) | _results(folder)
                yield new
                files = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file())
                for file in sorted(files, key=lambda file: str(file) == REPORT):  # that is last
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new / file, folder / file)
                for file in old - {*files}:
                    (folder / file).unlink(missing_ok=True)
                    with suppress(OSError):  # raised unless the folder is empty
                        (folder / file).parent.rmdir()
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(new):
            # Name the file that it would have become: the other one is gone in a moment.
            error.filename = str(folder / Path(error.filename).relative_to(new))
        name_file(error, folder)
        raise
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()


def _pages(folder: Path) -> set[Path]:
    """The files of pages and tables in `folder`."""
    names = (PAGE, "table.md", "table.csv", "shift.md", "shift.csv", "figures/**/*.*")
    return {path.relative_to(folder) for name in names for path in folder.glob(name)}


def _results(folder: Path) -> set[Path]:
    """The files of the results in `folder`, but those under shift, which stay: they have keys."""
    try:
        methods = [str(method) for method in _read(folder / REPORT)[1]["methods"]]
    except (OSError, ValueError, TypeError, KeyError):
        methods = []
    names = (REPORT, STATE, CALIBRATOR, PROFILE, OBJECTS, GALLERY, "overlays/*.*")
    tops = {folder / place(method) for method in [NONE, *methods]}
    found = {path.relative_to(folder) for top in tops for name in names for path in top.glob(name)}
    return found - {Path(REPORT)}


def write_pages(folder: Path, title: str, evaluations: Sequence[Evaluation]) -> None:
    """Write page, tables and figures into `folder`."""
    named = _rows(evaluations)
    reports = {name: row.report for name, row in named.items()}
    text = _markdown(named)
    if any(len(evaluation.methods) > 1 for evaluation in evaluations):
        each = {(e.name, method): e.reports[method] for e in evaluations for method in e.methods}
        text += f"\n{tables.posthoc_table(each).markdown()}"
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.csv").write_text(tables.to_csv(reports), encoding="utf-8")
    shifted = {n: {tables.CLEAN: r.report, **r.shifts} for n, r in named.items() if r.shifts}
    if shifted:
        text = "\n".join(table.markdown() for table in tables.shift_tables(shifted))
        (folder / "shift.md").write_text(text, encoding="utf-8")
        (folder / "shift.csv").write_text(tables.shift_csv(shifted), encoding="utf-8")
    rows = list(named.values())
    write_figures(reports, folder / "figures", history=rows[0].history if len(rows) == 1 else ())
    write_page(rows, folder / PAGE, title=title, comparison=compare(evaluations))


def _rows(evaluations: Sequence[Evaluation]) -> dict[str, PageRow]:
    """The rows of all evaluations by name; repeated names get a number."""
    rows = [row for evaluation in evaluations for row in evaluation.rows()]
    return dict(zip(tables.tell_apart([row.name for row in rows]), rows, strict=True))


def _markdown(named: Mapping[str, PageRow], *, brief: bool = False) -> str:
    notes = {name: row.notes for name, row in named.items() if row.notes}
    reports = {name: row.report for name, row in named.items()}
    return tables.to_markdown(reports, notes, brief=brief)


def write_model_card(evaluations: Sequence[Evaluation], path: str | Path) -> None:
    """Write what a model card says of calibration: data, protocol, scores, intervals, a figure.

    `path` is the Markdown file; the figure has its name with the ending .png.
    """
    if distributed.rank() != 0:
        return
    path = Path(path)
    named = _rows(evaluations)
    reports = {name: row.report for name, row in named.items()}
    shown = reports if len(reports) > 1 else next(iter(reports.values()))
    figure = path.with_suffix(".png")
    with atomic_write(figure, "wb") as file:
        file.write(figure_png(lambda: reliability_diagram(shown)))
    text = f"## Calibration\n\n![Reliability diagram]({figure.name})\n\n"
    text += _markdown(named, brief=True)
    for config in dict.fromkeys(e.config.strip() for e in evaluations if e.config):
        text += f"\n```yaml\n{config}\n```\n"
    with atomic_write(path) as file:
        file.write(text)


def write_comparison(
    evaluations: Sequence[Evaluation], folder: str | Path, *, title: str = "Comparison"
) -> Path:
    """Write the page and tables of several evaluations side by side; the path of the page."""
    folder = Path(folder)
    if distributed.rank() == 0:
        with _replacing(folder, pages_alone=True) as new:
            write_pages(new, title, evaluations)
    return folder / PAGE


def compare(evaluations: Sequence[Evaluation]) -> Comparison | None:
    """How models differ, the seeds of a model taken together; None if that is not known.

    Runs are one model if their names differ in a part such as "seed3" alone.
    """
    models: dict[str, list[CalibrationMeter]] = {}
    trainings: dict[str, list[str]] = {}
    keys = [(e, method) for e in evaluations for method in e.methods]
    names = tables.tell_apart([title(e.name, method) for e, method in keys])
    for (evaluation, method), name in zip(keys, names, strict=True):
        if method not in evaluation.meters or not evaluation.reports[method].intervals:
            return None
        run = _SEED.sub("", evaluation.name)
        model = name if run in (evaluation.name, "") else title(run, method)
        models.setdefault(model, []).append(evaluation.meters[method])
        trainings.setdefault(model, []).append(evaluation.name)
    if not 1 < len(models) <= _MOST_COMPARED:
        return None
    try:
        return compare_models(models, trainings=trainings)
    except ValueError as error:  # such as other images
        log.warning("the models are not compared: %s", error)
        return None


def load_evaluation(path: str | Path) -> Evaluation:
    """The evaluation that `Evaluation.save` wrote.

    `path` is the folder, that of a run whose results are in `eval`, or a report.json, of which one
    of a post-hoc method, or one that `Report.save` wrote, stands alone.
    """
    path = Path(path)
    if path.is_dir():
        path = next((p for p in (path / REPORT, path / EVAL / REPORT) if p.is_file()), path)
        if path.is_dir():
            raise ValueError(f"there is no {REPORT} in {path}: run segcal eval first")
    folder, main = path.parent, path.name == REPORT
    report, about = _read(path)
    try:
        if "methods" not in about:  # one report alone
            default = folder.resolve().name if main else path.stem
            name = title(str(about.get("name", default)), str(about.get("method", NONE)))
            meters = _States({NONE: folder / STATE} if main and about else {})
            return Evaluation(name, {NONE: report}, meters=meters)
        methods = [str(method) for method in about["methods"]]
        parts: dict[Key, Path] = {method: folder / place(method) for method in methods}
        for shift in map(str, about["shifts"]):
            parts |= {(method, shift): folder / place(method, shift) for method in methods}
        reports: dict[Key, Report] = {NONE: report}
        for key, part in parts.items():
            if key == NONE or not (part / REPORT).is_file():
                continue
            found, theirs = _read(part / REPORT)
            if isinstance(key, str) and theirs.get("written") != about.get("written"):
                log.warning("%s was not written with %s: left out", part / REPORT, REPORT)
            else:
                reports[key] = found
        gallery = folder / GALLERY
        known = [method for method in methods if method in reports]

        def beside(name: str, load: Callable[[Path], T]) -> dict[str, T]:
            files = {method: folder / place(method) / name for method in known}
            return {method: load(file) for method, file in files.items() if file.is_file()}

        return Evaluation(
            name=str(about["name"]),
            reports=reports,
            calibrators=beside(CALIBRATOR, load_calibrator),
            profiles=beside(PROFILE, HoldoutProfile.load),
            object_calibrators=beside(OBJECTS, load_calibrator),
            object_overlay=gallery.read_bytes() if report.objects and gallery.is_file() else None,
            meters=_States({key: parts[key] / STATE for key in reports}),
            overlays={
                method: _read_overlays(some, folder / place(method) / "overlays")
                for method, some in about["overlays"].items()
                if method in reports
            },
            skipped={str(name): str(why) for name, why in about["skipped"].items()},
            config=str(about["config"]),
            history=check_history(about["history"]),
            notes=[str(note) for note in about["notes"]],
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a report of segcal: {error!r}") from None


class _States(Mapping[Key, CalibrationMeter]):
    """Meters in files, each read when it is asked for."""

    def __init__(self, files: Mapping[Key, Path]) -> None:
        self._files = {key: file for key, file in files.items() if file.is_file()}

    def __getitem__(self, key: Key) -> CalibrationMeter:
        return CalibrationMeter.load(self._files[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read(path: Path) -> tuple[Report, dict[str, Any]]:
    """A report and what stands in its file besides."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        about = data.pop("about", {}) if isinstance(data, dict) else {}
        report = Report.from_dict(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path} is not a report of segcal")
    return report, about


def _write_overlays(overlays: Sequence[Overlay], folder: Path) -> list[dict[str, Any]]:
    """Write panels and the arrays behind them; what report.json says of them."""
    listed = []
    stems = tables.tell_apart([file_name(overlay.name) for overlay in overlays])
    for overlay, stem in zip(overlays, stems, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.png").write_bytes(overlay.png())
        arrays: dict[str, Any] = overlay.arrays
        np.savez_compressed(folder / f"{stem}.npz", **arrays)
        about = {name: getattr(overlay, name) for name in ("name", "of", "ece", "class_names")}
        listed.append({"file": f"{stem}.npz", **about})
    return listed


def _read_overlays(listed: Sequence[Mapping[str, Any]], folder: Path) -> list[Overlay]:
    """The overlays whose arrays are still there."""
    found = []
    for item in listed:
        path = folder / Path(item["file"]).name  # no other folder, whatever the report says
        if path.is_file():
            with Npz(path) as stored:
                arrays: dict[str, Any] = {key: stored[key] for key in stored.keys}
            found.append(
                Overlay(
                    name=str(item["name"]),
                    of=str(item["of"]),
                    ece=None if item["ece"] is None else float(item["ece"]),
                    class_names=tuple(map(str, item["class_names"])),
                    **{"image": None, "palette": None, **arrays},
                )
            )
    return found
