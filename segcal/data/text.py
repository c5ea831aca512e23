"""Text as the numbers of words in a vocabulary: 20 Newsgroups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from segcal.data.options import DataConfig
from segcal.data.samples import ArrayPart, RawDataset
from segcal.files import visible

FOLDERS = {"train": "20news-bydate-train", "test": "20news-bydate-test"}
PADDING = ""  # the word of number 0
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def newsgroups(config: DataConfig) -> RawDataset:
    """20 Newsgroups as 20news-bydate-{train,test}/GROUP/NUMBER, headers left out.

    The vocabulary is that of the training texts; other words are left out.
    """
    if min(config.max_words, config.max_length) < 2:
        raise ValueError(
            f"Expected max_words and max_length of at least 2, "
            f"but got {config.max_words} and {config.max_length}"
        )
    root = Path(config.root)
    folders = {part: root / name for part, name in FOLDERS.items()}
    for folder in folders.values():
        if not folder.is_dir():
            raise ValueError(
                f"Expected 20 Newsgroups ({', '.join(FOLDERS.values())}) in {root}, but there is "
                f"no {folder.name}; data/README.md says how to get it"
            )
    class_names = tuple(path.name for path in visible(folders["train"]) if path.is_dir())
    read = {part: _read(folder, class_names) for part, folder in folders.items()}
    words = vocabulary((text for _, _, text in read["train"]), config.max_words)
    number_of = {word: number for number, word in enumerate(words)}

    def part(name: str) -> ArrayPart:
        return ArrayPart(
            np.stack([encode(t, number_of, config.max_length) for _, _, t in read[name]]),
            np.array([label for _, label, _ in read[name]]),
            [title for title, _, _ in read[name]],
        )

    train, test = part("train"), part("test")
    return RawDataset(train=train, test=test, class_names=class_names, words=words)


def split_words(text: str) -> list[str]:
    """The words in lower case: letters and digits, apostrophes inside."""
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[str], size: int) -> tuple[str, ...]:
    """The padding and the `size` - 1 most common words, the commonest first."""
    counts = Counter(word for text in texts for word in split_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (PADDING, *ranked[: size - 1])


def encode(text: str, number_of: dict[str, int], length: int) -> np.ndarray:
    """(length,) int32: the numbers of the last known words, zeros before them.

    Padding and cutting at the front is what public code for this data does.
    """
    numbers = [number_of[word] for word in split_words(text) if word in number_of][-length:]
    tokens = np.zeros(length, dtype=np.int32)
    tokens[length - len(numbers) :] = numbers
    return tokens


def _read(folder: Path, class_names: Sequence[str]) -> list[tuple[str, int, str]]:
    """(name, class, text) of every message, without the header that ends at an empty line."""
    found = []
    for label, name in enumerate(class_names):
        group = folder / name
        paths = [path for path in visible(group) if path.is_file()] if group.is_dir() else []
        if not paths:
            raise ValueError(f"Expected messages in {group}, but got none")
        for path in paths:
            header, _, text = path.read_text(encoding="latin-1").partition("\n\n")
            found.append((f"{name}/{path.name}", label, text or header))
    return found
