"""Reading of YAML and JSON files that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from segcal.files.errors import BadFile, naming, one_line

_MAX_BYTES = 2**20
_MAX_DEPTH = 32  # of lists and mappings inside each other


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader without aliases, by which a few bytes can stand for gigabytes."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"got the alias *{self.peek_event().anchor}, which is not allowed")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError(f"got more than {_MAX_DEPTH} levels of lists and mappings")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: Path) -> Any:
    """What a YAML (or JSON) file of at most 1 MiB holds: text, numbers, lists and dicts.

    Aliases are refused.

    Raises:
        BadFile: in one line, where the file is no such YAML.
    """
    with naming(path):
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("Expected YAML of at most 1 MiB, but the file is larger")
        content = path.read_bytes()
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except UnicodeDecodeError:
        raise BadFile(f"Expected YAML in UTF-8, but {path} is not text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise BadFile(f"{path}: Expected YAML, but line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadFile(f"{path}: Expected YAML, but {one_line(error)}") from None
