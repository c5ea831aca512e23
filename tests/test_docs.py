"""What the pages name exists: files, functions, options, commands; and the README's code runs."""

import contextlib
import importlib
import io
import re
from functools import cache

import pytest
import torch
from reproduction import command as reproduction_command

import segcal
from segcal.cli import COMMANDS, main
from segcal.posthoc import METHODS
from tests.support import ROOT
from tests.support.holdouts import random_holdout

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "data" / "README.md"]
PARTS = {path.stem for path in (ROOT / "segcal").iterdir() if not path.name.startswith("_")}
TOOLS = {"train_seg": "train", "eval_calib": "eval"}

every_page = pytest.mark.parametrize(
    "page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT))
)


def code_words(text):
    """What stands between backticks in running text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


@every_page
def test_paths_exist(page):
    text = page.read_text()
    named = re.findall(r"(?<![\w/.])(?:segcal|tools|tests|configs|docs|\.ci)/[\w./*-]*\w", text)
    named += re.findall(r"(?<![\w/.])(?:[\w-]+/)+[\w-]+\.(?:py|yaml)\b", text)
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
    links += re.findall(r'<img src="([^"]+)"', text)
    missing = {name for name in named if not any([*ROOT.glob(name), *(ROOT / "segcal").glob(name)])}
    missing |= {link for link in links if not (page.parent / link).exists()}
    assert missing == set()


def member(owner, name):
    """An attribute of a module or class, or the type of a field; raises AttributeError."""
    fields = getattr(owner, "__annotations__", {})
    return fields[name] if name in fields else getattr(owner, name)


def resolve(name):
    """The module, function or class of a dotted name; raises AttributeError or ImportError."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            found = member(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:at]))
    return found


@cache
def classes():
    """Every class of segcal by name."""
    found = {}
    for path in (ROOT / "segcal").rglob("*.py"):
        if path.stem != "__main__":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            module = importlib.import_module(name)
            found |= {key: value for key, value in vars(module).items() if isinstance(value, type)}
    return found


@cache
def help_of(command):
    """The help text of a command of segcal, or of tools/reproduce.py."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        if command == "reproduce":
            reproduction_command.reproduce("", ["--help"])
        else:
            main([command, "--help"])
    if command == "train":  # hyper-parameters of losses are options too
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            main([command, "--list-losses"])
    return text.getvalue()


def has_option(command, flag):
    flag = re.escape(flag.replace("_", "-"))
    text = help_of(command).replace("_", "-")
    return re.search(rf"^ +(-h, )?{flag}\b", text, flags=re.M) is not None


def is_defined(word):
    """Whether a dotted name in code is there; True for what does not look like a name of ours."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", word) or word.endswith(".py"):
        return True
    if has_option("train", f"--{word}"):  # an option in a YAML file
        return True
    top, *rest = word.split(".")
    try:
        if top in classes():
            member(classes()[top], rest[0])
        elif top in PARTS:
            resolve(f"segcal.{word}")
        elif top in ("segcal", "reproduction"):
            resolve(word)
    except (ImportError, AttributeError):
        return False
    return True


@every_page
def test_dotted_names_exist(page):
    """`segcal.metrics.paired_differences`, `training.step.Learner.step`, `Criterion.terms`."""
    words = [re.split(r"[(\[]", word)[0] for word in code_words(page.read_text())]
    assert [word for word in words if not is_defined(word)] == []


@every_page
def test_names_said_to_be_in_a_file_are_there(page):
    """`segcal/losses/base.py`: `brier`, `ls`."""
    found = re.findall(r"`(segcal/[\w/]+)\.py`: ((?:`[^`]+`(?:, )?)+)", page.read_text())
    for path, names in found:
        for name in re.findall(r"`([\w.]+)", names):
            assert is_defined(f"{path.replace('/', '.')}.{name}"), name


@pytest.mark.parametrize("page", ["choosing", "evaluation"])
def test_every_posthoc_method_is_on_the_page(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [name for name in METHODS if name not in code_words(text)] == []


def test_undefined_names_are_found():
    for word in ("segcal.no", "metrics.scores.no", "Report.no", "reproduction.no", "viz.no.no"):
        assert not is_defined(word), word
    for word in ("segcal.Report", "Report.ece", "Run.config", "data.holdout", "report.json", "fl"):
        assert is_defined(word), word


def wrong_options(text):
    """Options that the command they are typed for does not have; alone, that no command has."""
    typed = re.findall(r"(?:\bsegcal (\w+)|tools/(\w+)\.py)([^`#\n]*)", text)
    alone = "\n".join(word for word in code_words(text) if word.startswith("--"))
    for command, tool, rest in [*typed, ("", "", alone)]:
        name = command or TOOLS.get(tool, tool)
        if name in ("", *COMMANDS, "reproduce"):
            names = [name] if name else [*COMMANDS, "reproduce"]
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", rest):
                if not any(has_option(name, flag) for name in names):
                    yield f"{name} {flag}"


@every_page
def test_options_exist(page):
    assert list(wrong_options(page.read_text())) == []


@every_page
def test_lists_begin_after_an_empty_line(page):
    """Elsewhere than on GitHub they are text of the paragraph before."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    assert re.findall(r"(?m)^[^\s#|<-][^\n]*\n- .*", text) == []


def test_wrong_options_are_found():
    text = "segcal eval --posthoc ts --seeds 3\n`--no-such-option` `--optim.lr`\n"
    text += "torchrun --nproc-per-node 8 tools/train_seg.py --epochs 1 --num-bins 15 # --comment"
    assert list(wrong_options(text)) == ["eval --seeds", "train --num-bins", " --no-such-option"]


def test_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    holdout = random_holdout(k=21)
    logits, labels = holdout[0]
    names = {"logits": logits.requires_grad_(), "labels": labels, "holdout_batches": holdout}
    exec(code, names)
    names["loss"].backward()
    assert logits.grad.isfinite().all() and logits.grad.any()
    assert segcal.Report.load("report.json") == names["report"]
    expected = logits / names["calibrator"].temperature_
    torch.testing.assert_close(names["calibrated"], expected)


def test_the_citation_has_the_version():
    assert f"version: {segcal.__version__}\n" in (ROOT / "CITATION.cff").read_text()
