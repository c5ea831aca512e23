"""Networks by name or file: the scores of `segcal.evaluate` on the same inputs, for every kind."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import segcal
from segcal.sources.named import cut, open_network, parse_data
from segcal.sources.readers import READERS, Normalise, Tiled, is_network
from tests.support.ranks import run_on_ranks

CLASSES, SIZE = 3, (32, 48)  # of masks and images (H, W)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six images with masks of three classes, in the layout of `masks`."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part, count in (("test", 4), ("val", 2)):
        for kind in ("images", "masks"):
            (folder / part / kind).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
            labels = rng.integers(0, CLASSES, SIZE, dtype=np.uint8)
            labels[:2] = 255
            Image.fromarray(image).save(folder / part / "images" / f"seq{i // 2}_{i}.png")
            Image.fromarray(labels).save(folder / part / "masks" / f"seq{i // 2}_{i}.png")
    (folder / "classes.txt").write_text("road\ncar\nsky\n")
    return folder


def small_network(classes=CLASSES):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, classes, 3, 1, 1)).eval()


def read(root, prepare):
    """(inputs, labels) of the test images, one at a time."""
    for path in sorted((root / "test" / "images").glob("*.png")):
        labels = np.asarray(Image.open(root / "test" / "masks" / path.name)).astype(np.int64)
        image = np.asarray(Image.open(path).convert("RGB"))
        yield prepare(image)[None], torch.from_numpy(labels)[None]


def assert_same_scores(spec, root, module, prepare, pad_to=1, **options):
    """`spec` has the scores of `module` on images that `prepare` makes its input."""
    source = open_network(spec, f"masks:{root}", workers=0, **options)
    found = segcal.evaluate_source(source, overlays="none", resamples=0).reports["none"]
    expected = segcal.evaluate(
        module.eval(),
        read(root, prepare),
        num_classes=CLASSES,
        padded=False,
        pad_to=pad_to,
        progress=False,
    )
    assert found.protocol.pixels == expected.protocol.pixels > 0
    for score in ("accuracy", "ece", "sce", "nll", "brier"):
        assert getattr(found, score) == pytest.approx(getattr(expected, score), abs=1e-6), score
    return source


GLUE = """
import torch
from tests.sources.test_named import small_network

def bare():
    return small_network()

def with_input():
    return small_network(), lambda rgb: torch.from_numpy(rgb[..., ::-1].copy()).movedim(2, 0) / 100

def wrong():
    return "a network"

def broken():
    from beside import CLASSES
    return small_network(absent=CLASSES)

def many():
    return small_network(5)

def other_input():
    return small_network(), torch.from_numpy

def no_input():
    return small_network(), lambda rgb: rgb["nothing"]
"""


def test_code(root, tmp_path):
    glue = tmp_path / "glue.py"
    glue.write_text(GLUE)
    assert_same_scores(f"{glue}:bare", root, small_network(), Normalise())
    options = {"mean": (0, 0, 0), "std": (1, 1, 1), "input_size": (16, 24)}
    assert_same_scores(
        f"{glue}:bare", root, small_network(), Normalise((0, 0, 0), (1, 1, 1), (16, 24)), **options
    )

    def bgr(image):
        return torch.from_numpy(image[..., ::-1].copy()).movedim(2, 0) / 100

    source = assert_same_scores(f"{glue}:with_input", root, small_network(), bgr)
    assert source.name == "with_input" and source.class_names == ("road", "car", "sky")
    with pytest.raises(ValueError, match="must return"):
        open_network(f"{glue}:wrong", f"masks:{root}")
    with pytest.raises(ValueError, match="no function"):
        open_network(f"{glue}:absent", f"masks:{root}")
    (tmp_path / "beside.py").write_text("CLASSES = 3\n")
    with pytest.raises(ValueError, match="'absent' .*TypeError, line 16"):
        open_network(f"{glue}:broken", f"masks:{root}")
    for name, word in (
        ("many", "--classes"),
        ("other_input", "cannot use inputs of shape"),
        ("no_input", "makes no input"),
    ):
        with pytest.raises(ValueError, match=word):
            next(iter(open_network(f"{glue}:{name}", f"masks:{root}", workers=0)))


def test_exported_files(root, tmp_path):
    module, example = small_network(), torch.zeros(1, 3, *SIZE)
    program = torch.export.export(module, (example,))
    torch.export.save(program, tmp_path / "net.pt2")
    assert_same_scores(str(tmp_path / "net.pt2"), root, module, Normalise())


@pytest.mark.slow
def test_onnx(root, tmp_path):
    module, example = small_network(), torch.zeros(1, 3, *SIZE)
    torch.onnx.export(module, (example,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    assert_same_scores(str(tmp_path / "net.onnx"), root, module, Normalise())


@pytest.mark.slow
def test_torchvision_with_weights_of_a_file(root, tmp_path):
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large as make

    torch.manual_seed(0)
    module = make(weights=None, weights_backbone=None, num_classes=CLASSES)
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    spec = f"torchvision:lraspp_mobilenet_v3_large@{tmp_path / 'weights.pth'}"
    assert_same_scores(spec, root, module, Normalise())


@pytest.mark.slow
def test_segmentation_models_pytorch(root, tmp_path):
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    module = smp.Unet("resnet18", encoder_weights=None, classes=CLASSES)
    module.save_pretrained(tmp_path / "unet")
    assert_same_scores(f"smp:{tmp_path / 'unet'}", root, module, Normalise(), pad_to=32)


def classes_root(folder):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        (folder / "test" / name).mkdir(parents=True)
        for i in range(2):
            image = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / "test" / name / f"{i}.png")
    return folder


@pytest.mark.slow
def test_timm_classifies(tmp_path):
    import timm

    torch.manual_seed(0)
    module = timm.create_model("resnet10t", num_classes=CLASSES).eval()
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    folder = classes_root(tmp_path / "data")
    source = open_network(
        f"timm:resnet10t@{tmp_path / 'weights.pth'}", f"folders:{folder}", workers=0
    )
    report = segcal.evaluate_source(source, overlays="none", resamples=0).reports["none"]
    config = timm.data.resolve_model_data_config(module)
    prepare = Normalise(config["mean"], config["std"], config["input_size"][1:])
    pictures = [folder / "test" / name for name in source.names]
    inputs = torch.stack(
        [prepare(np.asarray(Image.open(path.with_suffix(".png")))) for path in pictures]
    )
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    with torch.inference_mode():
        expected = nn.functional.cross_entropy(module(inputs), labels)
    assert report.nll == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.slow
def test_transformers_segformer(root, tmp_path):
    from transformers import (
        SegformerConfig,
        SegformerForSemanticSegmentation,
        SegformerImageProcessor,
    )

    torch.manual_seed(0)
    config = SegformerConfig(
        num_labels=CLASSES, hidden_sizes=[8, 8, 8, 8], decoder_hidden_size=8,
        num_attention_heads=[1, 1, 1, 1], depths=[1, 1, 1, 1],
        id2label={0: "road", 1: "car", 2: "sky"},
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).eval()
    model.save_pretrained(tmp_path / "segformer")
    processor = SegformerImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / "segformer")

    def prepare(image):
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    source = assert_same_scores(f"hf:{tmp_path / 'segformer'}", root, model, prepare)
    assert source.class_names == ("road", "car", "sky")
    # Processors made for classification crop the middle out: labels are of whole images.
    processor.do_center_crop, processor.crop_size = True, {"height": 32, "width": 32}
    processor.save_pretrained(tmp_path / "segformer")
    processor.do_center_crop = False
    assert_same_scores(f"hf:{tmp_path / 'segformer'}", root, model, prepare)


SIDE = {"height": 64, "width": 64}
NAMES = {0: "road", 1: "car", 2: "sky"}


def swin():
    from transformers import SwinConfig

    return SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def mask2former(folder):
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
    )

    config = Mask2FormerConfig(
        backbone_config=swin(), hidden_dim=32, feature_size=32, mask_feature_size=32,
        num_queries=5, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        dim_feedforward=16, encoder_feedforward_dim=16, id2label=NAMES,
    )  # fmt: skip
    processor = Mask2FormerImageProcessor(size=SIDE, ignore_index=255)
    processor.save_pretrained(folder)
    return Mask2FormerForUniversalSegmentation(config), processor, {}


def maskformer(folder):
    from transformers import (
        DetrConfig,
        MaskFormerConfig,
        MaskFormerForInstanceSegmentation,
        MaskFormerImageProcessor,
    )

    decoder = DetrConfig(
        d_model=32, num_queries=5, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    config = MaskFormerConfig(
        backbone_config=swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32,
        id2label=NAMES,
    )  # fmt: skip
    processor = MaskFormerImageProcessor(size=SIDE, ignore_index=255)
    processor.save_pretrained(folder)
    return MaskFormerForInstanceSegmentation(config), processor, {}


def oneformer(folder):
    """Its processor has a tokenizer for the words of the task; here each letter is a word."""
    from transformers import (
        CLIPTokenizer,
        OneFormerConfig,
        OneFormerForUniversalSegmentation,
        OneFormerImageProcessor,
        OneFormerProcessor,
    )

    config = OneFormerConfig(
        backbone_config=swin(), num_queries=5, conv_dim=32, mask_dim=32, hidden_dim=32,
        encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, text_encoder_width=16, text_encoder_num_layers=1,
        text_encoder_vocab_size=64, text_encoder_n_ctx=2, query_dec_layers=1, task_seq_len=16,
        id2label=NAMES,
    )  # fmt: skip
    classes = {str(c): {"isthing": 0, "name": name} for c, name in NAMES.items()}
    (folder / "info.json").write_text(json.dumps(classes))
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = [*letters, *(f"{a}</w>" for a in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({word: i for i, word in enumerate(words)}, [])
    images = OneFormerImageProcessor(
        size=SIDE, class_info_file="info.json", repo_path=str(folder), num_text=3
    )
    processor = OneFormerProcessor(images, tokenizer, max_seq_length=16, task_seq_length=16)
    processor.save_pretrained(folder)
    return OneFormerForUniversalSegmentation(config), processor, {"task_inputs": ["semantic"]}


@pytest.mark.slow
@pytest.mark.parametrize("make", [mask2former, maskformer, oneformer])
def test_a_mask_classifier_gives_scores(root, tmp_path, make):
    """Its scores are divided by their sum; a softmax of them would be nearly uniform."""
    torch.manual_seed(0)
    model, processor, extra = make(tmp_path)
    model.eval().save_pretrained(tmp_path)

    def inputs_of(image):
        return processor(images=image, return_tensors="pt", **extra)

    def prepare(image):
        return inputs_of(image)["pixel_values"][0]

    task = (
        {"task_inputs": inputs_of(np.zeros((*SIZE, 3), np.uint8))["task_inputs"]} if extra else {}
    )

    class Scores(nn.Module):
        """Logits whose softmax are the scores, divided by their sum."""

        def forward(self, images):
            found = model(pixel_values=images, **task)
            classes = found.class_queries_logits.softmax(-1)[..., :-1]
            scores = torch.einsum("nqc,nqhw->nchw", classes, found.masks_queries_logits.sigmoid())
            scores = nn.functional.interpolate(scores, SIZE, mode="bilinear")
            sums.append(float(scores.sum(1).mean()))
            return scores.log()

    sums = []
    source = assert_same_scores(f"hf:{tmp_path}", root, Scores(), prepare)
    assert source[0].kind == "probs" and source.class_names == tuple(NAMES.values())
    (note,) = segcal.evaluate_source(source, overlays="none", resamples=0).notes
    assert "divided by their sum" in note
    assert [*source.score_sums.values()] == pytest.approx(sums, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("longest", "how"), [(None, "do_split_image"), (32, "do_pad")])
def test_eomt_sees_squares(root, tmp_path, longest, how):
    """Its processor splits or pads an image; its own merging is the reference."""
    from transformers import EomtConfig, EomtForUniversalSegmentation, EomtImageProcessor

    torch.manual_seed(0)
    config = EomtConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        num_queries=5, num_blocks=1, num_upscale_blocks=1, mlp_ratio=2, id2label=NAMES,
    )  # fmt: skip
    model = EomtForUniversalSegmentation(config).eval()
    model.save_pretrained(tmp_path)
    size = {"shortest_edge": 32, "longest_edge": longest}
    processor = EomtImageProcessor(size=size, image_mean=[0, 0, 0], **{how: True})
    processor.save_pretrained(tmp_path)
    source = open_network(f"hf:{tmp_path}", f"masks:{root}", workers=0)
    inputs = processor(images=source.image(0), return_tensors="pt")
    with torch.no_grad():
        found = model(inputs["pixel_values"])
    classes = found.class_queries_logits.softmax(-1)[..., :-1]
    scores = torch.einsum("nqc,nqhw->nchw", classes, found.masks_queries_logits.sigmoid())
    scores = nn.functional.interpolate(scores, (32, 32), mode="bilinear")
    if how == "do_pad":
        (whole,) = processor.unpad_image(scores, [SIZE], size)
    else:
        assert len(scores) == 2
        (whole,) = processor.merge_image_patches(scores, inputs["patch_offsets"], [SIZE], size)
    torch.testing.assert_close(source[0].values[0], whole / whole.sum(0), atol=1e-5, rtol=0)


def test_outputs_are_probabilities_where_they_sum_to_one(root, tmp_path, caplog):
    glue = tmp_path / "glue.py"
    glue.write_text(
        "from torch import nn\nfrom tests.sources.test_named import small_network\n"
        "def probs():\n    return nn.Sequential(small_network(), nn.Softmax(1))\n"
        "def scores():\n    return nn.Sequential(small_network(), nn.Sigmoid())\n"
        "def logits():\n    return small_network()\n"
    )
    logits = open_network(f"{glue}:probs", f"masks:{root}", workers=0, outputs="logits")[0]
    probs = open_network(f"{glue}:probs", f"masks:{root}", workers=0)[0]
    assert (logits.kind, probs.kind) == ("logits", "probs")
    assert open_network(f"{glue}:scores", f"masks:{root}", workers=0)[0].kind == "logits"
    assert "--outputs scores" in caplog.text
    scores = open_network(f"{glue}:scores", f"masks:{root}", workers=0, outputs="scores")[0]
    assert torch.allclose(scores.values.sum(1), torch.ones(1, *SIZE))
    with pytest.raises(ValueError, match="at least 0"):
        open_network(f"{glue}:logits", f"masks:{root}", workers=0, outputs="scores")[0]
    with pytest.raises(ValueError, match="above 0"):
        open_network(f"{glue}:scores", f"masks:{root}", std=(0.5, 0.0, 0.5))


def test_classes_are_joined_by_adding_probabilities(root, tmp_path):
    glue = tmp_path / "glue.py"
    glue.write_text(
        "from tests.sources.test_named import small_network\ndef five():\n"
        "    return small_network(5)\n"
    )
    (tmp_path / "merge.yaml").write_text("road: [0, 3]\ncar: 1\nsky: [2, 4]\n")
    joined = open_network(
        f"{glue}:five", f"masks:{root}", workers=0, classes=tmp_path / "merge.yaml"
    )
    with torch.no_grad():
        old = nn.functional.interpolate(
            small_network(5)(joined.samples[0][0][None]), SIZE, mode="bilinear"
        )
    old, new = old.softmax(1), joined[0].probs
    assert torch.allclose(new[:, 0], old[:, 0] + old[:, 3], atol=1e-6)
    assert torch.allclose(new[:, 1], old[:, 1], atol=1e-6)


def test_a_hold_out_by_name_by_share_and_by_group(root, tmp_path, caplog):
    glue = tmp_path / "glue.py"
    glue.write_text(GLUE)
    stated = open_network(f"{glue}:bare", f"masks:{root}", holdout=f"masks:{root}:val", workers=0)
    assert len(stated.names) == 4 and len(stated.holdout().names) == 2
    share = open_network(f"{glue}:bare", f"masks:{root}", holdout_fraction=0.25, workers=0)
    assert len(share.holdout().names) == 1 and len(share.names) == 3
    assert not set(share.names) & set(share.holdout().names)
    with pytest.raises(ValueError, match="empty"):
        cut(stated, 0.01)
    stated.group = "seq."
    held, rest = cut(stated, 0.5)
    assert {name[:4] for name in held.names}.isdisjoint(name[:4] for name in rest.names)
    with pytest.raises(ValueError, match="not both"):
        both = {"holdout": f"masks:{root}:val", "holdout_fraction": 0.25}
        open_network(f"{glue}:bare", f"masks:{root}", **both)
    assert not caplog.text
    open_network(f"{glue}:bare", f"masks:{root}", holdout=f"masks:{root}:test")
    assert "images that are evaluated" in caplog.text
    whole = open_network(f"{glue}:bare", f"masks:{root}", group="seq.", workers=0)
    report = segcal.evaluate_source(whole, overlays="none").reports["none"]
    assert report.images.groups == len({name[:4] for name in whole.names})
    stated.group = "("
    with pytest.raises(ValueError, match="regular expression"):
        cut(stated, 0.5)
    unstated = open_network(f"{glue}:bare", f"masks:{root}", workers=0)
    with pytest.raises(ValueError, match="--holdout"):  # it may have been trained on the data's own
        segcal.evaluate_source(unstated, posthoc=("ts",))


def test_shifts_change_the_image_before_the_network(root, tmp_path):
    glue = tmp_path / "glue.py"
    glue.write_text(GLUE)
    source = open_network(f"{glue}:bare", f"masks:{root}", workers=0)
    result = segcal.evaluate_source(
        source, shifts=("contrast:5", f"data:masks:{root}:val"), overlays="none", resamples=0
    )
    assert result.reports["none", "contrast:5"].nll != result.reports["none"].nll
    assert result.reports["none", result.shifts[1]].protocol.images == 2


def on_rank(rank, spec, root):
    source = open_network(spec, f"masks:{root}", holdout=f"masks:{root}:val", workers=0)
    result = segcal.evaluate_source(
        source, posthoc=("ts",), shifts=("contrast:5",), overlays="none", resamples=0
    )
    return {key: (found.nll, found.protocol.pixels) for key, found in result.reports.items()}


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one(root, tmp_path):
    (tmp_path / "glue.py").write_text(GLUE)
    alone = on_rank(0, f"{tmp_path / 'glue.py'}:with_input", root)
    assert len(alone) == 4  # with and without a temperature, clean and shifted
    for found in run_on_ranks(on_rank, f"{tmp_path / 'glue.py'}:with_input", root):
        assert found.keys() == alone.keys()
        for key, (nll, pixels) in found.items():
            assert pixels == alone[key][1] and nll == pytest.approx(alone[key][0], rel=1e-4)


def test_tiles_are_the_whole_where_the_network_is_local():
    local = nn.Conv2d(3, 2, 1)
    images = torch.randn(2, 3, 70, 45)
    assert torch.allclose(Tiled(local, 32, 8)(images), local(images), atol=1e-5)
    assert torch.allclose(Tiled(local, 100, 0)(images), local(images), atol=1e-6)
    with pytest.raises(ValueError, match="overlap"):
        Tiled(local, 32, 17)


def test_what_names_a_network():
    for spec in ("torchvision:fcn_resnet50", "hf:a/b", "net.onnx", "a/net.pt2", "glue.py:make"):
        assert is_network(spec), spec
    for spec in ("runs/nll", "predictions", "report.json", "glue.py"):
        assert not is_network(spec), spec


def test_what_names_data():
    config, split = parse_data("camvid:a/b:val")
    assert (config.name, config.root, split) == ("camvid", "a/b", "holdout")
    assert parse_data("cityscapes:c:val")[1] == "test"
    assert parse_data("masks:C:/data")[0].root == "C:/data"
    for text in ("nothing:a", "camvid", "camvid:"):
        with pytest.raises(ValueError, match="NAME:ROOT"):
            parse_data(text)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("absent.onnx", "no file"),
        ("absent.py:f", "no file"),
        ("magic:net", "names no network"),
        ("torchvision:no_such_network", "no_such_network"),
        ("text.pt2", "no file of torch.export"),
        ("text.onnx", "cannot be opened"),
        ("torchvision:fcn_resnet50@NONE", "choose from COCO"),
    ],
)
def test_a_bad_name_is_one_line(root, tmp_path, monkeypatch, spec, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt2").write_text("no program")
    (tmp_path / "text.onnx").write_text("no program")
    with pytest.raises(ValueError, match=word) as caught:
        open_network(spec, f"masks:{root}")
    assert "\n" not in str(caught.value)


def test_without_a_network_there_is_one_line(root, monkeypatch, caplog):
    def retry(name, given):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("cannot connect")

    monkeypatch.setitem(READERS, "hf", retry)
    with pytest.raises(ValueError, match="by their path"):
        open_network("hf:org/absent", f"masks:{root}")
    assert not caplog.text


def test_another_number_of_classes_points_to_the_options(root, tmp_path):
    (tmp_path / "glue.py").write_text(GLUE)
    (tmp_path / "merge.yaml").write_text("road: 0\nother: [1, 2]\n")
    spec = f"{tmp_path / 'glue.py'}:bare"
    with pytest.raises(ValueError, match="--label-map"):
        open_network(spec, f"masks:{root}", classes=tmp_path / "merge.yaml")
    (tmp_path / "map.yaml").write_text("road: road\ncar: other\nsky: other\n")
    source = open_network(
        spec,
        f"masks:{root}",
        classes=tmp_path / "merge.yaml",
        label_map=tmp_path / "map.yaml",
        workers=0,
    )
    report = segcal.evaluate_source(source, overlays="none", resamples=0).reports["none"]
    assert report.class_names == ("road", "other") and report.protocol.pixels > 0
