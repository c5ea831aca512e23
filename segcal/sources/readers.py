"""Networks by name or by file: what stands before the colon of a name, or ends a file's name.

`READERS` and `FILES` list them; a new kind is one function and one entry there. Nothing is
downloaded but the weights that a name asks for, and a FILE.py is code that runs.
"""

from __future__ import annotations

import hashlib
import logging
import runpy
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD
from segcal.data.transforms import normalise
from segcal.files import one_line
from segcal.models.weights import read_weights
from segcal.sources.source import file_digest, logits_of, resize

log = logging.getLogger(__name__)
Outputs = Literal["auto", "logits", "probs", "scores"]


@dataclass
class Network:
    """A network, and what turns an image into its input.

    The outputs are logits, probs, or scores of 0 to 1 that need not sum to 1; auto looks at them.
    """

    module: nn.Module  # (N, 3, h, w) inputs to (N, C, *) outputs, as `segcal.evaluate` takes them
    prepare: Callable[[np.ndarray], Tensor]  # (H, W, 3) uint8 RGB to the (3, h, w) input
    class_names: tuple[str, ...] = ()  # if the network knows them
    outputs: Outputs = "auto"
    pad_to: int = 1  # both sides of an input must be multiples of this
    key: str = ""  # a digest of weights and file, from `read_network`


@dataclass(frozen=True)
class Normalise:
    """Resize to `size`, (h, w) or None, scale to 0-1, subtract `mean` and divide by `std`."""

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    size: tuple[int, int] | None = None

    def __call__(self, image: np.ndarray) -> Tensor:
        if self.size is not None and image.shape[:2] != self.size:
            height, width = self.size
            resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
            image = np.asarray(resized)
        return normalise(image, self.mean, self.std)


# Readers of a spec: (what follows the colon, input) -> Network.


def torchvision_network(name: str, given: Normalise | None) -> Network:
    """NAME[@WEIGHTS]: WEIGHTS is a name of torchvision's, or a file of a state dict."""
    from torchvision import models

    name, _, weights = name.partition("@")
    known = models.get_model_weights(name)
    if weights and Path(weights).is_file():
        state, options = read_weights(Path(weights)), {}
        if hasattr(models.segmentation, name):
            auxiliary = any(key.startswith("aux_classifier.") for key in state)
            options = {"weights_backbone": None, "aux_loss": auxiliary or None}
        module = _filled(partial(models.get_model, name, weights=None, **options), state)
        return Network(module, given or Normalise())
    if weights and weights not in known.__members__:
        raise ValueError(
            f"{weights} is no file, and no weights of {name}: choose from "
            f"{', '.join(known.__members__)}"
        )
    chosen = known[weights] if weights else known.DEFAULT
    module = models.get_model(name, weights=chosen)
    names = tuple(map(str, chosen.meta["categories"]))
    return Network(module, given or _Preset(chosen.transforms()), names)


def _filled(build: Callable[..., nn.Module], state: Mapping[str, Tensor]) -> nn.Module:
    """What `build` makes, with the weights of a file, for as many classes as they have."""
    module = build()
    usual = module.state_dict()
    other = [len(w) for key, w in state.items() if key in usual and w.shape != usual[key].shape]
    if other:
        module = build(num_classes=other[0])
    module.load_state_dict(state)
    return module


@dataclass(frozen=True)
class _Preset:
    """The transforms that come with weights of torchvision."""

    transforms: Callable[[Tensor], Tensor]

    def __call__(self, image: np.ndarray) -> Tensor:
        return self.transforms(torch.from_numpy(image.copy()).movedim(2, 0))


def transformers_network(name: str, given: Normalise | None) -> Network:
    """ORG/NAME or FOLDER of transformers, with the image processor of the checkpoint."""
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModelForSemanticSegmentation,
        AutoModelForUniversalSegmentation,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES as UNIVERSAL,
    )

    config = AutoConfig.from_pretrained(name)
    universal = config.model_type in UNIVERSAL
    kind = AutoModelForUniversalSegmentation if universal else AutoModelForSemanticSegmentation
    model = kind.from_pretrained(name)
    prepare: Callable[[np.ndarray], Tensor] | None = given
    tasks, pad_to = None, 1
    if config.model_type == "oneformer":
        from transformers import AutoProcessor

        full = AutoProcessor.from_pretrained(name)
        image = np.zeros((64, 64, 3), np.uint8)
        tasks = full(images=image, task_inputs=["semantic"], return_tensors="pt")["task_inputs"]
    names = tuple(config.id2label[c] for c in sorted(config.id2label))
    module = _UniversalHead(model, tasks) if universal else model
    if prepare is None:
        processor = AutoImageProcessor.from_pretrained(name)
        if getattr(processor, "do_split_image", False):  # EoMT takes squares of one size only
            module = Tiled(module, processor.size["shortest_edge"], 0)
            processor.do_split_image = False
        elif config.model_type.startswith("eomt") and processor.do_pad:
            pad_to = processor.size["longest_edge"]
            processor.do_pad = False
        processor.do_center_crop = False  # labels are of whole images
        prepare = _Processor(processor)
    return Network(module, prepare, names, "scores" if universal else "logits", pad_to)


@dataclass(frozen=True)
class _Processor:
    """The image processor of a checkpoint of transformers."""

    processor: Any

    def __call__(self, image: np.ndarray) -> Tensor:
        values: Tensor = self.processor(images=image.copy(), return_tensors="pt")["pixel_values"][0]
        return values


class _UniversalHead(nn.Module):
    """MaskFormer, Mask2Former, OneFormer and EoMT: Σ_q softmax(class)_qc · sigmoid(mask)_q.

    These (N, C, h, w) scores lie in 0 .. 1 or a little above and do not sum to 1.
    """

    def __init__(self, model: nn.Module, tasks: Tensor | None) -> None:
        super().__init__()
        self.model = model
        self.tasks: Tensor | None
        self.register_buffer("tasks", tasks)

    def forward(self, images: Tensor) -> Tensor:
        extra = {}
        if self.tasks is not None:
            extra["task_inputs"] = self.tasks.expand(len(images), -1)
        found = self.model(pixel_values=images, **extra)
        classes = found.class_queries_logits.softmax(-1)[..., :-1]  # (N, Q, C), without "nothing"
        return torch.einsum("nqc,nqhw->nchw", classes, found.masks_queries_logits.sigmoid())


def smp_network(name: str, given: Normalise | None) -> Network:
    """ORG/NAME or FOLDER of segmentation_models_pytorch's `save_pretrained`."""
    import segmentation_models_pytorch as smp

    try:
        model = smp.from_pretrained(name)
    except KeyError:
        raise ValueError(f"smp:{name} was not saved by segmentation_models_pytorch") from None
    config = getattr(model, "config", None) or {}
    normalise = Normalise()
    if config.get("encoder_weights"):
        encoder = config["encoder_name"], config["encoder_weights"]
        try:  # newer versions keep them beside the weights, on a hub
            params = smp.encoders.get_preprocessing_params(*encoder)
        except (OSError, ValueError):
            log.warning("images are normalised as for ImageNet: say --mean and --std if not")
        else:
            scale = 255 if params["input_range"] == [0, 255] else 1
            mean, std = ([x / scale for x in params[key]] for key in ("mean", "std"))
            normalise = Normalise(mean, std)
    return Network(model, given or normalise, pad_to=32)


def timm_network(name: str, given: Normalise | None) -> Network:
    """NAME[@FILE]: a classification network of timm, with its own weights or those of a file."""
    import timm

    name, _, file = name.partition("@")
    if file:
        model = _filled(partial(timm.create_model, name), read_weights(Path(file)))
    else:
        model = timm.create_model(name, pretrained=True)
    config = timm.data.resolve_model_data_config(model)
    height, width = config["input_size"][1:]
    normalise = Normalise(config["mean"], config["std"], (height, width))
    return Network(model, given or normalise, outputs="logits")


def onnx_network(name: str, given: Normalise | None) -> Network:
    """FILE.onnx, whose first input is (N, 3, h, w)."""
    module = _OnnxModule(Path(name))
    return Network(module, _to_size(given, module.session.get_inputs()[0].shape[2:]))


def _to_size(given: Normalise | None, sides: Sequence[Any]) -> Normalise:
    """How images become inputs of a traced network, which may take one size alone."""
    prepare = given or Normalise()
    fixed = len(sides) == 2 and all(isinstance(side, int) for side in sides)
    if fixed and prepare.size is None:
        return replace(prepare, size=(sides[0], sides[1]))
    return prepare


class _OnnxModule(nn.Module):
    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        self.path = path
        self.session = onnxruntime.InferenceSession(
            str(path), providers=onnxruntime.get_available_providers()
        )

    def forward(self, images: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("an ONNX file runs in onnxruntime, so torch cannot export it again")
        name, size = self.session.get_inputs()[0].name, self.session.get_inputs()[0].shape[0]
        pieces = images.split(size) if isinstance(size, int) else [images]  # traced for a size
        found = [self.session.run(None, {name: piece.cpu().numpy()})[0] for piece in pieces]
        return torch.from_numpy(np.concatenate(found)).to(images.device)


def exported_network(name: str, given: Normalise | None) -> Network:
    """FILE.pt2 of torch.export, whose only input is (N, 3, h, w)."""
    if not zipfile.is_zipfile(name):  # else torch logs a page
        raise ValueError(f"{name} is no file of torch.export.save")
    program = torch.export.load(name)
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and getattr(node.meta.get("val"), "ndim", 0) == 4
    ]
    if not shapes:
        raise ValueError(f"{name} takes no images (N, 3, h, w)")
    size, _, *sides = shapes[-1]  # parameters come first among the placeholders
    module = _ExportedModule(program.module(), size if isinstance(size, int) else None)
    return Network(module, _to_size(given, sides))


class _ExportedModule(nn.Module):
    """An exported module, which has no train and eval mode and says so with an error."""

    def __init__(self, exported: nn.Module, size: int | None) -> None:
        super().__init__()
        self.exported, self.size = [exported], size  # in a list it is no submodule

    def forward(self, images: Tensor) -> Tensor:
        if self.size and torch.compiler.is_compiling():
            raise ValueError(
                f"the file takes batches of {self.size}: export it again with a dynamic batch"
            )
        pieces = images.split(self.size) if self.size else [images]  # traced for a size
        return torch.cat([logits_of(self.exported[0](piece)) for piece in pieces])


def code_network(name: str, given: Normalise | None) -> Network:
    """FILE.py:FUNCTION: the function returns a module, or a module and its `prepare`.

    As `python FILE.py` would, the file may import others of its folder.
    """
    file, _, function = name.rpartition(":")
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = runpy.run_path(file)
        made = found[function]() if function in found else None
    except Exception as error:
        places = [at for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
        line = f", line {places[-1].lineno}" if places else ""
        raise ValueError(
            f"{name} cannot be opened: {one_line(error)} ({type(error).__name__}{line})"
        ) from error
    if function not in found:
        raise ValueError(f"{file} has no function {function}")
    module, prepare = made if isinstance(made, tuple) else (made, None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{name} must return a torch.nn.Module, or a module and a function from an RGB image "
            f"to its input, but returned {type(module).__name__}"
        )
    own = Normalise() if prepare is None else _OwnInput(name, prepare)
    return Network(module, given or own)


@dataclass(frozen=True)
class _OwnInput:
    """The function from an image to its input in a user's file."""

    name: str
    prepare: Callable[[np.ndarray], Tensor]

    def __call__(self, image: np.ndarray) -> Tensor:
        try:
            return self.prepare(image)
        except Exception as error:
            raise ValueError(
                f"{self.name} makes no input of an image of shape {image.shape}: "
                f"{one_line(error):.300} ({type(error).__name__})"
            ) from error


Reader = Callable[[str, "Normalise | None"], Network]
READERS: dict[str, Reader] = {
    "torchvision": torchvision_network,
    "hf": transformers_network,
    "smp": smp_network,
    "timm": timm_network,
}
FILES: dict[str, Reader] = {".onnx": onnx_network, ".pt2": exported_network}


def _reader(spec: str) -> tuple[Reader, str, bool] | None:
    """What reads the network that a text names, what it is told, and whether that is a file."""
    head, _, rest = spec.partition(":")
    if rest and head in READERS:
        return READERS[head], rest, False
    if Path(spec).suffix in FILES:
        return FILES[Path(spec).suffix], spec, True
    return (code_network, spec, True) if spec.rpartition(":")[0].endswith(".py") else None


def is_network(spec: str) -> bool:
    """Whether a text names a network: torchvision:…, hf:…, smp:…, timm:…, or a file of one."""
    return _reader(spec) is not None


def name_of(spec: str) -> str:
    """The part of a spec that tells most: NAME of torchvision:NAME@FILE, FUNCTION of FILE.py."""
    return Path(spec.partition("@")[0]).name.rpartition(":")[2]


def read_network(spec: str, given: Normalise | None = None) -> Network:
    """The network that a text names; see `is_network`.

    `given` says how images become inputs, if not in the network's own way.
    """
    found = _reader(spec)
    if found is None:
        raise ValueError(
            f"{spec!r} names no network: write {', '.join(f'{k}:NAME' for k in READERS)}, "
            "FILE.onnx, FILE.pt2 or FILE.py:FUNCTION"
        )
    read, name, of_file = found
    path = Path(name.rpartition(":")[0] if read is code_network else name)
    if of_file and not path.is_file():
        raise ValueError(f"{spec}: there is no file {path}")
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # else it logs each of its retries
    try:
        network = read(name, given)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{spec} needs the package {error.name}: pip install {error.name}"
        ) from None
    except (OSError, URLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{spec} is not on this machine, and cannot be downloaded: get its files where there "
            f"is a network, and name them by their path ({reason:.160})"
        ) from None
    except ValueError:
        raise
    except Exception as error:  # of whatever package reads it
        raise ValueError(
            f"{spec} cannot be opened: {one_line(error):.200} ({type(error).__name__})"
        ) from error
    finally:
        hub.setLevel(level)
    digest = hashlib.sha256(file_digest(path).encode() if of_file else b"")
    for key, tensor in sorted(network.module.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    network.key = digest.hexdigest()
    return network


class Tiled(nn.Module):
    """A network on square tiles of a large image, whose outputs are blended where they overlap.

    Weights of a tile fall linearly to its borders, so that no seam shows. Neighbours share
    `overlap` pixels, at most half of the side `tile`.
    """

    def __init__(self, module: nn.Module, tile: int, overlap: int) -> None:
        super().__init__()
        if not 0 <= overlap <= tile // 2:
            raise ValueError(f"--overlap must be at most half of --tile, but {overlap} > {tile}/2")
        self.module, self.tile, self.overlap = module, tile, overlap

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        total: Tensor | None = None
        weights = images.new_zeros(1, 1, height, width)
        for top in self._starts(height):
            for left in self._starts(width):
                place = (..., slice(top, top + self.tile), slice(left, left + self.tile))
                piece = images[place]
                found = resize(logits_of(self.module(piece)), piece.shape[-2:])
                ramps = []
                for side in piece.shape[-2:]:
                    distance = torch.arange(1, side + 1).to(found)  # to the border
                    distance = torch.minimum(distance, distance.flip(0))
                    ramps.append(distance.clamp(max=max(self.overlap, 1)))
                weight = ramps[0][:, None] * ramps[1]
                if total is None:
                    total = found.new_zeros(*found.shape[:2], height, width)
                total[place] += found * weight
                weights[place] += weight
        assert total is not None
        return total / weights

    def _starts(self, side: int) -> list[int]:
        last = max(side - self.tile, 0)
        return [*range(0, last, self.tile - self.overlap), last]
