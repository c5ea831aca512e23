"""Members and views of one network: what a mean of predictions must be, whatever they are."""

import numpy as np
import pytest
import torch
from torch import nn

import segcal
from segcal.data.options import DataConfig
from segcal.data.samples import Samples
from segcal.data.splits import build
from segcal.evaluation.holdout import calibrate_members
from segcal.posthoc import TemperatureScaling
from segcal.sources.members import Members, pooled
from segcal.sources.network import LoaderSource, NetworkSource
from segcal.sources.source import Batch
from segcal.sources.views import parse_tta, views
from tests.support.saved import save_folder

SHAPE = (2, 4, 5, 6)  # of (N, C, *S) predictions


def member(seed, kind="logits"):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPE, generator=generator, dtype=torch.float64) * 3
    if kind == "sigmoid_logits":
        labels = torch.zeros(SHAPE, dtype=torch.int64)
    else:
        labels = torch.arange(60).view(2, 5, 6) % 4
    if kind == "probs":
        values = values.softmax(1)
    return Batch(["a", "b"], kind, values, labels)


def test_the_mean_of_probabilities_is_a_distribution():
    batches = [member(seed) for seed in range(3)]
    found = pooled(batches)
    expected = torch.stack([batch.values.softmax(1) for batch in batches]).mean(0)
    assert found.kind == "probs" and found.names == ["a", "b"]
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.values.sum(1), torch.ones(2, 5, 6).double())
    entropy = -(expected * expected.log()).sum(1)
    each = torch.stack([-(p * p.log()).sum(1) for p in (b.probs for b in batches)])
    information = found.spread["mutual_information"]
    torch.testing.assert_close(information.double(), entropy - each.mean(0), rtol=0, atol=1e-6)
    assert (information >= 0).all()
    chosen = expected.argmax(1, keepdim=True)
    of_chosen = torch.stack([b.probs.gather(1, chosen)[:, 0] for b in batches])
    variance = of_chosen.var(0, unbiased=False)
    torch.testing.assert_close(found.spread["variance"].double(), variance, rtol=0, atol=1e-7)


def test_the_mean_of_logits():
    batches = [member(seed) for seed in range(3)]
    found = pooled(batches, "logits")
    expected = torch.stack([batch.values for batch in batches]).mean(0).softmax(1)
    assert found.kind == "logits"
    torch.testing.assert_close(found.probs, expected, rtol=0, atol=1e-12)


def test_one_member_is_itself():
    batch = member(0)
    assert pooled([batch]) is batch


@pytest.mark.parametrize("kind", ["logits", "probs", "sigmoid_logits"])
@pytest.mark.parametrize("pool", ["probs", "logits"])
def test_the_order_of_members_does_not_matter(kind, pool):
    batches = [member(seed, kind) for seed in range(4)]
    one, other = pooled(batches, pool), pooled(batches[::-1], pool)
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-9)
    assert one.probs.min() >= 0


@pytest.mark.parametrize("kind", ["logits", "sigmoid_logits"])
def test_equal_members_do_not_differ(kind):
    found = pooled([member(0, kind)] * 3)
    torch.testing.assert_close(found.probs, member(0, kind).probs, rtol=0, atol=1e-12)
    for name in ("mutual_information", "variance"):
        assert found.spread[name].shape == found.labels.shape
        assert found.spread[name].abs().max() < 1e-9


def test_members_that_do_not_fit():
    first, other = member(0), member(1)
    for changes, word in (
        ({"labels": first.labels.flip(0)}, "labels"),
        ({"names": ["a", "c"]}, "images"),
        ({"values": first.values[:, :3]}, "shapes"),
    ):
        with pytest.raises(ValueError, match=word):
            pooled([first, Batch(**{**vars(other), **changes})])


@pytest.fixture(scope="module")
def folds(tmp_path_factory):
    """Three folders of predictions of the same six images."""
    root = tmp_path_factory.mktemp("folds")
    return [save_folder(root / str(t), temperature=t) for t in (0.5, 1.0, 3.0)]


def test_folders_are_aligned_by_name(folds):
    sources = [segcal.open_source(folder) for folder in folds]
    report = segcal.evaluate_source(Members(sources), overlays="none").reports["none"]
    meter = segcal.CalibrationMeter(3)
    for each in zip(*sources, strict=True):
        probs = torch.stack([batch.probs for batch in each])
        meter.update_samples(probs, each[0].labels)
    expected = meter.compute()
    for score in ("accuracy", "ece", "sce", "nll", "brier"):
        assert getattr(report, score) == pytest.approx(getattr(expected, score), abs=1e-6), score
    # The files of one member in another order, and a part of the images.
    turned = Members([sources[0], sources[1].only(range(5, -1, -1)), sources[2]])
    again = segcal.evaluate_source(turned, overlays="none").reports["none"]
    assert again.ece == pytest.approx(report.ece, abs=1e-9)
    assert turned.only([4, 2]).names == [turned.names[i] for i in (4, 2)]
    assert [b.names for b in turned.limited(2)] == [["im000"], ["im005"]]
    assert turned.shard(1, 3).names == ["im001", "im004"]
    assert turned.fingerprint() not in ("", turned.only([0]).fingerprint())


def test_one_folder_is_itself(folds):
    source = segcal.open_source(folds[0])
    for batch, same in zip(source, Members([source]), strict=True):
        assert same.kind == batch.kind and torch.equal(same.values, batch.values)


def test_folders_that_do_not_fit(folds, tmp_path):
    sources = [segcal.open_source(folder) for folder in folds]
    with pytest.raises(ValueError, match="different images"):
        Members([sources[0], sources[1].only([0, 1])])
    with pytest.raises(ValueError, match="different images"):
        Members([sources[0].only([0, 1]), sources[1]])
    with pytest.raises(ValueError, match="at least one"):
        Members([])
    with pytest.raises(ValueError, match="num_classes"):
        two = tmp_path / "two"
        two.mkdir()
        np.savez(two / "im000.npz", logits=np.zeros((2, 8, 8), "f"), labels=np.zeros((8, 8), "u1"))
        Members([sources[0], segcal.open_source(two)])
    with pytest.raises(ValueError, match="network"):
        Members(sources).shifted(None)
    assert Members(sources).holdout() is None


def test_samples_in_files(tmp_path, folds):
    """The key `samples` holds the probabilities of members."""
    sources = [segcal.open_source(folder) for folder in folds]
    for each in zip(*sources, strict=True):
        samples = torch.cat([batch.probs for batch in each]).numpy()
        labels = each[0].labels[0].numpy().astype(np.uint8)
        np.savez(tmp_path / f"{each[0].names[0]}.npz", samples=samples, labels=labels)
    source = segcal.open_source(tmp_path)
    assert source.num_classes == 3
    for found, expected in zip(source, Members(sources), strict=True):
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-7)
        for name, spread in expected.spread.items():
            torch.testing.assert_close(found.spread[name], spread, rtol=0, atol=1e-6)


def small_network(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Dropout2d(dropout), nn.Conv2d(8, 3, 3, 1, 1)]
    return nn.Sequential(*layers).eval()


def scenes(model, key="", **options):
    config = DataConfig(name="scenes", root="", limit=12)
    splits = build(config)
    return NetworkSource(model, splits, config=config, workers=0, key=key, **options)


def scene_network(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    classes = build(DataConfig(name="scenes", root="", limit=12)).num_classes
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Dropout2d(dropout), nn.Conv2d(8, classes, 1)
    )


def test_networks_work_batch_by_batch():
    each = [scenes(scene_network(seed), str(seed), batch_size=4) for seed in range(2)]
    members = Members(each)
    sizes = [len(batch.values) for batch in members]
    assert max(sizes) == 4 or not each[0].splits.uniform
    for index, name in ((0, members.names[0]), (3, members.names[3])):
        one = members[index]
        assert one.names == [name]
        mean = torch.stack([source[index].probs for source in each]).mean(0)
        torch.testing.assert_close(one.values, mean, rtol=0, atol=1e-6)
    assert members.holdout().names == each[0].holdout().names
    from segcal.data.shift import parse_shifts

    (shift,) = parse_shifts("fog:3")
    assert members.limited(2).shifted(shift).names == members.limited(2).names
    assert members.shifted(shift).fingerprint() != members.fingerprint()


def test_images_are_read_once_for_all_networks(monkeypatch):
    each = [scenes(scene_network(seed), str(seed), batch_size=4) for seed in range(3)]
    read, plain = [], Samples.__getitem__
    monkeypatch.setattr(Samples, "__getitem__", lambda *a: read.append(a[1]) or plain(*a))
    members = [*Members(each)]
    assert sorted(read) == list(range(len(each[0].names)))
    alone = [torch.stack([b.probs for b in batches]).mean(0) for batches in zip(*each, strict=True)]
    for batch, mean in zip(members, alone, strict=True):
        torch.testing.assert_close(batch.values, mean, rtol=0, atol=1e-6)


def test_members_are_calibrated_before_the_mean():
    each = [scenes(scene_network(seed), str(seed)) for seed in range(2)]
    torch.manual_seed(0)
    logits = torch.randn(500, each[0].num_classes) * 3
    labels = torch.distributions.Categorical(logits=logits / 3).sample()
    hot = TemperatureScaling().fit(logits, labels)
    assert hot.temperature_ > 1.5
    members = Members(each, calibrators=[hot, None])
    expected = (hot.predict_proba(each[0][0].logits) + each[1][0].probs) / 2
    torch.testing.assert_close(members[0].values, expected, rtol=0, atol=1e-6)
    assert members.fingerprint() != Members(each).fingerprint()


def test_views_are_calibrated_before_the_mean():
    source = scenes(scene_network()).with_views("flip")
    found = calibrate_members(source, "ts")
    expected = []
    for view in source.members:
        calibrator = TemperatureScaling().fit([(b.logits, b.labels) for b in view.holdout()])
        expected.append(calibrator.predict_proba(view[0].logits))
    torch.testing.assert_close(found[0].probs, torch.stack(expected).mean(0), rtol=0, atol=1e-6)
    assert float((found[0].probs - source[0].probs).abs().max()) > 1e-3
    assert len(found.calibrators) == 2 and found.pools
    with pytest.raises(ValueError, match="has no members"):
        calibrate_members(scenes(scene_network()), "ts")


def test_flipping_back_is_exact():
    images = torch.randn(2, 3, 4, 6)
    as_they_are, mirrored = views(nn.Identity(), "flip")
    assert torch.equal(as_they_are(images), mirrored(images))


@pytest.mark.parametrize("tta", ["flip", "scale:0.5,2", "flip,scale:0.75,1.25"])
def test_an_equivariant_network_is_as_without_augmentation(tta):
    """Of constant images every view of a network by pixel is the same."""
    torch.manual_seed(0)
    network = nn.Conv2d(3, 4, 1).eval()
    image = torch.randn(1, 3, 1, 1).expand(1, 3, 16, 24).contiguous()
    labels = torch.zeros(1, 16, 24, dtype=torch.int64)
    source = LoaderSource(network, [(image, labels)], num_classes=4).with_views(tta)
    (found,) = source
    torch.testing.assert_close(found.probs, network(image).softmax(1), rtol=0, atol=1e-6)
    assert found.spread["mutual_information"].max() < 1e-6
    if tta == "flip":
        noise = torch.randn(1, 3, 16, 24)
        (found,) = LoaderSource(network, [(noise, labels)], num_classes=4).with_views(tta)
        torch.testing.assert_close(found.probs, network(noise).softmax(1), rtol=0, atol=1e-6)


def test_views_are_the_mean_of_their_networks():
    network = small_network()
    image, labels = torch.randn(2, 3, 32, 32), torch.zeros(2, 32, 32, dtype=torch.int64)
    (found,) = LoaderSource(network, [(image, labels)], num_classes=3).with_views("flip")

    def probs(z):
        z = nn.functional.interpolate(z, (32, 32), mode="bilinear", align_corners=False)
        return z.softmax(1)

    expected = (probs(network(image)) + probs(network(image.flip(-1)).flip(-1))) / 2
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-6)


class Attention(nn.Module):
    """Attention over the pixels; (N, C, h, w) stays."""

    def __init__(self, make, **options):
        super().__init__()
        self.attend = make(4, 2, dropout=0.5, batch_first=True, **options)

    def forward(self, features):
        tokens = features.flatten(2).mT
        alone = isinstance(self.attend, nn.TransformerEncoderLayer)
        found = self.attend(tokens) if alone else self.attend(*[tokens] * 3, need_weights=False)[0]
        return found.mT.reshape(features.shape)


class Function(nn.Module):
    def forward(self, features):
        return nn.functional.dropout(features, 0.5, self.training)


DROPOUTS = {
    "layer": lambda: nn.Dropout2d(0.5),
    "function": Function,
    "attention": lambda: Attention(nn.MultiheadAttention),
    "encoder": lambda: Attention(nn.TransformerEncoderLayer, dim_feedforward=8),
}


@pytest.mark.parametrize("make", DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_depends_on_the_image_alone(make):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), make(), nn.Conv2d(4, 3, 1)).eval()
    images, labels = torch.randn(4, 3, 16, 16), torch.zeros(4, 16, 16, dtype=torch.int64)
    state = torch.get_rng_state()

    def run(*batches):
        loader = [(images[b], labels[b]) for b in batches]
        source = LoaderSource(network, loader, num_classes=3).with_views(mc_dropout=3)
        return torch.cat([batch.values for batch in source])

    whole, parts = run(slice(0, 4)), run(slice(0, 1), slice(1, 4))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in network.modules())
    samples = [view(images) for view in views(network, dropout=3)]
    assert not torch.equal(samples[0], samples[1])
    assert torch.equal(samples[0], views(network, dropout=1)[0](images))


def test_views_that_make_no_sense():
    for network in (small_network(), nn.Sequential(small_network(), nn.Dropout(0.0)).eval()):
        with pytest.raises(ValueError, match="dropout"):
            views(network, dropout=2)[0](torch.zeros(1, 3, 16, 16))
    for text in ("turn", "scale:0", "flip scale:2", "scale:", "scale:1..2"):
        with pytest.raises(ValueError, match="augmentation"):
            parse_tta(text)
    assert parse_tta("flip,scale:0.75,1,1.25") == (True, (1.0, 0.75, 1.25))
    assert len(views(small_network(dropout=0.1), "flip,scale:2", 3)) == 12
