"""Every loss of the grammar, and random batches to compute it on."""

from dataclasses import dataclass, field

import torch

from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss


@dataclass(frozen=True)
class Loss:
    """A spec with its hyper-parameters."""

    spec: str
    hyper: dict = field(default_factory=dict)

    def __str__(self):
        return " ".join([self.spec, *(f"{key}={value}" for key, value in self.hyper.items())])

    def build(self, **options):
        return build_loss(self.spec, **self.hyper, **options)


# Each loss, and pairs and all of them at once: what they share must not mix.
LOSSES = [
    *map(Loss, BASE_LOSSES),
    *(Loss(f"nll+{name}") for name in AUXILIARY_LOSSES),
    Loss("fl+mdca"),
    Loss("brier+dca"),
    Loss("dual+" + "+".join(AUXILIARY_LOSSES)),
    # Hyper-parameters that choose another formula.
    Loss("ls", {"slope": 0.2}),
    Loss("fl", {"gamma": 0.5}),
    Loss("flsd", {"gamma": 0.5}),
    Loss("dual", {"gamma": 0.5}),
    Loss("svls", {"sigma": 0.4}),
    Loss("nll+mbls", {"margin": 1.0}),  # random logits seldom lie 10 apart
    Loss("nll+ace", {"soft": True, "bins": 5}),
    Loss("nll+dece", {"bins": 4, "t_a": 3.0, "t_b": 0.1}),
]

# For what the criterion does once for all losses: a plain base, one that reads every logit, one of
# neighbours, one of batch statistics, soft bins, and all the rest at once.
FEW = [
    Loss("fl+mdca"),
    Loss("ls", {"slope": 0.2}),
    Loss("svls"),
    Loss("dicece"),
    Loss("nll+ace", {"soft": True, "bins": 5}),
    Loss("dual+" + "+".join(AUXILIARY_LOSSES)),
]


def batch(*spatial, n=3, k=4, ignored=0.2, seed=0, dtype=torch.float64):
    """(n, k, *spatial) logits and (n, *spatial) labels, a share of them 255."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, k, *spatial, generator=generator, dtype=dtype)
    labels = torch.randint(0, k, (n, *spatial), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels


def multilabel_batch(*spatial, n=3, k=3, ignored=0.2, seed=0, dtype=torch.float64):
    """(n, k, *spatial) logits and labels of 0 and 1, a share of them 255, other ones a class."""
    logits, _ = batch(*spatial, n=n, k=k, seed=seed, dtype=dtype)
    _, labels = batch(k, *spatial, n=n, k=2, ignored=ignored, seed=seed + 1)
    return logits, labels
