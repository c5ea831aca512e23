"""One-vs-rest calibration: a curve for each class from its probability to a calibrated one."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.posthoc.pixelwise import SampledScaler
from segcal.posthoc.stream import LARGEST


class OneVsRestScaler(SampledScaler):
    """q_c = f_c(p_c) for each class c by itself, then normalised over the classes.

    Of K sigmoid outputs each has its curve, and nothing is normalised.

    The predicted class may change. A class without pixels to learn from, or with nothing but
    pixels of its own, keeps its p_c. Fitted as `SampledScaler` says.
    """

    def _map(self, dense: Tensor) -> Tensor:
        if self.multilabel:
            return self._log_odds(logsigmoid(dense), logsigmoid(-dense))
        # Softmax divides by the sum, so log q_c are logits of the normalised q.
        log_q = logsigmoid(self._log_odds(*log_probs(dense)))
        return torch.where(dense <= -LARGEST, dense, log_q)  # masked classes stay masked

    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        self._start(self.num_classes_, 0)
        self.to(logits.device)
        if not self.multilabel:
            log_p, log_rest = (log[0] for log in log_probs(logits[None]))
        for c in range(self.num_classes_):
            if self.multilabel:
                known = labels[c] >= 0
                z, of_class = logits[c, known], labels[c, known] == 1
                mine = logsigmoid(z), logsigmoid(-z)
            else:
                mine, of_class = (log_p[c], log_rest[c]), labels == c
            if of_class.any() and not of_class.all():
                self._learn_class(c, *mine, of_class)

    @abstractmethod
    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        """log(q / (1 − q)) of each class, of its log p and log(1 − p), all (N, C, L)."""

    @abstractmethod
    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        """Learn the curve of class c from its log p and log(1 − p), and from y = c, all (P,)."""


def log_probs(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of p and of 1 − p, (N, C, L), of logits (N, C, L); finite for p near 1."""
    log_p = dense.log_softmax(1)
    classes = torch.arange(dense.shape[1], device=dense.device).unsqueeze(1)  # (C, 1)
    top = dense.argmax(1, keepdim=True) == classes  # (N, C, L)
    # Below 1/2, log(1 − p) has no cancellation; the largest p needs the sum of the others.
    others = log_p.masked_fill(top, -torch.inf).logsumexp(1, keepdim=True)  # (N, 1, L)
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))
