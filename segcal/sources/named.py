"""A network by name on a data set by name.

open_network("torchvision:deeplabv3_resnet50", "voc2012:data")
open_network("glue.py:espnet", "camvid:CamVid:test", holdout="camvid:CamVid:val")
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from segcal import data
from segcal.data.benchmarks import IGNORED, mapped, read_label_map
from segcal.data.options import DATASETS, DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, ImagePart, Samples
from segcal.data.shift import DATA, Shift
from segcal.data.splits import Splits
from segcal.files import one_line, read_yaml
from segcal.pixels import look_like_scores, resolve_ignore_index, scores_to_probs
from segcal.sources.network import NetworkSource
from segcal.sources.readers import Network, Normalise, Outputs, Tiled, name_of, read_network
from segcal.sources.source import Batch, Kind, digest, logits_of, resize

log = logging.getLogger(__name__)
_SUM_TO_1 = 1e-3  # of probabilities in half precision
Groups = tuple[tuple[int, ...], ...]  # classes of a network that become one


@dataclass(frozen=True)
class NamedNetwork:
    """A network by name, with all that is stated about it, to be opened on images."""

    network: Network
    class_names: tuple[str, ...]  # after classes were joined; none if the network has no names
    joined: Groups | None  # the classes of the network that become each class, if any do
    label_map: Path | None  # YAML file from labels of the data to classes of the network
    amp: bool  # run in bfloat16 (CPU) or float16 (GPU)
    group: str  # see `Source`
    data: Mapping[str, Any]  # options of `DataConfig`
    running: Mapping[str, Any]  # options of `NetworkSource`

    def on(self, text: str) -> NamedSource:
        """The network on a data set; see `parse_data`."""
        config, split = parse_data(text, **self.data)
        splits = data.build(config)
        samples = getattr(splits, split)
        wanted = self.class_names or splits.class_names
        ignored, palette = splits.ignore_index, splits.palette
        if self.label_map is not None:
            table = read_label_map(self.label_map, splits.class_names, wanted)
            samples = replace(samples, part=mapped(samples.part, table))
            ignored, palette = IGNORED, None
        elif len(wanted) != splits.num_classes:
            raise _other_classes(len(wanted), splits.num_classes)
        splits = replace(
            splits,
            test=replace(samples, prepare=self.network.prepare),
            num_classes=len(wanted),
            class_names=tuple(wanted),
            ignore_index=ignored,
            palette=palette,
        )
        return NamedSource(self, splits, config)

    def on_images(self, folder: str | Path) -> NetworkSource:
        """The network on a folder of images without labels."""
        count = self.data["num_classes"]
        if not self.class_names and count is None:
            name = self.running["name"]
            raise ValueError(f"{name} does not say how many classes it has: state num_classes")
        names = self.class_names or tuple(f"class {c}" for c in range(count))
        none = Samples(ImagePart([]), [], prepare=self.network.prepare)
        ignored = resolve_ignore_index(self.data["ignore_index"], len(names))
        splits = Splits(none, none, none, len(names), names, ignored, None, False)
        return NamedSource(self, splits).on_images(folder, skip_bad=self.data["skip_bad"])


def _other_classes(found: int, wanted: int) -> ValueError:
    return ValueError(
        f"the network has {found} classes, and the data {wanted}: --label-map maps the labels of "
        "the data, --classes joins classes of the network"
    )


class NamedSource(NetworkSource):
    """A network by name on the test part of a data set; see `open_network`."""

    score_sums: dict[str, float]
    fit_source: NamedSource | None = None  # the hold-out that was stated

    def __init__(
        self, by_name: NamedNetwork, splits: Splits, config: DataConfig | None = None
    ) -> None:
        super().__init__(by_name.network.module, splits, config=config, **by_name.running)
        self.by_name, self.group, self.score_sums = by_name, by_name.group, {}
        self._pad_to = by_name.network.pad_to

    def holdout(self) -> NetworkSource | None:
        """The hold-out that was stated: the network may have seen that of the data set."""
        return None if self.fit_source is None else self._viewing(self.fit_source)

    def shifted(self, shift: Shift) -> NetworkSource:
        """The same network on changed images, or on another data set (data:NAME:ROOT)."""
        if shift.name != DATA:
            return super().shifted(shift)
        other = self.by_name.on(str(shift.value))
        other.name = f"{self.name}, {shift}"
        return self._viewing(other)

    def _viewing(self, other: NamedSource) -> NamedSource:
        """Another source of this network, pooled over the same views."""
        other = copy.copy(other)
        for name in ("_views", "_viewed", "pools", "calibrators"):
            setattr(other, name, getattr(self, name))
        return other

    def __iter__(self) -> Iterator[Batch]:
        self.score_sums = {}
        yield from super().__iter__()

    @torch.inference_mode()
    def predict(self, inputs: Tensor, labels: Tensor, names: Sequence[str] | None) -> Batch:
        """What the network makes of a batch; scores become probabilities by their sum."""
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        half = torch.float16 if kind == "cuda" else torch.bfloat16
        try:
            with torch.autocast(kind, half, enabled=self.by_name.amp):
                batch = super().predict(inputs, labels, names)
        except (ValueError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of code that others wrote, so of any kind
            raise ValueError(
                f"{self.name} cannot use inputs of shape {tuple(inputs.shape)}: "
                f"{one_line(error):.300} ({type(error).__name__})"
            ) from error
        values, joined = batch.values, self.by_name.joined
        if joined is None and values.shape[1] != self.num_classes:
            raise _other_classes(values.shape[1], self.num_classes)
        if joined is not None and max(map(max, joined)) >= values.shape[1]:
            raise ValueError(
                f"--classes: {self.name} has the classes 0 to {values.shape[1] - 1}, and "
                f"{max(map(max, joined))} is none of them"
            )
        outputs = self._outputs(values)
        if outputs == "scores":
            if bool((values < -0.01).any()):
                raise ValueError(f"scores are at least 0, but {self.name} gives {values.min():.3g}")
            sums = values.clamp_min(0).sum(1).flatten(1).mean(1).tolist()
            self.score_sums.update(zip(names or (), sums, strict=False))
        named: Kind = "logits" if outputs == "logits" else "probs"
        return replace(batch, kind=named, values=_finished(values, outputs, joined))

    def logit_module(self) -> nn.Module:
        """The network with all that this source does to its outputs, as one module."""
        inputs, label = self.samples[0]
        self.predict(inputs[None], label[None], None)  # decides what the outputs are
        return _LogitModule(self.by_name.network, self.by_name.joined)

    def _outputs(self, values: Tensor) -> Outputs:
        """What the outputs are; decided by the first batch where nobody has said it."""
        network = self.by_name.network
        if network.outputs == "auto":
            network.outputs = "logits"
            if look_like_scores(values):
                if bool(((values.sum(1) - 1).abs() <= _SUM_TO_1).all()):
                    network.outputs = "probs"
                else:
                    log.warning(
                        "all outputs of %s lie between 0 and 1.5: if they are scores of a mask "
                        "classifier, say --outputs scores",
                        self.name,
                    )
        return network.outputs


def _finished(values: Tensor, outputs: Outputs, joined: Groups | None) -> Tensor:
    """Logits, or probabilities of outputs that are none, of the classes that are evaluated.

    The probabilities of classes that are joined are added; logits stay logits.
    """
    if outputs == "scores":
        values = scores_to_probs(values.clamp_min(0))
    if joined is None:
        return values
    groups = [values[:, list(group)] for group in joined]
    if outputs == "logits":
        return torch.stack([group.logsumexp(1) for group in groups], 1)
    sums = torch.stack([group.sum(1) for group in groups], 1)
    return sums / sums.sum(1, keepdim=True).clamp_min(torch.finfo(sums.dtype).tiny)


class _LogitModule(nn.Module):
    """A network by name, from its inputs to logits (N, C, h, w) at their size."""

    def __init__(self, network: Network, joined: Groups | None) -> None:
        super().__init__()
        self.module, self.pad_to = network.module, network.pad_to
        self.outputs, self.joined = network.outputs, joined

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padded = pad(images, (0, -width % self.pad_to, 0, -height % self.pad_to))
        values = logits_of(self.module(padded))
        if values.ndim == images.ndim:
            values = resize(values, padded.shape[2:])[..., :height, :width]
        values = _finished(values, self.outputs, self.joined)
        if self.outputs == "logits":
            return values
        return values.clamp_min(torch.finfo(values.dtype).tiny).log()


def read_groups(path: Path, class_names: Sequence[str]) -> tuple[tuple[str, ...], Groups]:
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
                hint = "" if class_names else ", which names none: write its number"
                raise ValueError(f"{path}: {member!r} is no class of the network{hint}")
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
    data_spec: str | None = None,
    *,
    images: str | Path | None = None,
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
) -> NetworkSource:
    """A network on a data set, both by name.

    Args:
        spec: torchvision:NAME[@WEIGHTS], hf:ORG/NAME or hf:FOLDER, smp:…, timm:NAME[@FILE],
            FILE.onnx, FILE.pt2, or FILE.py:FUNCTION, which is code that runs.
        data_spec: NAME:ROOT or NAME:ROOT:SPLIT of a data set.
        images: instead of a data set: a folder of images without labels.
        holdout: another such text: the images to fit calibrators on.
        holdout_fraction: cut this share of the images off as hold-out; the rest is evaluated.
        group: regular expression; images whose names share what it finds belong together, in
            intervals and in the cut.
        input_size: (h, w) that images are resized to; logits are resized back.
        mean: of each channel on a 0-1 scale; with std instead of the network's own.
        std: of each channel.
        outputs: logits, probs or scores, where the outputs do not tell; see `Network`.
        label_map: YAML file from labels of the data to classes of the network.
        classes: YAML file that joins classes of the network; their probabilities are added.
        tile: side of square tiles that large images are cut into.
        overlap: pixels that tiles share.
        batch_size: images at a time; one where they differ in size.
        workers: processes that read images.
        skip_bad: leave out images that cannot be used.
        num_classes: of your own masks without a classes.txt; of a network on `images` that does
            not know it itself.
        ignore_index: mask value that is not counted.
    """
    if outputs not in (None, *get_args(Outputs)):
        raise ValueError(f"outputs must be one of {get_args(Outputs)}, but is {outputs!r}")
    stated = {"skip_bad": skip_bad, "num_classes": num_classes, "ignore_index": ignore_index}
    if std is not None and min(std) <= 0:
        raise ValueError("std (--std) must be above 0: images are divided by it")
    given = None
    if input_size is not None or mean is not None or std is not None:
        given = Normalise(mean or IMAGENET_MEAN, std or IMAGENET_STD, input_size)
    if holdout is not None and holdout_fraction is not None:
        raise ValueError("state --holdout or --holdout-fraction, but not both")
    if (data_spec is None) == (images is None):
        raise ValueError(f"{spec} needs a data set, or a folder of images without labels")
    network = read_network(spec, given)
    if outputs is not None:
        network.outputs = outputs
    if tile is not None:
        network.module = Tiled(network.module, tile, overlap)
    names, groups = network.class_names, None
    if classes is not None:
        names, groups = read_groups(Path(classes), names)
    key = digest(network.key, repr(network.prepare), outputs, tile, overlap, amp, groups)
    by_name = NamedNetwork(
        network,
        names,
        groups,
        None if label_map is None else Path(label_map),
        amp,
        group or "",
        data=stated,
        running={
            "device": device,
            "batch_size": batch_size,
            "workers": workers,
            "name": name_of(spec),
            "key": key,
        },
    )
    if data_spec is None:
        assert images is not None
        return by_name.on_images(images)
    source = by_name.on(data_spec)
    if holdout_fraction is not None:
        held, source = cut(source, holdout_fraction)
        source.fit_source = held
    elif holdout is not None:
        source.fit_source = by_name.on(holdout)
        if source.fit_source.samples.fingerprint() == source.samples.fingerprint():
            log.warning(
                "the hold-out %s has the images that are evaluated, so what is fitted looks better "
                "than it is: name others, such as NAME:ROOT:val",
                holdout,
            )
    held_out = holdout if holdout_fraction is None else f"{holdout_fraction:g} of the data"
    source.config = f"model: {spec}\ndata: {data_spec}\nholdout: {held_out or 'null'}\n"
    return source


def cut(source: NamedSource, fraction: float) -> tuple[NamedSource, NamedSource]:
    """Cut a share of the images off as hold-out, at random: (hold-out, rest).

    Images of one group stay together, as frames of one video or slices of one patient must; the
    share is then one of groups.
    """
    units: dict[str, list[int]] = {}
    for index, unit in enumerate(source.groups_of(source.names) or source.names):
        units.setdefault(unit, []).append(index)
    size = round(len(units) * fraction)
    if not 0 < size < len(units):
        raise ValueError(
            f"a hold-out of {fraction:g} of {len(units)} images or groups leaves one side empty"
        )
    order = np.random.default_rng(0).permutation(len(units))
    members = list(units.values())
    sides = [sorted(i for u in part for i in members[u]) for part in (order[:size], order[size:])]
    held, rest = (source.only(side) for side in sides)
    assert isinstance(held, NamedSource) and isinstance(rest, NamedSource)
    return held, rest
