"""Every loss of the grammar, and random batches to compute it on."""

import torch

from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES

SPECS = [*BASE_LOSSES, *(f"{base}+{aux}" for base in BASE_LOSSES for aux in AUXILIARY_LOSSES)]


def batch(*spatial, n=3, k=4, ignored=0.2, seed=0, dtype=torch.float64):
    """(n, k, *spatial) logits and (n, *spatial) labels, a share of them 255."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, k, *spatial, generator=generator, dtype=dtype)
    labels = torch.randint(0, k, (n, *spatial), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels
