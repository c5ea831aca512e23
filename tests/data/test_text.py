"""20 Newsgroups: words, numbers, folders, and a run from messages to report."""

import numpy as np
import pytest
import torch

import segcal
from segcal.cli import main
from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.data.shift import Shift
from segcal.data.splits import shifted as build_shifted
from segcal.data.text import encode, split_words, vocabulary
from segcal.sources.network import RunSource

GROUPS = ("alt.atheism", "rec.autos", "sci.space")
TOPICS = ("belief doubt reason", "engine wheel road", "orbit moon rocket")


def write_messages(root, *, each=12):
    """Messages of each group: a header, then words of its topic among others."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for group, topic in zip(GROUPS, TOPICS, strict=True):
            folder = root / f"20news-bydate-{part}" / group
            folder.mkdir(parents=True)
            for i in range(each):
                body = rng.permutation([*topic.split(), "the", "of", "Caf\xe9", "and"])
                text = f"From: secret{i}\nLines: 3\n\n{' '.join(body)}.\n\nmore\n"
                (folder / str(50000 + i)).write_bytes(text.encode("latin-1"))
    return root


def build(root, **options):
    options = {"max_words": 12, "max_length": 30, **options}
    return build_data(DataConfig("newsgroups", root=str(root), **options), seed=0)


def test_words():
    text = "Don't STOP: a_b 3.5 e-mail; (caf\xe9's)"
    assert split_words(text) == ["don't", "stop", "a", "b", "3", "5", "e", "mail", "caf\xe9's"]


def test_vocabulary_is_the_most_common_words():
    texts = ["b b b a a c", "c d"]
    assert vocabulary(texts, 4) == ("", "b", "a", "c")  # a before c: equally common
    assert vocabulary(texts, 100) == ("", "b", "a", "c", "d")


def test_the_last_known_words_are_kept_after_zeros():
    number_of = {"": 0, "x": 1, "y": 2}
    assert encode("y unknown X", number_of, 4).tolist() == [0, 0, 2, 1]
    assert encode("x x y y x", number_of, 4).tolist() == [1, 2, 2, 1]
    assert encode("nothing", number_of, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["data", "domain"])
def test_text_of_another_folder_is_no_shift(tmp_path, name):
    """Its vocabulary is another one: the network would read other words."""
    root = write_messages(tmp_path)
    config = DataConfig("newsgroups", root=str(root), max_words=12, max_length=30)
    with pytest.raises(ValueError, match=r"Expected images to apply .* but newsgroups is text"):
        build_shifted(build_data(config, seed=0), config, Shift(name, str(root)))


def test_newsgroups(tmp_path):
    data = build(write_messages(tmp_path))
    assert data.class_names == GROUPS and len(data.words) == 12
    assert len(data.train) + len(data.holdout) == 36 and len(data.test) == 36
    assert data.test.names[12] == "rec.autos/50000"
    assert not {"from", "lines", "secret0"} & set(data.words)  # the header
    assert {"the", "caf\xe9", "more"} <= set(data.words)
    tokens, label = data.test[13]
    assert tokens.dtype == label.dtype == torch.int64 and tokens.shape == (30,) and label == 1
    words = {data.words[number] for number in tokens}
    known = {"", "the", "of", "caf\xe9", "and", "more"} | set(TOPICS[1].split())
    assert words == known & (set(data.words) | {""})
    with pytest.raises(ValueError, match=r"rec.autos/50000 is a text"):
        data.test.image(12)


def test_vocabulary_is_of_the_training_texts(tmp_path):
    write_messages(tmp_path)
    path = tmp_path / "20news-bydate-test" / "rec.autos" / "50000"
    path.write_text("From: x\n\n" + "unseen " * 1000)
    data = build(tmp_path, max_words=1000)
    assert "unseen" not in data.words and not data.test[12][0].any()


def test_options_of_images_are_refused(tmp_path):
    write_messages(tmp_path)
    for options in ({"rotation": 15.0}, {"resize": 8}, {"flip": 0.5}):
        with pytest.raises(ValueError, match=r"newsgroups, which is text"):
            build(tmp_path, **options)
    with pytest.raises(ValueError, match=r"max_words and max_length of at least 2"):
        build(tmp_path, max_length=1)


def test_a_group_without_messages(tmp_path):
    write_messages(tmp_path)
    for path in (tmp_path / "20news-bydate-test" / "sci.space").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"Expected messages in .*sci.space, but got none"):
        build(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_from_messages_to_report(tmp_path):
    """Trainer, meter and the calibrators of images; a resumed run stays frozen."""
    write_messages(tmp_path)
    rng = np.random.default_rng(1)
    words = [word for topic in TOPICS for word in topic.split()] + ["the", "of", "and"]
    glove = tmp_path / "glove.txt"
    glove.write_text(
        "".join(f"{word} {' '.join(f'{v:.3f}' for v in rng.normal(size=8))}\n" for word in words)
    )
    options = (
        f"--data.name newsgroups --data.root {tmp_path} --data.max_words 40 --data.max_length 30 "
        f"--model.name gpcnn --model.embedding 8 --model.freeze true --batch_size 8 --workers 0 "
        f"--model.encoder_weights {glove} --optim.lr 0.01 --device cpu --out {tmp_path / 'run'}"
    ).split()
    assert main(["train", *options, "--loss", "fl+mdca", "--epochs", "3"]) == 0
    glove.unlink()  # its vectors are in the checkpoint
    assert main(["train", *options, "--loss", "fl+mdca", "--epochs", "8", "--resume"]) == 0
    run = RunSource(tmp_path / "run", weights="last")
    assert run.record["epoch"] == 8 and not run.model.encoder.weight.requires_grad
    values = {w: run.model.encoder.weight[i] for i, w in enumerate(run.splits.words)}
    assert values["caf\xe9"].eq(0).all() and values["moon"].abs().sum() > 0
    rounded = (1000 * run.model.encoder.weight).round() / 1000
    assert torch.allclose(rounded, run.model.encoder.weight, atol=1e-6)  # as in the file
    quick = ["--resamples", "0", "--workers", "0", "--device", "cpu", "--posthoc", "none,ts,lts"]
    assert main(["eval", str(tmp_path / "run"), *quick]) == 0
    report = segcal.Report.load(tmp_path / "run" / "eval" / "report.json")
    assert report.protocol.images == report.protocol.pixels == 36
    assert report.accuracy > 0.6 and report.class_names == GROUPS
    calibrator = segcal.load_calibrator(tmp_path / "run/eval/lts/calibrator.safetensors")
    assert calibrator(torch.randn(2, 3)).shape == (
        2,
        3,
    )  # fitted on logits alone, word numbers unseen
    out = tmp_path / "text.pt2"
    assert main(["export", str(tmp_path / "run"), "--size", "8x8", "--out", str(out)]) == 2
    assert not out.exists()  # a text has no such size
