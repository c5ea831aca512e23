"""A network that reads text, the Global-Pool CNN, and its word vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segcal.models.options import ModelConfig

_SHORTEST = 21  # words: three convolutions and two maxima, each over 5, leave one position of 21


class GlobalPoolCNN(nn.Module):
    """Convolutions over words and the maximum over the text: (N, L) to (N, num_classes).

    Word vectors, three convolutions of 128 channels over 5 positions, a maximum over 5 positions
    after each of the first two, the maximum over all positions, and two linear layers (Lin et al.
    2013, as the public code of Mukhoti et al. 2020 builds it). Word 0 is padding, whose vector is
    zero; `width` is the length of the vectors.
    """

    def __init__(self, *, num_classes: int, words: int, width: int = 100) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(inside, 128, 5) for inside in (width, 128, 128))
        self.hidden = nn.Linear(128, 128)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(128, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] < _SHORTEST:
            raise ValueError(f"Expected {_SHORTEST} words or more, but got {tokens.shape[1]}")
        first, second, third = self.convs
        x = self.encoder(tokens).transpose(1, 2)  # (N, width, L)
        x = F.max_pool1d(F.relu(first(x)), 5, stride=1)
        x = F.max_pool1d(F.relu(second(x)), 5, stride=1)
        x = F.relu(third(x)).amax(2)  # (N, 128)
        return self.head(self.dropout(F.relu(self.hidden(x))))


def read_glove(path: Path, words: Sequence[str], width: int) -> Tensor:
    """(len(words), width) vectors from a GloVe text file: each line is a word and its numbers.

    Words that the file does not have, the padding among them, get zeros, as in public code.
    """
    if not path.is_file():
        raise ValueError(f"Expected a GloVe text file at {path}, but there is none")
    number_of = {word: number for number, word in enumerate(words) if word}
    vectors = torch.zeros(len(words), width)
    found = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for at, line in enumerate(file, 1):
            word, _, rest = line.rstrip().partition(" ")
            number = number_of.get(word)
            if number is None:
                continue
            try:
                vectors[number] = torch.tensor([float(x) for x in rest.split(" ")]).view(width)
            except (ValueError, RuntimeError):
                raise ValueError(
                    f"Expected {width} numbers after the word in {path}, line {at}, but got "
                    f"{rest[:30]!r} …"
                ) from None
            found += 1
    if not found:
        raise ValueError(f"Expected word vectors in {path}, but it has none of the vocabulary")
    return vectors


def gpcnn(config: ModelConfig, *, num_classes: int, words: Sequence[str]) -> nn.Module:
    """The Global-Pool CNN, with GloVe vectors if `encoder_weights` names a file of them."""
    model = GlobalPoolCNN(num_classes=num_classes, words=len(words), width=config.embedding)
    if config.encoder_weights is not None:
        vectors = read_glove(Path(config.encoder_weights), words, config.embedding)
        model.encoder.weight.data.copy_(vectors)
    model.encoder.requires_grad_(not config.freeze)
    return model
