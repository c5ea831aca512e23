"""YAML is text, numbers, lists and mappings, and never more than its bytes."""

import pytest

from segcal.cli import main
from segcal.files import BadFile, read_yaml
from segcal.sources.saved import PredictionFolder
from segcal.training.config import load_config
from tests.support.saved import save_folder

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
HOSTILE = {
    "twice": ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "2 times"),
    "alias": ("a: &x 1\nb: *x\n", "alias"),
    "bomb": (BOMB, "alias"),
    "recursive": ("&a [*a]", "alias"),
    "merge": ("a: &x {b: 1}\nc:\n  <<: *x\n", "alias"),
    "deep list": ("a: " + "[" * 900 + "]" * 900, "recursion"),
    "deep mapping": ("{a: " * 900 + "1" + "}" * 900, "recursion"),
    "large": ("a: " + "x" * 2**20, "1 MiB"),
    "open": ("a: 1\nb: [\n", "line 3: "),
    "two": ("a: 1\n---\nb: 1\n", "line 2: "),
    "date": ("a: 2020-99-99", "month must be in"),
}


def test_what_is_refused(tmp_path):
    for case in HOSTILE:
        text, reason = HOSTILE[case]
        path = tmp_path / "a.yaml"
        path.write_text(text)
        with pytest.raises(BadFile, match=rf"a\.yaml: .*{reason}") as caught:
            read_yaml(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["bomb", "deep list", "deep mapping"])
def test_manifests_and_settings_go_through_it(tmp_path, case):
    (tmp_path / "c.yaml").write_text(HOSTILE[case][0])
    with pytest.raises(BadFile, match=r"c\.yaml: "):
        load_config(tmp_path / "c.yaml")
    folder = save_folder(tmp_path / "in", 1)
    (folder / "manifest.yaml").write_text(HOSTILE[case][0])
    with pytest.raises(BadFile, match=r"manifest\.yaml: "):
        PredictionFolder(folder)


@pytest.mark.parametrize("case", ["deep list", "deep mapping"])
def test_commands_refuse_it_in_one_line(tmp_path, capsys, case):
    (tmp_path / "c.yaml").write_text(HOSTILE[case][0])
    folder = save_folder(tmp_path / "in", 1)
    (folder / "manifest.yaml").write_text(HOSTILE[case][0])
    out = tmp_path / "out"
    for command in (
        ["train", "--config", str(tmp_path / "c.yaml"), "--out", str(out)],
        ["eval", "--predictions", str(folder), "--out", str(out)],
    ):
        assert main(command) == 2
        said = capsys.readouterr()
        assert not said.out and len(said.err.splitlines()) == 1
        assert "recursion" in said.err
    assert not out.exists()


def test_what_is_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: [1, 2.5, true, null, 'ä']}\nc: &unused text\n", encoding="utf-8")
    assert read_yaml(path) == {"a": {"b": [1, 2.5, True, None, "ä"]}, "c": "text"}
    path.write_text("")
    assert read_yaml(path) is None


def test_a_manifest_of_a_billion_classes(tmp_path):
    folder = save_folder(tmp_path / "in", 1)
    (folder / "manifest.yaml").write_text("num_classes: 1000000000")
    with pytest.raises(ValueError, match="at most 23170"):
        PredictionFolder(folder)
