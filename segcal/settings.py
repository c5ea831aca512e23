"""Settings: trees of dataclasses, read from YAML, dicts and command lines alike.

    build(Settings, {"epochs": 3, "optim": {"lr": 0.2}})
    read(Settings, [("a.yaml: ", read_yaml("a.yaml")), ("--", {"optim.lr": "0.2"})])

Here `Settings` is a dataclass, and so is its field `optim`. The type of a field says what it may
hold: bool, int, float, str, Path, Literal, tuple, list, dict, unions of these, None, Any or a
dataclass. The section `Attributes:` of the docstring says what it means. Every mistake is a
ValueError of one line that names the file and the key.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from segcal.files import atomic_write

T = TypeVar("T")
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `kind` from nested or dotted keys; other fields keep defaults.

    Error messages begin with `where`, such as "FILE: " or "--" for command lines.
    """
    return read(kind, [(where, values)])


def read(kind: type[T], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> T:
    """An instance of `kind` from several (where, values) of `build`; later ones win."""
    hints = {option.name: option.hint for option in options(kind)}
    stated: dict[str, Any] = {}  # by dotted name
    for where, values in layers:
        for name, value in _leaves(kind, hints, values, where):
            value = convert(value, hints[name], f"{where}{name}")
            if isinstance(value, dict) and isinstance(stated.get(name), dict):
                value = {**stated[name], **value}
            stated[name] = value
    where = layers[0][0] if len(layers) == 1 and layers[0][0] != "--" else ""
    try:
        return _make(kind, stated)
    except ValueError as error:  # from a __post_init__, which names the field
        raise ValueError(f"{where}{error}") from None


def _leaves(
    kind: type, hints: Mapping[str, Any], values: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The options that nested or dotted keys state: dotted name and value."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        leaf = next((leaf for leaf in hints if f"{name}.".startswith(f"{leaf}.")), None)
        if leaf is not None:  # a key below a leaf is one of its dict
            yield leaf, value if leaf == name else {name.removeprefix(f"{leaf}."): value}
        elif not any(leaf.startswith(f"{name}.") for leaf in hints):
            raise ValueError(f"{where}{name}: {unknown(name, kind)}")
        elif isinstance(value, Mapping):
            yield from _leaves(kind, hints, value, where, f"{name}.")
        else:
            raise ValueError(f"{where}{name}: expected options, but got {value!r:.60}")


def _make(kind: type[T], stated: Mapping[str, Any], prefix: str = "", default: Any = None) -> T:
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"{prefix}{field.name}"
        inner = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(hints[field.name]):
            start = None if inner is MISSING else inner
            arguments[field.name] = _make(hints[field.name], stated, f"{name}.", start)
        elif name in stated:
            arguments[field.name] = stated[name]
        elif inner is MISSING:
            raise ValueError(f"{name}: is needed, but was not given")
    return kind(**arguments) if default is None else replace(default, **arguments)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


class _Unfit(Exception):
    """A value is not of its type."""


def convert(value: Any, hint: Any, name: str) -> Any:
    """The value of a field as its type says; text is read as on a command line or in YAML."""
    try:
        return _convert(value, hint, name)
    except _Unfit:
        got = "null" if value is None else repr(value)
        raise ValueError(f"{name}: expected {describe(hint)}, but got {got:.80}") from None


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if hint is type(None):
        if value is None or value in ("null", "None"):
            return None
    elif origin in (Union, types.UnionType):
        for part in sorted(inner, key=lambda part: part is str):  # any text is a str: try it last
            with suppress(_Unfit):
                return _convert(value, part, name)
    elif origin is Literal:
        for option in inner:
            if str(option) == str(value):
                return option
    elif is_dataclass(hint):
        if isinstance(value, Mapping):
            return build(hint, value, f"{name}: ")  # type: ignore[arg-type]
    elif origin in (tuple, list):
        if isinstance(value, str):  # 0.1,0.2 or [0.1, 0.2]
            parts = value.strip().removeprefix("[").removesuffix("]").split(",")
            value = [part.strip() for part in parts if part.strip()]
        if isinstance(value, (list, tuple)):
            hints = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(value)
            if len(hints) == len(value):
                return origin(_convert(v, h, name) for v, h in zip(value, hints, strict=True))
    elif origin is dict:
        if isinstance(value, str):  # mdca=1,cp=0.1
            pairs = [part.split("=") for part in value.split(",") if part.count("=") == 1]
            value = dict(pairs) or None
        if isinstance(value, Mapping):
            return {str(k).strip(): _convert(v, inner[1], name) for k, v in value.items()}
    elif hint is bool:
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    elif hint in (int, float):
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                if hint is float or int(value) == float(value):
                    return hint(value)
    elif hint in (str, Path) and isinstance(value, (str, Path)):
        return hint(value)
    raise _Unfit


def describe(hint: Any) -> str:
    """A type in words: "a number or null", "one of sgd, adam, adamw"."""
    inner = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (tuple, list):
        if origin is tuple and inner[-1] is not ...:
            return f"{len(inner)} values, each {describe(inner[0])}"
        return f"a list, each {describe(inner[0])}"
    if origin is dict:
        return f"{describe(inner[1])} by name"
    if inner:
        return " or ".join(describe(part) for part in inner)
    return _WORDS.get(hint, "options" if is_dataclass(hint) else "a value")


def unknown(name: str, kind: type) -> str:
    """What to say about an option that the dataclass `kind` does not have."""
    names = [option.name for option in options(kind)]
    near = [known for known in names if known.endswith(f".{name}")]
    near = near or difflib.get_close_matches(name, names, 1)
    if near:
        return f"unknown option; did you mean {near[0]}?"
    group = name.rpartition(".")[0]
    listed = [known for known in names if known.rpartition(".")[0] == group] or names
    return f"unknown option; the options are {', '.join(listed)}"


def to_dict(settings: Any) -> dict[str, Any]:
    """A dataclass as plain numbers, text, lists and dicts, for YAML and JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(asdict(settings))


def save(settings: Any, path: Path, header: str) -> None:
    """Write a dataclass as YAML under the comment `header`; `build` of `read_yaml` reads it."""
    text = yaml.safe_dump(to_dict(settings), sort_keys=False, allow_unicode=True)
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


def changed(settings: Any) -> list[str]:
    """The fields of a dataclass that are not at their defaults."""
    return [f.name for f in fields(settings) if getattr(settings, f.name) != f.default]


def list_entries(entries: Mapping[str, Any]) -> str:
    """The names with what each is `about`, for a help text; names of one kind share the words."""
    names: dict[str, list[str]] = {}
    for name, entry in entries.items():
        names.setdefault(entry.about, []).append(name)
    return "; ".join(f"{', '.join(group)} ({words})" for words, group in names.items())


def read_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a command line, by dotted name: --a.b VALUE, --a.b=VALUE or --a.b.

    An option without a value is true. Names may have hyphens or underscores.
    """
    flags: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(f"{word}: expected options as --NAME VALUE; see --help")
        name, equals, value = word[2:].partition("=")
        if not equals:
            alone = not words or words[0].startswith("--")
            value = "true" if alone else words.pop(0)
        flags.append((name.replace("-", "_"), value))
    return flags


@dataclass(frozen=True)
class Option:
    """One leaf of a tree of settings: its dotted name, type, default and meaning."""

    name: str
    hint: Any
    default: Any
    about: str


def options(kind: type, prefix: str = "", default: Any = None) -> list[Option]:
    """Every option of the dataclass `kind`; what each means is in its docstring's `Attributes:`."""
    meanings = attributes(kind)
    found: list[Option] = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        value = _default(field) if default is None else getattr(default, field.name)
        hint = hints[field.name]
        if is_dataclass(hint):
            start = None if value is MISSING else value
            found += options(hint, f"{prefix}{field.name}.", start)  # type: ignore[arg-type]
        else:
            about = field.metadata.get("help", meanings.get(field.name, ""))
            found.append(Option(f"{prefix}{field.name}", hint, value, about))
    return found


def attributes(kind: type) -> dict[str, str]:
    """The `Attributes:` section of a class's docstring, by name."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): ((?:.|\n(?!    \w|\w|$))*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def help_text(kind: type, more: Mapping[str, str] | None = None) -> str:
    """A paragraph for each option of `kind`; `more` adds words by dotted name."""
    paragraphs = []
    for option in options(kind):
        default = "" if option.default is MISSING else f"Default: {_shown(option.default)}."
        kind_of = describe(option.hint)
        about = " ".join(filter(None, (option.about, (more or {}).get(option.name), default)))
        paragraphs.append(f"  --{option.name.replace('_', '-')}  ({kind_of})")
        paragraphs.append(
            textwrap.fill(about, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
        )
    return "\n".join(paragraphs)


def _shown(value: Any) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_shown, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
