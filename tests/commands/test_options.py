"""Tables of options: what is typed is what a command reads."""

from pathlib import Path

import pytest

from segcal.commands.options import Parser, add_options, typed

TABLE = {
    "--open": "on or off",
    "--limit N": "a whole number",
    "--num-bins N=15": "with a default",
    "--pool probs|logits=probs": "a choice",
    "--layout chw|hwc": "a choice without a default",
    "--labels DIR ...": "folders",
    "--shift SHIFTS *": "may be repeated",
    "--names A,B": "names",
    "--conformal miss=A": "a word with a sign in it",
}


@pytest.fixture
def parse():
    parser = Parser("segcal some", "A command.")
    add_options(parser, TABLE)
    return lambda *words: parser.parse(words)


def test_what_is_not_typed_has_its_default(parse):
    found = vars(parse())
    assert not found.pop("open") and found.pop("typed") == "segcal some"
    assert found == {
        **{"limit": None, "num_bins": 15, "pool": "probs", "layout": None, "labels": ()},
        **{"shift": [], "names": (), "conformal": ()},
    }


def test_what_is_typed_is_of_its_kind(parse):
    found = parse("--open", "--limit", "3", "--shift", "fog", "--shift", "all", "--names", "a,b")
    assert (found.open, found.limit, found.shift) == (True, 3, ["fog", "all"])
    assert found.names == ("a", "b")
    found = parse("--labels", "a", "b", "--pool", "logits", "--conformal=miss=0.1")
    assert found.labels == [Path("a"), Path("b")]
    assert (found.pool, found.conformal) == ("logits", ("miss=0.1",))


def test_wrong_words_are_named(parse):
    for words, said in ((["--limit", "0"], "at least 1"), (["--pool", "x"], "--pool")):
        with pytest.raises(ValueError, match=said):
            parse(*words)


def test_only_what_was_typed_is_handed_on(parse):
    def taker(limit=1, labels=(), layout="chw", open=False, num_bins=3):
        """Takes some of the options."""

    assert typed(parse("--limit", "2"), taker) == {"limit": 2, "num_bins": 15}
