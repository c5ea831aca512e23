"""The settings of a run: one frozen dataclass, read from YAML and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from segcal.data import build as datasets
from segcal.data.options import DataConfig
from segcal.files import atomic_write, read_yaml
from segcal.losses import (
    AUXILIARY_LOSSES,
    BASE_LOSSES,
    Term,
    all_terms,
    build_loss,
    hyper_names,
    term,
)
from segcal.models import build as models
from segcal.models.build import ModelConfig
from segcal.registry import describe
from segcal.training.options import TrainOptions

CONFIG = "config.yaml"
RECIPES = Path(__file__).parent / "recipes"  # configs/ of the repository, in a wheel its files
_RENAMED = {"mmce_bandwidth": "bandwidth", "mmce_sample": "sample"}  # options of earlier versions
_T = TypeVar("_T")


def _with_hyper_parameters(options: type[_T]) -> type[_T]:
    """Give the class a field for each hyper-parameter of the losses, null unless it is stated."""
    takers: dict[str, list[Term]] = {}
    for part in all_terms():
        for name in part.hyper:
            if name != "seed":  # of a sample: not the user's concern
                takers.setdefault(name, []).append(part)
    auxiliary = [f"{name} ({term(name).beta:g})" for name in AUXILIARY_LOSSES]
    listed = {"base": ", ".join(BASE_LOSSES), "auxiliary": ", ".join(auxiliary)}
    lines = [inspect.cleandoc(options.__doc__ or "").format(**listed)]
    for name, terms in takers.items():
        first = terms[0].hyper[name]
        options.__annotations__[name] = first.kind | None
        setattr(options, name, None)
        usual = ", ".join(
            f"{str(part.hyper[name].default).lower()} for {part.name}" for part in terms
        )
        meaning = first.meaning[0].upper() + first.meaning[1:]
        lines.append(f"    {name}: {meaning}; null is {usual}.")
    options.__doc__ = "\n".join(lines)
    return options


@dataclass(frozen=True)
@_with_hyper_parameters
class LossOptions:
    """Which loss to train with.

    The hyper-parameters of the losses are options too.

    Attributes:
        loss: BASE, BASE+AUX or BASE+AUX+AUX… with BASE one of {base} and AUX of
            {auxiliary}, each with its usual weight.
        beta: Weight of AUX, or weights by name as in mdca=1,cp=0.1; null is the usual weight.
        class_weights: Factors of the base loss, one per class; null is all 1.
    """

    loss: str = "fl+mdca"
    beta: float | dict[str, float] | str | None = None
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.beta, str):
            object.__setattr__(self, "beta", _named_numbers("beta", self.beta))
        taken = hyper_names(self.loss) - {"seed"}
        unfit = [name for name in self.hyper if name not in taken]
        if unfit:
            raise ValueError(
                f"Expected options that --loss {self.loss} takes "
                f"({', '.join(sorted(taken)) or 'it has none'}), but got {', '.join(unfit)}"
            )
        build_loss(self.loss, **self.hyper)  # raises if a value does not fit

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters that are set, by the names that `segcal.build_loss` knows."""
        names = [f.name for f in dataclasses.fields(LossOptions)]
        values = {name: getattr(self, name) for name in names}
        return {
            name: value
            for name, value in values.items()
            if value is not None and name not in ("loss", "class_weights")
        }


def _named_numbers(option: str, text: str) -> dict[str, float]:
    """What "mdca=1,cp=0.1" says."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip().lower(): float(number) for name, number in pairs}
    except ValueError:
        raise ValueError(
            f"Expected {option} to be a number, or numbers by name as in mdca=1,cp=0.1, or null, "
            f"but got {text}"
        ) from None


@dataclass(frozen=True)
class TrainConfig(TrainOptions, LossOptions):
    """Everything a training run depends on.

    Attributes:
        data: What to train on.
        model: What to train.
        device: auto, cpu, cuda, cuda:1 or mps.
        out: Folder of the run; null is runs/DATA-MODEL-LOSS.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    device: str = "auto"
    out: str | None = None

    def __post_init__(self) -> None:
        TrainOptions.__post_init__(self)
        LossOptions.__post_init__(self)
        if self.model.freeze and self.model.encoder_weights is None:
            raise ValueError(
                "Expected model.encoder_weights with model.freeze, which keeps them as they are, "
                "but got null"
            )

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        if self.out is not None:
            return Path(self.out)
        name = f"{self.data.name}-{self.model.name}-{self.loss.lower()}"
        return Path("runs") / re.sub(r"[^\w.+-]+", "-", name)


def train_parser(prog: str) -> ArgumentParser:
    """The command line of training: --config, every field of `TrainConfig`, and --resume."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--OPTION VALUE ...] [--resume]\n       {prog} --list",
        description=f"Train a network. With no option at all: {TrainConfig.loss} on embedded data.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file of options, or the name of a recipe; the command line overrides it.",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="Print the recipes that --config knows by name, with their cost and result, and exit.",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Continue the run in --out, with its own settings; start it if there is none.",
    )
    parser.add_argument(
        "--multilabel", action="store_true", help="The same as --data.multilabel true."
    )
    parser.add_class_arguments(TrainConfig)
    _complete_help(parser)
    for name in _RENAMED:
        kind = get_type_hints(LossOptions)[_RENAMED[name]]
        parser.add_argument(f"--{name}", type=kind, default=SUPPRESS, help=SUPPRESS)
    return parser


def _complete_help(parser: ArgumentParser) -> None:
    """Add what data sets and networks declare: their names, and which of them take an option."""
    declared: dict[str, tuple[Mapping[str, Any], Callable[[str], str]]] = {
        "data": (datasets.DATASETS, datasets.dataset_takers),
        "model": (models.MODELS, models.model_takers),
    }
    for action in parser._actions:
        group, _, option = action.dest.partition(".")
        if group not in declared or not option:
            continue
        entries, takers = declared[group]
        if option == "name":
            action.help = f"One of {describe(entries)}."
        elif who := takers(option):
            action.help = f"{action.help} For {who}."


def parse_train(arguments: Sequence[str], prog: str = "segcal train") -> tuple[TrainConfig, bool]:
    """The settings that a command line asks for, and whether to resume.

    Raises:
        ValueError: in one line, which option or file is wrong and what was expected.
    """
    parser = train_parser(prog)
    files, rest = _config_first(arguments)
    files = [str(recipe_path(file)) for file in files]
    for file in files:
        _check_yaml(Path(file))
        try:
            parser.parse_args(["--config", file])
        except ArgumentError as error:
            raise ValueError(f"{_one_line(error)} (in {file})") from None
    try:
        parsed = parser.parse_args([f"--config={file}" for file in files] + rest).as_dict()
    except ArgumentError as error:
        raise ValueError(_one_line(error)) from None
    resume = parsed.pop("resume")
    if parsed.pop("multilabel"):
        parsed["data"]["multilabel"] = True
    settings = {k: v for k, v in parsed.items() if k not in ("config", "list")}
    return _build(TrainConfig, _renamed(settings)), resume


def recipes() -> dict[str, Path]:
    """The files that come with segcal, by name: "scenes", "small/scenes"."""
    return {
        path.relative_to(RECIPES).with_suffix("").as_posix(): path
        for pattern in ("*.yaml", "small/*.yaml")
        for path in sorted(RECIPES.glob(pattern))
    }


def recipe_path(config: str) -> Path:
    """The file that --config names: a path, or else a recipe."""
    if Path(config).exists():
        return Path(config)
    return recipes().get(config, Path(config))


def load_config(path: Path) -> TrainConfig:
    """The settings in a YAML file, such as the config.yaml of a run."""
    return parse_train(["--config", str(path)])[0]


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The settings as plain numbers, strings, lists and dicts."""
    return _plain(dataclasses.asdict(config))


def save_config(config: TrainConfig, path: Path, header: str) -> None:
    """Write all settings as YAML under the comment `header`; `load_config` gives them back."""
    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    with atomic_write(path) as file:
        file.write(f"# {header}\n{text}")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """The dotted keys whose values differ between two `to_dict`s, with the value in `other`."""
    found: dict[str, Any] = {}
    for key in {**one, **other}:
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found |= differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            found[f"{prefix}{key}"] = theirs
    return found


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `to_dict` that an earlier version may have written; newer options are at their defaults."""

    def over(defaults: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**defaults, **stated}
        for key, value in stated.items():
            if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
                merged[key] = over(defaults[key], value)
        return merged

    return over(to_dict(TrainConfig()), _renamed(settings))


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the options of earlier versions under their present names."""
    renamed = {key: value for key, value in settings.items() if key not in _RENAMED}
    earlier = {_RENAMED[key]: settings[key] for key in settings.keys() & _RENAMED}
    return renamed | {key: value for key, value in earlier.items() if value is not None}


def _config_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of --config, and the other arguments: these override files in any order.

    A resumed run without --config uses its own settings.
    """
    files, rest = _values("--config", arguments)
    if "--resume" in rest and not files:
        outs, _ = _values("--out", rest)
        files = [str(Path(out) / CONFIG) for out in outs[-1:] if (Path(out) / CONFIG).exists()]
    return files, rest


def _values(option: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of an option in their order, and the other arguments."""
    values: list[str] = []
    rest: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == option and left:
            values.append(left.pop(0))
        elif word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return values, rest


def _check_yaml(path: Path) -> None:
    """Raise, naming file and line, unless `path` holds options, nested as `TrainConfig` is."""
    if not path.exists():
        near = difflib.get_close_matches(path.stem, recipes(), 1)
        hint = f"; is it the recipe {near[0]}?" if near else ""
        raise FileNotFoundError(f"Expected a YAML file at {path}, but there is none{hint}")
    options = read_yaml(path)
    if not isinstance(options, dict):
        raise ValueError(f"Expected options (key: value) in {path}, but got {options!r:.60}")
    for name, hint in get_type_hints(TrainConfig).items():
        if is_dataclass(hint) and not isinstance(options.get(name, {}), dict):
            raise ValueError(f"Expected options under {name} in {path}, but got {options[name]}")


def _build(kind: type[_T], values: Mapping[str, Any], prefix: str = "") -> _T:
    """An instance of the dataclass `kind`, and of those inside it, from nested mappings."""
    hints = get_type_hints(kind)
    arguments = dict(values)
    for name, value in values.items():
        if value is None and type(None) not in get_args(hints[name]):  # jsonargparse lets it pass
            wanted = "options" if is_dataclass(hints[name]) else _wording(hints[name])
            raise ValueError(f"Expected {prefix}{name} to be {wanted}, but got null")
        if is_dataclass(hints[name]):
            arguments[name] = _build(hints[name], value, f"{prefix}{name}.")
    return kind(**arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _one_line(error: ArgumentError) -> str:
    """What jsonargparse says over several lines, in the words of this project."""
    text = str(error)
    key = re.search(r'Parser key "([\w.]+)"', text)
    value = re.search(r"(?:Got|Given) value: (.*)", text)
    if key and value and key[1] in (types := _leaves(TrainConfig)):
        return f"Expected {key[1]} to be {_wording(types[key[1]])}, but got {value[1]}"
    unknown = r"unrecognized arguments: (\S+)|accept option '(\S+)'|Option '(\S+)' is not accepted"
    if found := re.search(unknown, text):
        group = re.search(r"Group '(\S+)'", text)
        name = next(filter(None, found.groups())).lstrip("-").partition("=")[0]
        return _unknown(f"{group[1]}.{name}" if group else name)
    return re.sub(r"\s+", " ", text).strip()


def _unknown(name: str) -> str:
    names = list(_leaves(TrainConfig))
    near = [known for known in names if known.endswith(f".{name}")]
    near = near or difflib.get_close_matches(name, names, 1)
    return f"Unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")


def _leaves(kind: type, prefix: str = "") -> dict[str, Any]:
    """The dotted name and type of every option in a dataclass of dataclasses."""
    leaves: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        nested = is_dataclass(hint)
        leaves |= _leaves(hint, f"{prefix}{name}.") if nested else {f"{prefix}{name}": hint}
    return leaves


_SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _wording(hint: Any) -> str:
    """A type in words: "a number or null", "one of sgd, adam, adamw"."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if get_origin(hint) is tuple:
        return f"a list, each {_wording(inner[0])}"
    if inner:
        return " or ".join(_wording(part) for part in inner if part is not type(None)) + " or null"
    return _SIMPLE.get(hint, str(hint))
