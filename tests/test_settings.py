"""Trees of dataclasses from YAML, dicts and command lines, and back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from segcal import settings
from segcal.files import read_yaml


@dataclass(frozen=True)
class Optim:
    """How fast.

    Attributes:
        lr: Learning rate
            at the start.
        betas: Two rates.
    """

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError("optim.lr must be positive")


@dataclass(frozen=True)
class Tree:
    """A tree.

    Attributes:
        epochs: Passes.
    """

    optim: Optim = field(default_factory=lambda: Optim(lr=0.5))
    epochs: int = 8
    batch_size: int = 4
    out: Path | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    beta: float | dict[str, float] | None = None
    hyper: dict[str, bool | int | float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    several: tuple[Optim, ...] = ()
    names: list[str] = field(default_factory=list)


def test_yaml_dicts_and_flags_give_the_same(tmp_path):
    nested = {"optim": {"lr": 1, "betas": [0.5, 0.6]}, "beta": {"mdca": 1}, "steps": [1, 2]}
    nested |= {"flag": True, "out": "x", "kind": "b", "hyper": {"gamma": 3, "soft": True}}
    (tmp_path / "a.yaml").write_text(
        "optim:\n  lr: 1e0\n  betas: [0.5, 0.6]\nbeta: {mdca: 1}\nsteps: [1, 2]\n"
        "flag: true\nout: x\nkind: b\nhyper: {gamma: 3, soft: true}\n"
    )
    line = "--optim.lr 1 --optim.betas=[0.5,0.6] --beta mdca=1 --steps 1,2 --flag --out x --kind b"
    flags = settings.read_flags([*line.split(), "--hyper", "gamma=3,soft=true"])
    built = settings.build(Tree, nested)
    assert built == settings.build(Tree, read_yaml(tmp_path / "a.yaml"), "a.yaml: ")
    assert built == settings.build(Tree, dict(flags), "--")
    assert built.optim == Optim(1.0, (0.5, 0.6)) and built.out == Path("x")
    assert built.hyper == {"gamma": 3, "soft": True} and isinstance(built.hyper["gamma"], int)


def test_later_layers_win_and_unstated_fields_keep_the_defaults_of_their_tree():
    one, two = {"optim": {"betas": [0, 0]}, "hyper": {"a": 1, "b": 2}}, {"hyper.b": "3"}
    built = settings.read(Tree, [("a: ", one), ("--", {"epochs": "2", "hyper": {"b": 3}})])
    assert built.optim == Optim(0.5, (0, 0)) and built.epochs == 2
    assert built.hyper == {"a": 1, "b": 3} == settings.read(Tree, [("", one), ("", two)]).hyper
    assert settings.build(Tree, {"several": [{"lr": 2}]}).several == (Optim(2.0),)


def test_flags():
    words = ["--batch-size", "3", "--flag", "--optim.lr=1e-3", "--epochs", "-1", "--epochs", "7"]
    flags = settings.read_flags(words)
    assert flags == [
        ("batch_size", "3"),
        ("flag", "true"),
        ("optim.lr", "1e-3"),
        ("epochs", "-1"),
        ("epochs", "7"),
    ]
    assert settings.build(Tree, dict(flags)).epochs == 7
    with pytest.raises(ValueError, match=r"--help"):
        settings.read_flags(["runs/x"])


def test_what_is_saved_is_read_again(tmp_path):
    tree = settings.build(Tree, {"hyper": {"gamma": 3.5}, "steps": (1,), "out": "a", "names": "b"})
    settings.save(tree, tmp_path / "c.yaml", "a header")
    assert (tmp_path / "c.yaml").read_text().startswith("# a header\n")
    stored = read_yaml(tmp_path / "c.yaml")
    assert stored == settings.to_dict(tree)
    assert settings.build(Tree, stored) == tree
    assert settings.build(Tree, settings.to_dict(Tree())) == Tree()
    changed = settings.to_dict(settings.build(Tree, {"optim.lr": 7, "epochs": 3}))
    assert settings.differences(settings.to_dict(Tree()), changed) == {"optim.lr": 7.0, "epochs": 3}
    assert settings.changed(Optim(lr=3)) == ["lr"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optm": 1}, "f.yaml: optm: unknown option"),
        ({"epoch": 1}, "did you mean epochs?"),
        ({"lr": 1}, "did you mean optim.lr?"),
        ({"optim.lrr": 1}, "did you mean optim.lr?"),
        ({"zzz": 1}, "the options are epochs, batch_size"),
        ({"optim.lr": "x"}, "f.yaml: optim.lr: expected a number, but got 'x'"),
        ({"optim": 3}, "f.yaml: optim: expected options, but got 3"),
        ({"optim": None}, "optim: expected options"),
        ({"optim.betas": [1]}, "2 values, each a number"),
        ({"optim.lr": -1}, "f.yaml: optim.lr must be positive"),
        ({"epochs": 2.5}, "a whole number"),
        ({"epochs": None}, "but got null"),
        ({"epochs": True}, "a whole number"),
        ({"kind": "c"}, "one of a, b"),
        ({"beta": "x"}, "beta: expected a number"),
        ({"flag": "1"}, "true or false"),
        ({"steps": [[1]]}, "a list, each a whole number"),
        ({"several": [{"l": 1}]}, "unknown option"),
        ({"hyper": {"a": "b"}}, "hyper: expected"),
        ({3: 1}, "3: unknown option"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(values, words):
    with pytest.raises(ValueError) as caught:
        settings.build(Tree, values, "f.yaml: ")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_help_explains_every_option():
    text = " ".join(settings.help_text(Tree, {"epochs": "More."}).split())
    assert "--optim.lr (a number) Learning rate at the start. Default: 0.5." in text
    assert "--epochs (a whole number) Passes. More. Default: 8." in text
    assert "--batch-size (a whole number) Default: 4." in text
    assert "--kind (one of a, b)" in text
