"""Settings: what wins, what is refused and how, and that they survive the run folder."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from segcal.config import (
    TrainConfig,
    differences,
    load_config,
    parse_train,
    save_config,
    to_dict,
    with_defaults,
)
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, all_terms
from tests.support import ROOT


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return to_file


def test_defaults():
    config, resume = parse_train([])
    assert config == TrainConfig() and not resume
    assert config.loss == "fl+mdca" and config.data.name == "scenes"


def test_short_and_dotted_options():
    arguments = (
        "--loss fl+mdca --beta 5 --gamma 2 --epochs 7 --out x --seed 3 --device cpu --resume "
        "--optim.lr 1e-2 --schedule.name multistep --schedule.milestones [2,4] --compile true "
        "--optim.clip 1 --data.name digits --model.name resnet20"
    )
    config, resume = parse_train(arguments.split())
    assert (config.beta, config.gamma, config.epochs, config.seed) == (5.0, 2.0, 7, 3)
    assert (config.out, config.device, resume, config.compile) == ("x", "cpu", True, True)
    assert (config.optim.lr, config.optim.clip) == (0.01, 1.0)
    assert config.schedule.milestones == (2, 4)
    assert (config.data.name, config.model.name) == ("digits", "resnet20")


def test_the_command_line_wins_over_files_wherever_it_stands(write):
    one = write("epochs: 7\nloss: nll\noptim:\n  lr: 0.5\n  momentum: 0.8\n", "one.yaml")
    two = write("optim: {lr: 1e-3}\n", "two.yaml")
    config, _ = parse_train(["--epochs", "5", "--config", one, f"--config={two}"])
    assert (config.epochs, config.loss) == (5, "nll")
    assert (config.optim.lr, config.optim.momentum) == (1e-3, 0.8)  # files add up, the later wins


def test_no_config_at_all_is_the_scenes():
    assert load_config(ROOT / "configs/scenes.yaml") == TrainConfig()


def test_only_what_is_set_reaches_the_loss():
    assert parse_train(["--loss", "nll"])[0].hyper == {}
    arguments = ["--loss", "LS+MMCE+ACE", "--alpha", "0.2", "--sample", "64", "--soft", "true"]
    assert parse_train(arguments)[0].hyper == {"alpha": 0.2, "sample": 64, "soft": True}


@pytest.mark.parametrize("text", ["mdca=1,MMCE=0.1", "{mdca: 1, mmce: 0.1}"])
def test_weights_of_auxiliaries_by_name(text, write):
    by_file = load_config(Path(write(f"loss: nll+mdca+mmce\nbeta: {text}\n")))
    by_option, _ = parse_train(["--loss", "nll+mdca+mmce", "--beta", text])
    assert by_option == by_file
    assert by_option.hyper == {"beta": {"mdca": 1.0, "mmce": 0.1}}
    assert parse_train(["--beta", "5"])[0].hyper == {"beta": 5.0}


def test_options_of_earlier_versions_have_their_present_names(write):
    text = "loss: nll+mmce\nmmce_bandwidth: 0.2\nmmce_sample: null\n"
    config = load_config(Path(write(text)))
    assert config.hyper == {"bandwidth": 0.2}
    earlier = {**to_dict(config), "mmce_bandwidth": 0.2}
    del earlier["bandwidth"]
    assert with_defaults(earlier) == to_dict(config)


def test_every_hyper_parameter_of_a_loss_is_an_option():
    options = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for term in all_terms():
        for name in term.hyper.keys() - {"seed"}:
            assert options[name].default is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optim.lr fast", "Expected optim.lr to be a number, but got fast"),
        ("--epochs 2.5", "Expected epochs to be a whole number, but got 2.5"),
        ("--beta x", "Expected beta to be a number, or numbers by name as in mdca=1,cp=0.1"),
        ("--compile maybe", "Expected compile to be true or false, but got maybe"),
        ("--optim.name rms", "Expected optim.name to be one of sgd, adam, adamw, but got rms"),
        ("--schedule.milestones [a]", "Expected schedule.milestones to be a list"),
        ("--epochs 0", "Expected epochs >= 1, but got 0"),
        ("--seed -1", "Expected seed >= 0, but got -1"),
        ("--ema 1.5", "Expected ema between 0 and 1, but got 1.5"),
        ("--epoch 3", "Unknown option epoch; did you mean epochs?"),
        ("--clip 3", "Unknown option clip; did you mean optim.clip?"),
        ("--optim.lrr=3", "Unknown option optim.lrr; did you mean optim.lr?"),
        ("runs/x", "Unknown option runs/x"),
        ("--epochs", "expected one argument"),
        ("--loss focal", "Expected a loss BASE or BASE+AUX"),
        ("--beta mmce=1", "Expected beta for mdca, but got mmce"),
        ("--loss nll+mdca+dca --beta 1", "Expected beta to name its auxiliary"),
        ("--loss nll --beta mdca=1", "Expected options that --loss nll takes (it has none)"),
        ("--loss nll --gamma 3", "Expected options that --loss nll takes (it has none)"),
        ("--loss fl+mdca --alpha 1", "takes (beta, gamma), but got alpha"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message):
    with pytest.raises(ValueError) as caught:
        parse_train(arguments.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lrr: 3\n", "Unknown option optim.lrr; did you mean optim.lr?"),
        ("clip: 3\n", "Unknown option clip; did you mean optim.clip?"),
        ("epochs: many\n", "Expected epochs to be a whole number, but got many"),
        ("optim: [3\n", "line 2"),
        ("optim: 3\n", "Expected options under optim"),
        ("optim:\n", "Expected options under optim"),
        ("just text\n", "Expected options (key: value)"),
        ("", "Expected options (key: value)"),
        ("- 1\n", "Expected options (key: value)"),
        ("loss: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(write, text, message):
    path = write(text)
    with pytest.raises(ValueError) as caught:
        parse_train(["--config", path])
    assert message in str(caught.value) and path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="Expected a YAML file at .*no.yaml"):
        parse_train(["--config", str(tmp_path / "no.yaml")])
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="x.yaml is not text"):
        parse_train(["--config", str(tmp_path / "x.yaml")])


def test_the_saved_settings_are_the_settings(tmp_path):
    config, _ = parse_train(
        ["--loss", "nll+mmce", "--bandwidth", "0.2", "--data.scale", "[0.5,2]", "--ema", "0.9"]
    )
    save_config(config, tmp_path / "config.yaml", "a header")
    assert load_config(tmp_path / "config.yaml") == config
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith("# a header\n") and yaml.safe_load(text) == to_dict(config)


def test_differences_name_dotted_keys():
    one = to_dict(TrainConfig())
    other = to_dict(parse_train(["--optim.lr", "7", "--gamma", "2"])[0])
    assert differences(one, other) == {"optim.lr": 7.0, "gamma": 2.0}
    assert differences(one, one) == {}


def test_a_resumed_run_brings_its_own_settings(tmp_path, write):
    config, _ = parse_train(["--gamma", "2", "--out", str(tmp_path)])
    save_config(config, tmp_path / "config.yaml", "")
    assert parse_train(["--resume", "--out", str(tmp_path)]) == (config, True)
    assert parse_train(["--resume", f"--out={tmp_path}", "--epochs", "9"])[0] == (
        dataclasses.replace(config, epochs=9)
    )
    other = write("gamma: 1\n", "other.yaml")
    assert parse_train(["--resume", "--out", str(tmp_path), "--config", other])[0].gamma == 1
    # As everywhere, the last of two values counts.
    twice = ["--resume", "--out", str(tmp_path / "other"), f"--out={tmp_path}"]
    assert parse_train(twice) == (config, True)


def test_folder_of_a_run():
    assert parse_train([])[0].folder == Path("runs/scenes-small_unet-fl+mdca")
    odd, _ = parse_train(["--model.name", "timm:resnet18", "--loss", "NLL"])
    assert odd.folder == Path("runs/scenes-timm-resnet18-nll")


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_train(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for key in ("--loss", "--optim.lr", "--schedule.warmup", "--data.root", "--model.encoder"):
        assert key in text
    assert "samples of one optimizer step" in text.lower().replace("\n", " ")
    words = re.split(r"[\s,]+", text)
    assert all(name in words for name in (*BASE_LOSSES, *AUXILIARY_LOSSES))
    assert "(type:" in text and ":  (type" not in text


def test_print_config_is_a_config(capsys, write):
    with pytest.raises(SystemExit):
        parse_train(["--gamma", "2", "--print_config"])
    printed = write(capsys.readouterr().out)
    assert load_config(printed) == TrainConfig(gamma=2.0)


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
    assert parse_train(["--config", "scenes"])[0] == TrainConfig()
    assert parse_train(["--config=small/scenes"])[0].model.width == 8
    Path("scenes").write_text("epochs: 1")
    assert parse_train(["--config", "scenes"])[0].epochs == 1
    with pytest.raises(FileNotFoundError, match="at voc2012_deeplab, .*; is it the recipe voc2012"):
        parse_train(["--config", "voc2012_deeplab"])


def test_settings_of_an_earlier_version_have_the_defaults_of_newer_options():
    config = to_dict(parse_train(["--optim.lr", "7", "--gamma", "2"])[0])
    earlier = {key: value for key, value in config.items() if key != "ema"}
    earlier["data"] = {"name": config["data"]["name"]}
    assert differences(with_defaults(earlier), config) == {}
    earlier["data"] = {"name": "digits"}
    assert differences(with_defaults(earlier), config) == {"data.name": "scenes"}
