"""The folder of results that an evaluation writes, whole or not at all.

report.json            the numbers, and all that the page says besides
report.html            the page
table.md  table.csv    the numbers as tables
state.npz              the sums behind the numbers, for `segcal merge`; if asked for
shift.json .md .csv    the scores under shift, if asked for; shift.png shows one image under it
figures/               every diagram, as PNG and SVG
overlays/              a panel for each chosen image, PNG, and the arrays behind it, NPZ
posthoc/METHOD/        report.json and overlays/ of each post-hoc method, and the fitted calibrator
shift/NAME-VALUE/      report.json and state.npz under a shift, and posthoc/METHOD/ of the same
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import webbrowser
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from segcal.data.shift import Shift, parse_shifts
from segcal.files import Npz, atomic_write, locked, name_file
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.compare import Comparison, compare_models
from segcal.metrics.report import to_plain
from segcal.posthoc import NONE
from segcal.viz.overlay import Overlay, Picture
from segcal.viz.page import PageRow, write_page
from segcal.viz.tables import (
    CLEAN,
    class_names,
    posthoc_table,
    shift_csv,
    shift_records,
    shift_tables,
    tell_apart,
    to_csv,
    to_markdown,
)

log = logging.getLogger(__name__)
EVAL, COMPARISON = "eval", "comparison"  # folders
REPORT, PAGE, STATE, CALIBRATOR = (
    "report.json",
    "report.html",
    "state.npz",
    "calibrator.safetensors",
)
OVERLAYS, POSTHOC, SHIFT = "overlays", "posthoc", "shift"
SHIFT_FILE, SHIFT_PANEL = "shift.json", "shift.png"
_ARRAYS = ("labels", "prediction", "confidence", "gap", "image", "palette")
_SEED = re.compile(r"[-_. ]?seed[-_=]?\d+")
_MOST_COMPARED = 12  # models; all pairs of the best take time
_MAX_NAME = 200  # bytes; systems allow 255, and an ending comes after it
# Replaced as a whole, or removed. Results under a shift are kept: they have keys.
PAGES = (PAGE, "table.md", "table.csv", "figures", SHIFT_FILE, "shift.md", "shift.csv")
RESULTS = (*PAGES, REPORT, STATE, SHIFT_PANEL, OVERLAYS, POSTHOC)
# Where new results are inside their folder: being written; complete, while old ones may be in
# their place; complete, when the old ones are gone, to `_OLD` until they are removed.
_WRITING, _COMPLETE, _MOVING, _OLD = ".new", ".complete", ".moving", ".old"
_REPLACES = ".replaces"  # a file among the new ones: names of what they replace


@dataclass(frozen=True)
class Result:
    """The evaluation of one network, as it is or after one post-hoc method.

    Attributes:
        run: name of the network.
        method: short name of the post-hoc method; none for the network as it is.
        entry: what is shown of it.
        meter: behind the report, or the file of its state; None if it was not kept.
    """

    run: str
    method: str
    entry: PageRow
    meter: CalibrationMeter | Path | None = field(default=None, compare=False, repr=False)


def state_path(path: Path) -> Path:
    """The saved state that `path` names: a file, or the one in a folder of results."""
    settle(path)
    return path / STATE if path.is_dir() else path


def method_folder(folder: Path, method: str) -> Path:
    """The folder of a post-hoc method's results inside a folder of results."""
    return folder if method == NONE else folder / POSTHOC / method


def shift_folder(folder: Path, shift: Shift) -> Path:
    """The folder of the results under a shift, for those in `folder`, of whatever method."""
    if folder.parent.name == POSTHOC:
        return method_folder(folder.parent.parent / SHIFT / shift.folder, folder.name)
    return folder / SHIFT / shift.folder


def require_writable(folder: Path) -> None:
    """Raise if `folder` cannot be made or written to: better known before the work than after."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"Expected a folder for results at {folder}, but cannot write to {place}")


@contextmanager
def new_contents(folder: Path, names: Sequence[str] = RESULTS) -> Iterator[Path]:
    """A folder to write to; what it holds moves into `folder` when the block ends well.

    If the block raises, or is killed, `folder` is as it was. One rename makes the new results
    valid; if this process is killed after it, `settle` finishes the moves. All of it happens
    inside `folder`, which may be on another disk than its parent.

    Args:
        folder: made if missing.
        names: what is replaced or, if there is no new one, removed. Other files stay.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / _WRITING
    try:
        with locked(folder, wait=True):
            _settle(folder)
            new.mkdir()
            try:
                yield new
                (new / _REPLACES).write_text("\n".join(names), encoding="utf-8")
                os.replace(new, folder / _COMPLETE)
                _settle(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(new):
            # The file that it would have become: the other one is gone in a moment.
            error.filename = str(folder / Path(error.filename).relative_to(new))
        name_file(error, folder)
        raise
    finally:
        if made:
            with suppress(OSError):  # raised unless the folder is empty
                folder.rmdir()


def settle(folder: Path) -> None:
    """Finish moving new results into `folder`, if a process was killed while it did.

    Args:
        folder: of results, or of those of a post-hoc method inside one.
    """
    if folder.parent.name == POSTHOC:
        folder = folder.parent.parent
    if any((folder / name).exists() for name in (_COMPLETE, _MOVING)):
        with locked(folder, wait=True):
            _settle(folder)


def _settle(folder: Path) -> None:
    """Move new results into `folder` by renames alone; a kill after any of them loses nothing.

    While there is `_COMPLETE`, the results in `folder` are old; while there is `_MOVING`, new.
    """
    old, complete, moving = (folder / name for name in (_OLD, _COMPLETE, _MOVING))
    if complete.exists():
        _require_own(complete)
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        replaced = (complete / _REPLACES).read_text(encoding="utf-8").split("\n")
        for name in RESULTS:
            if name in replaced and (folder / name).exists():
                os.replace(folder / name, old / name)
        os.replace(complete, moving)
    if moving.exists():
        _require_own(moving)
        (moving / _REPLACES).unlink(missing_ok=True)
        for path in moving.iterdir():
            os.replace(path, folder / path.name)
        moving.rmdir()
    for leftover in (old, folder / _WRITING):
        shutil.rmtree(leftover, ignore_errors=True)


def _require_own(place: Path) -> None:
    """Raise if `place` is a link or a file: moving its files would empty some other folder."""
    if place.is_symlink() or not place.is_dir():
        raise ValueError(f"Expected a folder of new results at {place}, but got something else")


def write_pages(
    results: Sequence[Result], folder: Path, title: str, *, static: bool = False
) -> None:
    """Write the page and the tables of `results` into `folder`; see `write_page` for the rest."""
    rows = [result.entry for result in results]
    names = tell_apart([row.name for row in rows])
    reports = {name: row.report for name, row in zip(names, rows, strict=True)}
    notes = {name: row.notes for name, row in zip(names, rows, strict=True)}
    tables = to_markdown(reports, notes)
    if any(result.method != NONE for result in results):
        by_method = {(r.run, r.method): r.entry.report for r in results}
        tables += "\n" + posthoc_table(by_method).markdown()
    (folder / "table.md").write_text(tables, encoding="utf-8")
    (folder / "table.csv").write_text(to_csv(reports), encoding="utf-8")
    shifted = {
        name: {CLEAN: row.report, **row.shifts}
        for name, row in zip(names, rows, strict=True)
        if row.shifts
    }
    if shifted:
        scores = to_plain({"scores": shift_records(shifted)})
        (folder / SHIFT_FILE).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
        text = "\n".join(table.markdown() for table in shift_tables(shifted))
        (folder / "shift.md").write_text(text, encoding="utf-8")
        (folder / "shift.csv").write_text(shift_csv(shifted), encoding="utf-8")
    write_page(rows, folder / PAGE, title=title, comparison=compare_results(results), static=static)


def compare_results(results: Sequence[Result]) -> Comparison | None:
    """How models differ, the seeds of a model taken together; None if that is not known.

    Runs are one model if their names differ in a part such as "seed3" alone.
    """
    models: dict[str, list[CalibrationMeter | Path]] = {}
    for result, name in zip(results, tell_apart([r.entry.name for r in results]), strict=True):
        if result.meter is None or not result.entry.report.intervals:
            return None
        run = _SEED.sub("", result.run)
        model = name if run in (result.run, "") else entry_name(run, result.method)
        models.setdefault(model, []).append(result.meter)
    if not 1 < len(models) <= _MOST_COMPARED:
        return None
    try:
        return compare_models({name: list(map(_loaded, some)) for name, some in models.items()})
    except ValueError as error:  # such as other images
        log.warning("the models are not compared: %s", error)
        return None


def _loaded(meter: CalibrationMeter | Path) -> CalibrationMeter:
    return CalibrationMeter.load(meter) if isinstance(meter, Path) else meter


def open_page(path: Path) -> None:
    """Show a page in the reader's browser, if there is one."""
    if not webbrowser.open(path.resolve().as_uri()):
        log.warning("there is no browser to open %s", path)


def write_result(
    result: Result, drawn: Sequence[Overlay], folder: Path, *, key: str = ""
) -> Result:
    """Write `report.json` and the images drawn for it; the result with these as its overlays.

    Args:
        result: what was found.
        drawn: panels of images.
        folder: where to write.
        key: a digest of what the result depends on, by which `kept_report` knows it again.
    """
    (folder / OVERLAYS if drawn else folder).mkdir(parents=True, exist_ok=True)
    overlays = []
    stems = tell_apart([file_name(overlay.name) for overlay in drawn])
    for overlay, stem in zip(drawn, stems, strict=True):
        overlays.append(
            {
                "name": overlay.name,
                "image": overlay.of,
                "file": f"{stem}.png",
                "ece": overlay.ece,
                "class_names": list(overlay.class_names),
            }
        )
        (folder / OVERLAYS / f"{stem}.png").write_bytes(overlay.png())
    with ThreadPoolExecutor() as pool:  # compressing holds no lock of the interpreter
        files = [folder / OVERLAYS / f"{stem}.npz" for stem in stems]
        list(pool.map(_save_arrays, files, [overlay.arrays for overlay in drawn]))
    panel = result.entry.shift_overlay
    if panel is not None:
        (folder / SHIFT_PANEL).write_bytes(panel.png)
    about = {
        "run": result.run,
        "method": result.method,
        "key": key,
        "shifts": list(result.entry.shifts),
        "shift_overlay": None if panel is None else panel.name,
        "skipped": dict(result.entry.skipped),
        "overlays": overlays,
        "config": result.entry.config,
        "history": [dict(record) for record in result.entry.history],
    }
    text = json.dumps({**result.entry.report.to_dict(), "about": to_plain(about)}, allow_nan=False)
    with atomic_write(folder / REPORT) as file:
        file.write(text + "\n")
    return replace(result, entry=replace(result.entry, overlays=drawn))


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """What np.savez_compressed writes, in half its time and with 5 % more bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_report(report: Report, folder: str | os.PathLike[str], *, name: str = "model") -> Path:
    """Write report.json, tables, figures and the page of one report; the path of the page.

    Args:
        report: what was measured, by whatever counted with a `CalibrationMeter`.
        folder: where to write; files of other names in it stay.
        name: what tables call the model.
    """
    with new_contents(Path(folder)) as new:
        result = write_result(Result(name, NONE, PageRow(name, report)), [], new)
        write_pages([result], new, name)
    return Path(folder) / PAGE


def read_result(path: Path) -> Result:
    """The result in a `report.json`, or in any file that `Report.save` wrote.

    Raises:
        ValueError: the file is neither; the message names it.
    """
    settle(path.parent)
    report = Report.load(path)
    about = json.loads(path.read_text(encoding="utf-8")).get("about", {})
    try:
        run, method = str(about.get("run", _name(path))), str(about.get("method", NONE))
        entry = PageRow(
            name=entry_name(run, method),
            report=report,
            history=check_history(about.get("history", [])),
            config=str(about.get("config", "")),
            overlays=_read_overlays(
                about.get("overlays", []), path.parent / OVERLAYS, class_names(report)
            ),
            skipped=dict(about.get("skipped", {})),
            shifts=_read_shifts(about.get("shifts", []), path.parent),
            shift_overlay=_read_shift_overlay(about.get("shift_overlay"), path.parent),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: Expected a report of segcal, but got {error!r}") from None
    state = path.with_name(STATE)
    return Result(run, method, entry, state if path.name == REPORT and state.is_file() else None)


def check_history(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of a log, one per epoch.

    Raises:
        TypeError, ValueError or OverflowError: they hold something else than numbers.
    """
    for record in records:
        for value in record.values():
            if value is not None and not isinstance(value, int | float):
                raise TypeError(f"{value!r:.60} in the log")
            float(value or 0)
    return [dict(record) for record in records]


def shift_states(folder: Path) -> dict[Shift, Path]:
    """The states under each shift that the results in `folder` list.

    Args:
        folder: `eval` of a run, or `eval/posthoc/METHOD`.
    """
    entry = read_result(folder / REPORT).entry
    shifts = [shift for text in entry.shifts for shift in parse_shifts(text)]
    states = {shift: shift_folder(folder, shift) / STATE for shift in shifts}
    if not states:
        raise ValueError(
            f"Expected results under shift in {folder}, but found none; run segcal eval --shift"
        )
    return states


def kept_report(folder: Path, key: str) -> Report | None:
    """The report that `write_result` wrote to `folder` under `key`, with its state beside it."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if data["about"]["key"] == key and (folder / STATE).is_file():
            return Report.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is damaged: it is made again
    return None


def entry_name(run: str, method: str) -> str:
    """What tables call a run after a post-hoc method."""
    return run if method == NONE else f"{run} + {method.upper()}"


def file_name(name: str) -> str:
    """A name for a file: only letters, digits and + . _ -, no dot in front, not too long."""
    kept = re.sub(r"[^\w.+-]+", "-", name).encode("utf-8", "replace")[:_MAX_NAME]
    return kept.decode("utf-8", "ignore").strip(".-") or "image"


def _read_overlays(
    listed: Sequence[Mapping[str, Any]], folder: Path, class_names: Sequence[str]
) -> list[Overlay]:
    """The overlays that are still there."""
    found = []
    for item in listed:
        path = (folder / Path(item["file"]).name).with_suffix(".npz")  # no other folder
        if not path.is_file():
            continue
        with Npz(path) as stored:
            arrays = {key: stored[key] if key in stored.keys else None for key in _ARRAYS}
        ece = None if item["ece"] is None else float(item["ece"])
        names = tuple(map(str, item.get("class_names", ()))) or class_names
        of = str(item.get("image", ""))
        found.append(Overlay(str(item["name"]), **arrays, class_names=names, ece=ece, of=of))
    return found


def _read_shifts(listed: Sequence[str], folder: Path) -> dict[str, Report]:
    """The reports under shift that are still there."""
    found = {}
    for text in listed:
        (shift,) = parse_shifts(text)
        path = shift_folder(folder, shift) / REPORT
        if path.is_file():
            found[str(shift)] = Report.load(path)
    return found


def _read_shift_overlay(name: str | None, folder: Path) -> Picture | None:
    path = folder / SHIFT_PANEL
    return Picture(str(name), path.read_bytes()) if name and path.is_file() else None


def _name(path: Path) -> str:
    """What to call a report that does not say: its run, or its file."""
    if path.name == REPORT:
        parent = path.resolve().parent
        return parent.parent.name if parent.name == EVAL else parent.name
    return path.stem
