"""A network and a calibrator whose effect is plain to see, for the tests of evaluation."""

import torch

from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.sources.network import NetworkSource


class Halve(torch.nn.Module):
    """A calibrator that halves the logits."""

    def forward(self, logits, images=None):
        return logits / 2


class Network(torch.nn.Sequential):
    """Random but confident, and it counts the images it has seen."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        self.seen = 0

    def forward(self, images):
        self.seen += len(images)
        return 3 * super().forward(images)


def network_source(network):
    """`network` on 23 digits."""
    config = DataConfig(name="digits", limit=23)
    return NetworkSource(
        network, build_data(config), config=config, split="holdout", batch_size=4, workers=0
    )
