"""Sources: where batches of named predictions come from."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from segcal.sources.source import KINDS, Batch, Kind, Source

__all__ = ["KINDS", "Batch", "Kind", "Source", "open_source"]

FORMATS = {  # of saved predictions: the module and the class that read them
    "segcal": ("segcal.sources.saved", "PredictionFolder"),
    "nnunet": ("segcal.integrations.nnunet", "NnunetFolder"),
}


def open_source(
    path: str | Path | Source,
    data: str | None = None,
    *,
    unlabelled: str | Path | None = None,
    format: str = "segcal",
    **options: Any,
) -> Source:
    """Open a source of predictions: a run, saved predictions, or any network on a data set.

    Args:
        path: the folder of a run, a folder or a file of predictions, or the name of a network
            such as torchvision:deeplabv3_resnet50 or glue.py:network; see
            `segcal.sources.named.open_network`.
        data: NAME:ROOT or NAME:ROOT:SPLIT, the data set of a network that is given by name.
        unlabelled: a folder of images without labels, to run a network by name or a run on.
        format: of saved predictions: segcal, or nnunet for the output of
            `nnUNetv2_predict --save_probabilities`.
        **options: of `segcal.sources.network.RunSource` for a run (split, weights, device,
            batch_size, workers, skip_bad, group), of `segcal.sources.saved.PredictionFolder` for
            saved predictions (skip_bad, kind, layout, axes, labels, group, …), and of
            `segcal.sources.named.open_network` for a network by name.
    """
    if isinstance(path, Source):
        return path
    if data is not None or (unlabelled is not None and not Path(path).is_dir()):
        from segcal.sources.named import open_network  # saved predictions need none of it

        return open_network(str(path), data, images=unlabelled, **options)
    path = Path(path)
    if not path.exists():
        from segcal.sources.readers import is_network

        if is_network(str(path)):
            raise ValueError(f"{path} is a network: name its images too, with data='NAME:ROOT'")
    if format not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, but is {format!r}")
    if format == "segcal" and (path / "config.yaml").is_file():
        from segcal.sources.network import RunSource  # saved predictions need none of it

        run = RunSource(path, **options)
        if unlabelled is None:
            return run
        return run.on_images(unlabelled, skip_bad=bool(options.get("skip_bad")))
    if unlabelled is not None:
        raise ValueError(f"{path} is neither a run nor a network, which can read {unlabelled}")
    module, reader = FORMATS[format]
    source: Source = getattr(import_module(module), reader)(path, **options)
    return source
