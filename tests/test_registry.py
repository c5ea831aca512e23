"""What data sets, networks and calibrators declare: options are taken or refused, help is complete."""

import dataclasses
from types import SimpleNamespace

import pytest

from segcal import registry
from segcal.commands.options import parse_eval, parse_export
from segcal.config import train_parser
from segcal.data import DATASETS, find_dataset
from segcal.data.options import DataConfig
from segcal.models.build import MODELS, ModelConfig, build_model
from segcal.posthoc import METHODS

TAKEN = {
    DataConfig: {name: set(entry.taken) for name, entry in DATASETS.items()},
    ModelConfig: {name: {"name", *entry.options} for name, entry in MODELS.items()},
}
FIND = {DataConfig: find_dataset, ModelConfig: lambda c: build_model(c, num_classes=2)}
CASES = [(kind, name) for kind, entries in TAKEN.items() for name in entries]


def other_value(value):
    """Another value than the default `value` of an option."""
    if isinstance(value, bool):
        return not value
    return "x" if value is None or isinstance(value, str) else value * 2 if value else 1.0


@pytest.mark.parametrize("kind", TAKEN)
def test_declared_options_exist_and_each_has_a_taker(kind):
    options = {field.name for field in dataclasses.fields(kind)}
    assert set().union(*TAKEN[kind].values()) == options


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_option_is_taken_or_refused(kind, name):
    for field in dataclasses.fields(kind):
        changed = dataclasses.replace(kind(name), **{field.name: other_value(field.default)})
        if field.name == "name":
            continue
        if field.name not in TAKEN[kind][name]:
            with pytest.raises(ValueError, match=rf"Expected {field.name} to be unset for {name}"):
                FIND[kind](changed)
        elif kind is DataConfig:
            assert find_dataset(changed) is DATASETS[name]


def test_the_first_option_that_does_not_fit():
    assert registry.unfit_option(ModelConfig("x", width=3, norm="group"), ["name"]) == "width"
    assert registry.unfit_option(ModelConfig("x", width=3), ["name", "width"]) is None


WORDS = ("red", "blue", "red")


def test_names_of_one_kind_share_their_words():
    described = registry.describe(
        {name: SimpleNamespace(about=words) for name, words in zip("abc", WORDS, strict=True)}
    )
    assert described == "a, c (red); b (blue)"


def test_the_help_lists_every_name_and_who_takes_an_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")  # lines end at hyphens too
    text = " ".join(train_parser("segcal train").format_help().split())
    for option, entries in (("data.name", DATASETS), ("model.name", MODELS)):
        shown = text.partition(f"--{option} ")[2].partition(" --")[0]
        for name, entry in entries.items():
            assert name in shown and entry.about in shown
    assert "For voc2012. (type: str | null, default: null)" in text  # of holdout_split
    assert "Dropout after the ASPP. For deeplabv3plus, deeplabv3." in text
    for parse in (parse_eval, parse_export):
        with pytest.raises(SystemExit):
            parse(["--help"], "segcal")
        shown = " ".join(capsys.readouterr().out.split())
        assert all(f"{name} ({entry.about})" in shown for name, entry in METHODS.items())
