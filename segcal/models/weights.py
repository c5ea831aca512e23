"""Loads pretrained weights from the Hugging Face hub, or safely from a file."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
_MAX_LISTED = 4  # keys named in an error


def pretrained(
    build: Callable[[bool], Any], weights: str | None, name: str, load: Callable[[Any], None]
) -> Any:
    """A network with initial weights: imagenet, those of a file, or random ones for None.

    `build` is told whether to fetch ImageNet weights from the Hugging Face hub, which messages call
    `name`; `load` loads a file into the network.
    """
    if weights != "imagenet":
        network = build(False)
        if weights is not None:
            load(network)
        return network
    from huggingface_hub.utils import logging as hub_logging

    log.info("Fetching ImageNet weights of %s from the Hugging Face hub", name)
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # messages about its retries would hide our one line
    try:
        return build(True)
    except OSError as error:
        raise ValueError(
            f"Expected to fetch ImageNet weights of {name} from the Hugging Face hub, but it "
            f"cannot be reached; put the file on this machine and give its path as encoder_weights"
        ) from error
    finally:
        hub_logging.set_verbosity(verbosity)


def load_weights(module: nn.Module, path: str | Path, *, except_for: Iterable[str] = ()) -> None:
    """Fill a module from a .safetensors file or a state dict saved by torch.save.

    Dots and underscores in names count as equal, because timm renames `stages.0` to `stages_0`
    when it makes a feature extractor. Weights that the module does not have (a classifier, say)
    are skipped, and their number is logged. A weight of the module that the file lacks is an error,
    unless its name begins with one of `except_for`.
    """
    given = {_plain(name): tensor for name, tensor in read_weights(Path(path)).items()}
    state = module.state_dict()
    wanted = {
        name: _plain(name)
        for name in state
        if not name.startswith(tuple(except_for)) and not name.endswith("num_batches_tracked")
    }
    fitting = {
        name: given[key]
        for name, key in wanted.items()
        if key in given and given[key].shape == state[name].shape
    }
    lacking = [name for name in wanted if name not in fitting]
    if lacking:
        shown = ", ".join(lacking[:_MAX_LISTED]) + ", …" * (len(lacking) > _MAX_LISTED)
        raise ValueError(
            f"Expected {path} to hold all {len(wanted)} weights of the encoder, but "
            f"{len(lacking)} are missing or of another shape: {shown}"
        )
    module.load_state_dict(fitting, strict=False)
    unused = len(given.keys() - set(map(_plain, state)))
    log.info("Loaded %d weights from %s; %d in the file are not used", len(wanted), path, unused)


def _plain(name: str) -> str:
    return name.replace(".", "_")


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors by name in a .safetensors file or a saved state dict, which may be wrapped."""
    if not path.is_file():
        raise ValueError(f"Expected a weights file at {path}, but there is none")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both readers raise many kinds, none of them for users to sort out
        raise ValueError(
            f"Expected {path} to be a .safetensors file or a state dict that loads without "
            f"running code, but reading it failed: {str(error).splitlines()[0]}"
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"Expected {path} to hold a state dict of tensors, but it does not")
    return content


def similar(name: str, prefix: str) -> str:
    """Words for an error: the models of timm that are called nearly so."""
    import timm

    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f"; similar: {', '.join(prefix + other for other in close)}" if close else ""
