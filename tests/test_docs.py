"""What the pages name exists: files, functions, options, commands; and the README's code runs."""

import contextlib
import importlib
import io
import os
import re
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from reproduction import command as reproduction_command

import segcal
from segcal.cli import COMMANDS, main
from segcal.data import DATASETS
from segcal.posthoc import METHODS
from segcal.sources.readers import READERS
from tests.support import ROOT
from tests.support.holdouts import random_holdout

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "data" / "README.md")
    if path.name != "CHANGELOG.md"  # which names what is gone
}
PARTS = {path.stem for path in (ROOT / "segcal").iterdir() if not path.name.startswith("_")}
TOOLS = {"train_seg": "train", "eval_calib": "eval"}


def code_words(text):
    """What stands between backticks in running text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def test_paths_exist():
    missing = []
    for page, text in PAGES.items():
        named = re.findall(r"(?<![\w/.])(?:segcal|tools|tests|configs|docs|\.ci)/[\w./*-]*\w", text)
        named += re.findall(r"(?<![\w/.])(?:[\w-]+/)+[\w-]+\.(?:py|yaml)\b", text)
        for name in named:
            if not any([*ROOT.glob(name), *(ROOT / "segcal").glob(name)]):
                missing.append((page, name))
        links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
        links += re.findall(r'<img src="([^"]+)"', text)
        missing += [
            (page, link) for link in links if not (ROOT / page).parent.joinpath(link).exists()
        ]
    assert missing == []


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


def test_dotted_names_exist():
    """`segcal.metrics.paired_differences`, `training.step.Learner.step`, `Criterion.terms`."""
    words = [
        (page, re.split(r"[(\[]", word)[0])
        for page, text in PAGES.items()
        for word in code_words(text)
    ]
    assert [(page, word) for page, word in words if not is_defined(word)] == []


def test_names_said_to_be_in_a_file_are_there():
    """`segcal/losses/base.py`: `brier`, `ls`."""
    missing = []
    for page, text in PAGES.items():
        found = re.findall(r"`(segcal/[\w/]+)\.py`: ((?:`[^`]+`(?:, )?)+)", text)
        for path, names in found:
            for name in re.findall(r"`([\w.]+)", names):
                if not is_defined(f"{path.replace('/', '.')}.{name}"):
                    missing.append((page, path, name))
    assert missing == []


def test_what_can_be_asked_for_by_name_is_on_its_pages():
    wanted = {
        "docs/choosing.md": METHODS,
        "docs/evaluation.md": METHODS,
        "data/README.md": DATASETS,
        "docs/networks.md": (f"{kind}:" for kind in READERS),
    }
    missing = [
        (page, name)
        for page, names in wanted.items()
        for name in names
        if not any(word.startswith(name) for word in code_words(PAGES[page]))
    ]
    assert missing == []


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


def test_options_exist():
    found = [(page, option) for page, text in PAGES.items() for option in wrong_options(text)]
    assert found == []


def test_lists_begin_after_an_empty_line():
    """Elsewhere than on GitHub they are text of the paragraph before."""
    found = []
    for page, text in PAGES.items():
        prose = re.sub(r"(?ms)^```.*?^```", "", text)
        found += [(page, line) for line in re.findall(r"(?m)^[^\s#|<-][^\n]*\n- .*", prose)]
    assert found == []


def test_wrong_options_are_found():
    text = "segcal eval --posthoc ts --seeds 3\n`--no-such-option` `--optim.lr`\n"
    text += "torchrun --nproc-per-node 8 tools/train_seg.py --epochs 1 --num-bins 15 # --comment"
    assert list(wrong_options(text)) == ["eval --seeds", "train --num-bins", " --no-such-option"]


def test_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGES["README.md"], flags=re.S)
    (code,) = [block for block in blocks if "build_loss" in block]
    holdout = random_holdout(k=21)
    logits, labels = holdout[0]
    names = {"logits": logits.requires_grad_(), "labels": labels, "holdout_batches": holdout}
    exec(code, names)
    names["loss"].backward()
    assert logits.grad.isfinite().all() and logits.grad.any()
    assert segcal.Report.load("report.json") == names["report"]
    expected = logits / names["calibrator"].temperature_
    torch.testing.assert_close(names["calibrated"], expected)


def test_the_pipeline_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("val", "test"):
        for folder in (part, f"{part}annot"):
            (tmp_path / "ROOT" / folder).mkdir(parents=True)
        for i in range(2):
            values = np.random.default_rng(i).integers(0, 11, (24, 32), dtype=np.uint8)
            Image.fromarray(values).save(tmp_path / "ROOT" / f"{part}annot" / f"{i}.png")
            Image.fromarray(values).convert("RGB").save(tmp_path / "ROOT" / part / f"{i}.png")
    (tmp_path / "glue.py").write_text(
        "import torch\n\ndef network():\n    return torch.nn.Conv2d(3, 11, 1)\n"
    )
    blocks = re.findall(r"```python\n(.*?)```", PAGES["README.md"], flags=re.S)
    (code,) = [block for block in blocks if "evaluate_source" in block]
    names = {}
    exec(code, names)
    assert ("ts", "fog:3") in names["result"].reports and (
        tmp_path / "folder/report.html"
    ).is_file()


def test_accumulation_as_the_docs_have_it_is_exact_for_means_over_pixels():
    blocks = re.findall(r"```python\n(.*?)```", PAGES["docs/choosing.md"], flags=re.S)
    (code,) = [block for block in blocks if "micro_batches" in block]
    images, labels = torch.randn(4, 3, 5, 5), torch.randint(4, (4, 5, 5))
    labels[0, :4] = 255
    model = torch.nn.Conv2d(3, 4, 1)
    micro_batches = list(zip(images.chunk(4), labels.chunk(4), strict=True))
    names = {"segcal": segcal, "model": model, "micro_batches": micro_batches}
    exec(code.replace("fl+mdca", "nll"), names | {"optimizer": torch.optim.SGD([torch.zeros(1)])})
    whole = torch.nn.functional.cross_entropy(model(images), labels, ignore_index=255)
    expected = torch.autograd.grad(whole, model.weight)[0]
    torch.testing.assert_close(model.weight.grad, expected)


def test_a_release_has_whole_addresses(tmp_path):
    """The step of release.yml leaves no link in the README that needs a file beside it."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    (script,) = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "name" in step][:1]
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    place = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "us/segcal"}
    command = ["bash", "-euc", script]
    environment = {**os.environ, **place, "GITHUB_REF_NAME": "v1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text)
    assert len(links) > 10 and all("".join(link).startswith("https://") for link in links)
    assert "](https://host/us/segcal/blob/v1/docs/networks.md)" in text
    urls = (tmp_path / "pyproject.toml").read_text().partition("[project.urls]")[2]
    assert '\nRepository = "https://host/us/segcal"\n' in urls


def test_the_citation_has_the_version():
    assert f"version: {segcal.__version__}\n" in (ROOT / "CITATION.cff").read_text()
