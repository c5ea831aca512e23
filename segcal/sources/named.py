"""Networks by name or by file, on a data set by name.

    open_network("torchvision:deeplabv3_resnet50", "voc2012:data")
    open_network("glue.py:espnet", "camvid:CamVid:test", holdout="camvid:CamVid:val")

`READERS` has what stands before the colon of a name; FILE.onnx, FILE.pt2 and FILE.py:FUNCTION are
files. Nothing is downloaded without being asked for by such a name, and a FILE.py is code that
runs.
"""

from __future__ import annotations

import hashlib
import logging
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from segcal import data
from segcal.data.benchmarks import IGNORED, MappedPart, read_label_map
from segcal.data.options import DATASETS, DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD
from segcal.data.shift import DATA, Shift
from segcal.files import read_yaml
from segcal.sources.network import NetworkSource, logits_of
from segcal.sources.source import Batch, Kind, digest, file_digest

log = logging.getLogger(__name__)
Outputs = str  # auto, logits, probs or scores
OUTPUTS = ("auto", "logits", "probs", "scores")
_SUM_TO_1 = 1e-3  # of probabilities in half precision


@dataclass
class Network:
    """A network, and what turns an image into its input.

    Attributes:
        module: (N, 3, h, w) inputs to (N, C, *) outputs, as `segcal.evaluate` takes them.
        prepare: (H, W, 3) uint8 RGB to the (3, h, w) input.
        class_names: C names, if the network knows them.
        outputs: what the module gives: logits, probs, or scores of 0 to 1 that need not sum to 1;
            auto looks at them.
        pad_to: both sides of an input must be multiples of this.
        key: a digest of the weights.
    """

    module: nn.Module
    prepare: Callable[[np.ndarray], Tensor]
    class_names: tuple[str, ...] = ()
    outputs: Outputs = "auto"
    pad_to: int = 1
    key: str = ""


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
        values = torch.from_numpy(image.copy()).movedim(2, 0).float() / 255
        mean, std = (
            torch.tensor(x, dtype=torch.float32).view(3, 1, 1) for x in (self.mean, self.std)
        )
        return (values - mean) / std


# Readers of a spec: (what follows the colon, number of classes of the data, input) -> Network.


def torchvision_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """NAME[@WEIGHTS]: WEIGHTS is a name of torchvision's, or a file of a state dict."""
    from torchvision import models

    name, _, weights = name.partition("@")
    known = models.get_model_weights(name)
    if weights and Path(weights).is_file():
        options = {"weights_backbone": None} if hasattr(models.segmentation, name) else {}
        module = models.get_model(name, weights=None, num_classes=num_classes, **options)
        _load(module, Path(weights))
        return Network(module, given or Normalise(), key=file_digest(Path(weights)))
    chosen = known[weights] if weights else known.DEFAULT
    module = models.get_model(name, weights=chosen)
    preset = chosen.transforms()
    names = tuple(map(str, chosen.meta["categories"]))
    return Network(module, given or _Preset(preset), names, key=_weights_digest(module))


@dataclass(frozen=True)
class _Preset:
    """The transforms that come with weights of torchvision."""

    transforms: Callable[[Tensor], Tensor]

    def __call__(self, image: np.ndarray) -> Tensor:
        return self.transforms(torch.from_numpy(image.copy()).movedim(2, 0))


def transformers_network(name: str, num_classes: int, given: Normalise | None) -> Network:
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
    prepare: Callable[[np.ndarray], Tensor]
    if given is None:
        processor = AutoImageProcessor.from_pretrained(name, use_fast=True)
        if getattr(processor, "do_split_image", False):  # EoMT cuts images into several inputs
            processor.do_split_image, processor.do_pad = False, False
        prepare = _Processor(processor)
    else:
        prepare = given
    tasks = None
    if config.model_type == "oneformer":
        from transformers import AutoProcessor

        full = AutoProcessor.from_pretrained(name)
        image = np.zeros((64, 64, 3), np.uint8)
        tasks = full(images=image, task_inputs=["semantic"], return_tensors="pt")["task_inputs"]
    names = tuple(config.id2label[c] for c in sorted(config.id2label))
    module = _UniversalHead(model, tasks) if universal else model
    return Network(
        module,
        prepare,
        names,
        outputs="scores" if universal else "logits",
        key=_weights_digest(model),
    )


@dataclass(frozen=True)
class _Processor:
    """The image processor of a checkpoint of transformers."""

    processor: Any

    def __call__(self, image: np.ndarray) -> Tensor:
        values: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
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


def smp_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """ORG/NAME or FOLDER of segmentation_models_pytorch's `save_pretrained`."""
    import segmentation_models_pytorch as smp

    model = smp.from_pretrained(name)
    config = getattr(model, "config", None) or {}
    encoder = config.get("encoder_name", "resnet34")
    params = smp.encoders.get_preprocessing_params(
        encoder, config.get("encoder_weights") or "imagenet"
    )
    scale = 255.0 if params.get("input_range") == [0, 255] else 1.0
    normalise = Normalise([m / scale for m in params["mean"]], [s / scale for s in params["std"]])
    return Network(model, given or normalise, pad_to=32, key=_weights_digest(model))


def timm_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """NAME[@FILE]: a classification network of timm, with its own weights or those of a file."""
    import timm

    name, _, file = name.partition("@")
    if file:
        model = timm.create_model(name, num_classes=num_classes)
        _load(model, Path(file))
    else:
        model = timm.create_model(name, pretrained=True)
    config = timm.data.resolve_model_data_config(model)
    height, width = config["input_size"][1:]
    normalise = Normalise(config["mean"], config["std"], (height, width))
    return Network(model, given or normalise, outputs="logits", key=_weights_digest(model))


def onnx_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """FILE.onnx, whose first input is (N, 3, h, w)."""
    module = _OnnxModule(Path(name))
    sides = module.session.get_inputs()[0].shape[2:]
    fixed = len(sides) == 2 and all(isinstance(side, int) for side in sides)
    prepare = given or Normalise()
    if fixed and prepare.size is None:
        prepare = replace(prepare, size=(sides[0], sides[1]))
    return Network(module, prepare, key=file_digest(Path(name)))


class _OnnxModule(nn.Module):
    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        self.path = path
        self.session = onnxruntime.InferenceSession(
            str(path), providers=onnxruntime.get_available_providers()
        )

    def forward(self, images: Tensor) -> Tensor:
        feed = {self.session.get_inputs()[0].name: images.cpu().numpy()}
        return torch.from_numpy(self.session.run(None, feed)[0]).to(images.device)


def exported_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """FILE.pt2 of torch.export, whose only input is (N, 3, h, w)."""
    program = torch.export.load(name)
    sizes = [
        node.meta["val"].shape[2:]
        for node in program.graph.nodes
        if node.op == "placeholder" and getattr(node.meta.get("val"), "ndim", 0) == 4
    ]
    # Parameters come first among the placeholders, so the last one is the input.
    fixed = bool(sizes) and all(isinstance(side, int) for side in sizes[-1])
    prepare = given or Normalise()
    if fixed and prepare.size is None:
        prepare = replace(prepare, size=(int(sizes[-1][0]), int(sizes[-1][1])))
    return Network(_Bare(program.module()), prepare, key=file_digest(Path(name)))


class _Bare(nn.Module):
    """An exported module: it has no train and eval mode, and says so with an error."""

    def __init__(self, exported: nn.Module) -> None:
        super().__init__()
        self.exported = [exported]  # in a list it is no submodule, whose mode would be set

    def forward(self, images: Tensor) -> Any:
        return self.exported[0](images)


def code_network(name: str, num_classes: int, given: Normalise | None) -> Network:
    """FILE.py:FUNCTION: the function returns a module, or a module and its `prepare`."""
    file, _, function = name.rpartition(":")
    found = runpy.run_path(file)
    if function not in found:
        raise ValueError(f"{file} has no function {function}")
    made = found[function]()
    module, prepare = made if isinstance(made, tuple) else (made, given or Normalise())
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{name} must return a torch.nn.Module, or a module and a function from an RGB image "
            f"to its input, but returned {type(module).__name__}"
        )
    return Network(module, prepare, key=_weights_digest(module))


Reader = Callable[[str, int, "Normalise | None"], Network]
READERS: dict[str, Reader] = {
    "torchvision": torchvision_network,
    "hf": transformers_network,
    "smp": smp_network,
    "timm": timm_network,
}
FILES: dict[str, Reader] = {".onnx": onnx_network, ".pt2": exported_network}


def is_network(spec: str) -> bool:
    """Whether a text names a network: torchvision:…, hf:…, smp:…, timm:…, or a file of one."""
    head, colon, _ = spec.partition(":")
    return (
        (bool(colon) and head in READERS)
        or Path(spec).suffix in FILES
        or spec.rpartition(":")[0].endswith(".py")
    )


def name_of(spec: str) -> str:
    """The part of a spec that tells most: NAME of torchvision:NAME@FILE, FUNCTION of FILE.py."""
    return Path(spec.partition("@")[0]).name.rpartition(":")[2]


def read_network(spec: str, num_classes: int, given: Normalise | None = None) -> Network:
    """The network that a text names.

    Args:
        spec: see `is_network`.
        num_classes: of the data, for weights in files that do not say it.
        given: how images become inputs; None for the network's own way.

    Raises:
        ValueError: in one line, what is missing and how to get it.
    """
    head, _, rest = spec.partition(":")
    if rest and head in READERS:
        read, name = READERS[head], rest
    elif Path(spec).suffix in FILES:
        read, name = FILES[Path(spec).suffix], spec
    elif spec.rpartition(":")[0].endswith(".py"):
        read, name = code_network, spec
    else:
        raise ValueError(
            f"{spec!r} names no network: write {', '.join(f'{k}:NAME' for k in READERS)}, "
            "FILE.onnx, FILE.pt2 or FILE.py:FUNCTION"
        )
    path = Path(name.rpartition(":")[0] if read is code_network else name)
    if read in (*FILES.values(), code_network) and not path.is_file():
        raise ValueError(f"{spec}: there is no file {path}")
    try:
        return read(name, num_classes, given)
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
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{spec} cannot be opened: {' '.join(str(error).split()):.200}") from None


def _load(module: nn.Module, path: Path) -> None:
    """Put the weights of a file into a module; nothing is unpickled."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state: Any = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    module.load_state_dict(state)


def _weights_digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Tiled(nn.Module):
    """A network on square tiles of a large image, whose outputs are blended where they overlap.

    Weights of a tile fall linearly to its borders, so that no seam shows.

    Args:
        module: (N, 3, h, w) to (N, C, h, w), or to outputs that are resized to that.
        tile: side of a tile.
        overlap: pixels that neighbours share, less than half of `tile`.
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
                found = logits_of(self.module(piece))
                if found.shape[-2:] != piece.shape[-2:]:
                    found = nn.functional.interpolate(
                        found, size=piece.shape[-2:], mode="bilinear", align_corners=False
                    )
                ramps = [self._ramp(side, found) for side in piece.shape[-2:]]
                weight = ramps[0][:, None] * ramps[1]
                if total is None:
                    total = found.new_zeros(*found.shape[:2], height, width)
                total[place] += found * weight
                weights[place] += weight
        assert total is not None
        return total / weights

    def _starts(self, side: int) -> list[int]:
        last = max(side - self.tile, 0)
        step = self.tile - self.overlap
        return [*range(0, last, step), last]

    def _ramp(self, side: int, like: Tensor) -> Tensor:
        distance = torch.arange(1, side + 1, device=like.device, dtype=like.dtype)
        return torch.minimum(distance, distance.flip(0)).clamp(max=max(self.overlap, 1))


class NamedSource(NetworkSource):
    """A network by name on a split of a data set; see `open_network`.

    Attributes:
        network: the network, with what makes its inputs.
        joined: the classes of the network that become one, for each class; None for all as it is.
        amp: whether to run the network in bfloat16 (CPU) or float16 (GPU).
        fit_source: the hold-out that was stated.
        on: opens the same network on another data set.
    """

    network: Network
    joined: tuple[tuple[int, ...], ...] | None
    amp: bool
    fit_source: NamedSource | None = None
    on: Callable[[str], NamedSource]

    def holdout(self) -> NetworkSource | None:
        """The hold-out that was stated, else that of the data set."""
        return self.fit_source or super().holdout()

    def shifted(self, shift: Shift) -> NetworkSource:
        """The same network on changed images, or on another data set (data:NAME:ROOT)."""
        if shift.name != DATA:
            return super().shifted(shift)
        other = self.on(str(shift.value))
        other.name = f"{self.name}, {shift}"
        return other

    @torch.inference_mode()
    def predict(self, inputs: Tensor, labels: Tensor, names: Sequence[str] | None) -> Batch:
        """What the network makes of a batch; scores become probabilities by their sum."""
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        half = torch.float16 if kind == "cuda" else torch.bfloat16
        with torch.autocast(kind, half, enabled=self.amp):
            batch = super().predict(inputs, labels, names)
        values, outputs = batch.values, self._outputs(batch.values)
        if outputs == "scores":
            values = values.clamp_min(0)
            total = values.sum(1, keepdim=True)
            values = torch.where(total > 0, values / total, 1 / values.shape[1])
        if self.joined is not None:
            values = _joined(values, self.joined, probs=outputs != "logits")
        named: Kind = "logits" if outputs == "logits" else "probs"
        images = batch.images
        if images is not None and images.shape[2:] != values.shape[2:] and values.ndim == 4:
            images = nn.functional.interpolate(images, values.shape[2:], mode="bilinear")
        return replace(batch, kind=named, values=values, images=images)

    def _outputs(self, values: Tensor) -> Outputs:
        """What the outputs are; decided by the first batch where nobody has said it."""
        if self.network.outputs == "auto":
            inside = bool((values.min() >= 0) & (values.max() <= 1.5))
            if not inside:
                self.network.outputs = "logits"
            elif bool(((values.sum(1) - 1).abs() <= _SUM_TO_1).all()):
                self.network.outputs = "probs"
            else:
                self.network.outputs = "logits"
                log.warning(
                    "all outputs of %s lie between 0 and 1.5: if they are scores of a mask "
                    "classifier, say --outputs scores",
                    self.name,
                )
        return self.network.outputs


def _joined(values: Tensor, groups: Sequence[Sequence[int]], *, probs: bool) -> Tensor:
    """(N, G, *S) sums of the probabilities of each group of classes; of logits as logits."""
    if not probs:
        return torch.stack([values[:, list(group)].logsumexp(1) for group in groups], 1)
    joined = torch.stack([values[:, list(group)].sum(1) for group in groups], 1)
    return joined / joined.sum(1, keepdim=True).clamp_min(torch.finfo(joined.dtype).tiny)


def read_groups(
    path: Path, class_names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The classes in a YAML file of `new class: [classes of the network]`, and their members.

    Classes that the file leaves out count for nothing: the probabilities of the others are divided
    by their sum.
    """
    stated = read_yaml(path)
    if not isinstance(stated, dict) or len(stated) < 2:
        raise ValueError(f"{path} must hold two lines or more, such as `vehicle: [car, bus]`")
    groups = []
    for members in stated.values():
        group = []
        for member in members if isinstance(members, list) else [members]:
            c = list(class_names).index(member) if member in class_names else member
            if not isinstance(c, int) or not 0 <= c < (len(class_names) or 2**16):
                raise ValueError(f"{path}: {member!r} is no class of the network")
            group.append(c)
        groups.append(tuple(group))
    known = [c for group in groups for c in group]
    if len(set(known)) < len(known):
        raise ValueError(f"{path}: a class of the network stands in two lines")
    return tuple(map(str, stated)), tuple(groups)


def parse_data(text: str, **options: Any) -> tuple[DataConfig, str]:
    """The data set and its part in NAME:ROOT or NAME:ROOT:SPLIT; the part is test by default.

    SPLIT is train, val, holdout or test; val is the part that the publisher calls so.
    """
    name, _, rest = text.partition(":")
    root, _, split = rest.rpartition(":")
    if split not in ("train", "val", "holdout", "test") or not root:
        root, split = rest, "test"
    if name not in DATASETS or not root:
        raise ValueError(
            f"{text!r} names no data: write NAME:ROOT or NAME:ROOT:SPLIT, where NAME is one of "
            f"{', '.join(DATASETS)}"
        )
    split = DATASETS[name].val if split == "val" else split
    return DataConfig(name=name, root=root, augment=False, **options), split


def open_network(
    spec: str,
    data_spec: str,
    *,
    holdout: str | None = None,
    holdout_fraction: float | None = None,
    group: str | None = None,
    input_size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    outputs: Outputs | None = None,
    label_map: str | Path | None = None,
    classes: str | Path | None = None,
    tile: int | None = None,
    overlap: int = 64,
    device: torch.device | str = "cpu",
    amp: bool = False,
    batch_size: int = 8,
    workers: int = 2,
    skip_bad: bool = False,
    num_classes: int | None = None,
    ignore_index: int | None = None,
) -> NamedSource:
    """A network on a data set, both by name.

    Args:
        spec: torchvision:NAME[@WEIGHTS], hf:ORG/NAME or hf:FOLDER, smp:…, timm:NAME[@FILE],
            FILE.onnx, FILE.pt2, or FILE.py:FUNCTION, which is code that runs.
        data_spec: NAME:ROOT or NAME:ROOT:SPLIT of a data set.
        holdout: another such text: the images to fit calibrators on.
        holdout_fraction: cut this share of the images off as hold-out; the rest is evaluated.
        group: regular expression; images whose names share what it finds are cut off together.
        input_size: (h, w) that images are resized to; logits are resized back.
        mean: of each channel on a 0-1 scale; with std instead of the network's own.
        std: of each channel.
        outputs: logits, probs or scores, where the outputs do not tell; see `Network`.
        label_map: YAML file from labels of the data to classes of the network.
        classes: YAML file that joins classes of the network; their probabilities are added.
        tile: side of square tiles that large images are cut into.
        overlap: pixels that tiles share.
        device: where the network works.
        amp: run the network in half precision.
        batch_size: images at a time; one where they differ in size.
        workers: processes that read images.
        skip_bad: leave out images that cannot be used.
        num_classes: of your own masks without a classes.txt.
        ignore_index: mask value that is not counted.

    Raises:
        ValueError: in one line, what does not fit.
    """
    if outputs not in (None, *OUTPUTS):
        raise ValueError(f"outputs must be one of {', '.join(OUTPUTS)}, but is {outputs!r}")
    stated = {"skip_bad": skip_bad, "num_classes": num_classes, "ignore_index": ignore_index}
    given = None
    if input_size is not None or mean is not None or std is not None:
        given = Normalise(mean or IMAGENET_MEAN, std or IMAGENET_STD, input_size)
    config, _ = parse_data(data_spec, **stated)
    network = read_network(spec, data.build(config).num_classes, given)
    if outputs is not None:
        network.outputs = outputs
    if tile is not None:
        network.module = Tiled(network.module, tile, overlap)
    names, groups = network.class_names, None
    if classes is not None:
        names, groups = read_groups(Path(classes), names)
    key = digest(network.key, repr(network.prepare), outputs, tile, overlap, amp, groups)

    def on(text: str) -> NamedSource:
        """The network on a data set."""
        config, split = parse_data(text, **stated)
        splits = data.build(config)
        samples = getattr(splits, split)
        wanted = names or splits.class_names
        if label_map is not None:
            table = read_label_map(Path(label_map), splits.class_names, wanted)
            samples = samples.with_part(MappedPart(samples.part, table))
        elif len(wanted) != splits.num_classes:
            raise ValueError(
                f"the network has {len(wanted)} classes and {config.name} has "
                f"{splits.num_classes}: --label-map maps the labels of the data, --classes joins "
                "classes of the network"
            )
        splits = replace(
            splits,
            test=samples.with_prepare(network.prepare),
            num_classes=len(wanted),
            class_names=tuple(wanted),
            ignore_index=splits.ignore_index if label_map is None else IGNORED,
            palette=splits.palette if label_map is None else None,
        )
        source = NamedSource(
            network.module,
            splits,
            config=config,
            device=device,
            batch_size=batch_size,
            workers=workers,
            name=name_of(spec),
            key=key,
        )
        source.network, source.joined, source.amp, source.on = network, groups, amp, on
        source._pad_to, source._padded = network.pad_to, False
        return source

    source = on(data_spec)
    if holdout_fraction is not None:
        source.fit_source, source = cut(source, holdout_fraction, group=group)
    elif holdout is not None:
        source.fit_source = on(holdout)
    return source


def cut(
    source: NamedSource, fraction: float, *, group: str | None = None, seed: int = 0
) -> tuple[NamedSource, NamedSource]:
    """Cut a share of the images off as hold-out, at random: (hold-out, rest).

    Args:
        source: a network on images.
        fraction: the share of the images, or of the groups.
        group: regular expression; images in whose names it finds the same text stay together, as
            frames of one video or slices of one patient must.
        seed: decides which.
    """
    units: dict[str, list[int]] = {}
    for index, name in enumerate(source.names):
        found = re.search(group, name) if group else None
        units.setdefault(found[0] if found else name, []).append(index)
    size = round(len(units) * fraction)
    if not 0 < size < len(units):
        raise ValueError(
            f"a hold-out of {fraction:g} of {len(units)} images or groups leaves one side empty"
        )
    order = np.random.default_rng(seed).permutation(len(units))
    members = list(units.values())
    sides = [sorted(i for u in part for i in members[u]) for part in (order[:size], order[size:])]
    held, rest = (source.only(side) for side in sides)
    assert isinstance(held, NamedSource) and isinstance(rest, NamedSource)
    return held, rest
