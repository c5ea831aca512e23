"""Settings of a training: what wins, what is refused and how, recipes, and the run folder."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from segcal import settings
from segcal.data.options import DATASETS
from segcal.data.options import find as find_data
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES
from segcal.models.options import MODELS
from segcal.models.options import find as find_model
from segcal.training.config import (
    TrainConfig,
    _with_hyper,
    help_text,
    list_losses,
    list_recipes,
    load_config,
    parse_train,
)
from tests.support import ROOT


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return to_file


def test_defaults_are_the_scenes():
    config, resume = parse_train([])
    assert config == TrainConfig() and not resume
    recipe = settings.to_dict(load_config(ROOT / "configs/scenes.yaml"))
    # The recipe states a longer warm-up than a tenth of the training.
    assert settings.differences(settings.to_dict(config), recipe) == {"schedule.warmup": 2.5}


def test_short_and_dotted_options():
    arguments = (
        "--loss fl+mdca --beta 5 --gamma 2 --epochs 7 --out x --seed 3 --device cpu --resume "
        "--optim.lr 1e-2 --schedule.name multistep --schedule.milestones [2,4] --compile true "
        "--optim.clip 1 --data.name digits --model.name resnet20 --batch-size 8"
    )
    config, resume = parse_train(arguments.split())
    assert (config.beta, config.hyper, config.epochs, config.seed) == (5.0, {"gamma": 2}, 7, 3)
    assert (config.out, config.device, resume, config.compile) == ("x", "cpu", True, True)
    assert (config.optim.lr, config.optim.clip, config.batch_size) == (0.01, 1.0, 8)
    assert config.schedule.milestones == (2, 4)
    assert (config.data.name, config.model.name) == ("digits", "resnet20")


def test_the_command_line_wins_over_files_wherever_it_stands(write):
    one = write("epochs: 7\nloss: nll\noptim:\n  lr: 0.5\n  momentum: 0.8\n", "one.yaml")
    two = write("optim: {lr: 1e-3}\n", "two.yaml")
    config, _ = parse_train(["--epochs", "5", "--config", one, f"--config={two}"])
    assert (config.epochs, config.loss) == (5, "nll")
    assert (config.optim.lr, config.optim.momentum) == (1e-3, 0.8)  # files add up, the later wins


def test_unknown_names_of_numbers_are_hyper_parameters_of_the_loss(write):
    arguments = ["--loss", "LS+MMCE+ACE", "--alpha", "0.2", "--sample", "64", "--soft", "true"]
    config, _ = parse_train(arguments)
    assert config.hyper == {"alpha": 0.2, "sample": 64, "soft": True}
    text = "loss: LS+MMCE+ACE\nalpha: 0.2\nsample: 64\nsoft: true\nbins: null\n"
    assert load_config(Path(write(text))) == config
    assert parse_train(["--config", write("gamma: 1.5\n"), "--gamma", "2"])[0].hyper["gamma"] == 2
    for loss in (*BASE_LOSSES.values(), *AUXILIARY_LOSSES.values()):
        for name in loss.hyper.keys() - {"seed"}:  # none of them looks like another option
            assert _with_hyper({name: 1}) == {f"hyper.{name}": 1}


@pytest.mark.parametrize("text", ["mdca=1,MMCE=0.1", "{mdca: 1, mmce: 0.1}"])
def test_weights_of_auxiliaries_by_name(text, write):
    config = load_config(Path(write(f"loss: nll+mdca+mmce\nbeta: {text}\n")))
    assert config.beta == {"mdca": 1.0, "mmce": 0.1}
    assert parse_train(["--loss", "nll+mdca+mmce", "--beta", "mdca=1,MMCE=0.1"])[0] == config


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--optim.lr fast", "--optim.lr: expected a number"),
        ("--schedule.milestones [a]", "schedule.milestones"),
        ("--epochs 0", "epochs"),
        ("--seed -1", "seed"),
        ("--ema 1.5", "ema"),
        ("--epoch 3", "did you mean epochs?"),
        ("--clip 3", "did you mean optim.clip?"),
        ("runs/x", "runs/x"),
        ("--epochs", "epochs"),
        ("--loss focal", "BASE"),
        ("--beta mmce=1", "mmce"),
        ("--loss nll+mdca+dca --beta 1", "beta"),
        ("--loss nll --gamma 3", "gamma"),
        ("--loss fl+mdca --alpha 1", "alpha"),
        ("--model.freeze true", "model.freeze"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, word):
    with pytest.raises(ValueError) as caught:
        parse_train(arguments.split())
    assert word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("optim:\n  lrr: 3\n", "did you mean optim.lr?"),
        ("clip: 3\n", "did you mean optim.clip?"),
        ("epochs: many\n", "a whole number"),
        ("epochs: 0\n", "epochs"),
        ("optim: [3\n", "line 2"),
        ("optim:\n", "optim"),
        ("just text\n", "options"),
        ("", "options"),
        ("loss: !!python/object/apply:os.getcwd []\n", "constructor"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(write, text, word):
    path = write(text)
    with pytest.raises(ValueError) as caught:
        load_config(Path(path))
    assert word in str(caught.value) and path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.yaml"):
        parse_train(["--config", str(tmp_path / "no.yaml")])
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"x.yaml: not YAML"):
        parse_train(["--config", str(tmp_path / "x.yaml")])


def test_a_resumed_run_brings_its_own_settings(tmp_path, write):
    config, _ = parse_train(["--gamma", "2", "--out", str(tmp_path), "--data.scale", "[0.5,2]"])
    settings.save(config, tmp_path / "config.yaml", "a header")
    assert load_config(tmp_path / "config.yaml") == config
    assert parse_train(["--resume", "--out", str(tmp_path)]) == (config, True)
    longer = parse_train(["--resume", f"--out={tmp_path}", "--epochs", "9"])[0]
    assert longer == dataclasses.replace(config, epochs=9)
    other = write("gamma: 1\n", "other.yaml")
    named, _ = parse_train(["--resume", "--out", str(tmp_path), "--config", other])
    assert named.hyper == {"gamma": 1}
    # As everywhere, the last of two values counts.
    twice = ["--resume", "--out", str(tmp_path / "other"), f"--out={tmp_path}"]
    assert parse_train(twice) == (config, True)


def test_folder_of_a_run():
    assert parse_train([])[0].folder == Path("runs/scenes-small_unet-fl+mdca")
    odd, _ = parse_train(["--model.name", "timm:resnet18", "--loss", "NLL"])
    assert odd.folder == Path("runs/scenes-timm-resnet18-nll")


def test_help_explains_every_option_without_torch():
    text = " ".join(help_text("segcal train").split())
    for option in settings.options(TrainConfig):
        assert f"--{option.name.replace('_', '-')} (" in text and option.about, option.name
    for entries in (DATASETS, MODELS):
        assert all(name in text and entry.about in text for name, entry in entries.items())
    assert "For voc2012. Default: null." in text  # of holdout_split
    code = (
        "import sys\nfrom segcal.training.config import parse_train\n"
        "try:\n    parse_train(['--help'])\nexcept SystemExit as stop:\n"
        "    print(stop.code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.endswith("0 False\n"), found.stderr


def test_lists():
    losses = list_losses("segcal train")
    assert all(f"  {name} " in losses for name in (*BASE_LOSSES, *AUXILIARY_LOSSES))
    assert "--gamma 3.0" in losses
    found = list_recipes("segcal train")
    assert "small/scenes" in found and "expected: " in found


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_say_what_they_cost(path):
    load_config(path)
    stated = yaml.safe_load(path.read_text())
    # Unstated options would be those of the scenes.
    assert {"name", "lr", "weight_decay"} <= stated["optim"].keys()
    assert {"name", "warmup"} <= stated["schedule"].keys()
    assert not stated["schedule"]["warmup"] or "warmup_factor" in stated["schedule"]
    header = path.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    assert f"python tools/train_seg.py --config configs/{path.name}" in header[0]
    assert any(line.startswith("# cost: ") for line in header)
    assert any(line.startswith("# expected: ") for line in header)


def test_recipes_are_found_by_name_and_files_go_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_train(["--config", "scenes"])[0].schedule.warmup == 2.5
    assert parse_train(["--config=small/scenes"])[0].model.width == 8
    Path("scenes").write_text("epochs: 1")
    assert parse_train(["--config", "scenes"])[0].epochs == 1
    with pytest.raises(FileNotFoundError, match=r"is it the recipe voc2012"):
        parse_train(["--config", "voc2012_deeplab"])


def other_value(value):
    """Another value than the default `value` of an option."""
    if isinstance(value, bool):
        return not value
    return "x" if value is None or isinstance(value, str) else value * 2 if value else 1.0


@pytest.mark.parametrize(("entries", "find"), [(DATASETS, find_data), (MODELS, find_model)])
def test_data_sets_and_networks_take_or_refuse_each_option(entries, find):
    kind = type(
        TrainConfig.__dataclass_fields__[
            "data" if entries is DATASETS else "model"
        ].default_factory()
    )
    names = {f.name: f.default for f in dataclasses.fields(kind) if f.name != "name"}
    taken = {name: set(getattr(e, "taken", e.options)) - {"name"} for name, e in entries.items()}
    assert set().union(*taken.values()) == set(names)  # each has a taker
    for name in entries:
        for option, default in names.items():
            config = kind(name, **{option: other_value(default)})
            if option in taken[name]:
                assert find(config) is entries[name]
            else:
                with pytest.raises(ValueError, match=rf"\.{option}: "):
                    find(config)
