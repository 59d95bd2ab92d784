"""Similarity to the source: cosines and distances from raw backbone outputs, one place at a time."""

import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn
from torch.testing import assert_close
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards.similarity import Similarity, distance, learned

CHANNELS = [32, 32, 48, 192, 96]  # of the small backbone


def noise(n, height=40, width=40):
    return Media(torch.randint(256, (n, 3, height, width), dtype=torch.uint8))


def asked(sources):
    return [Prompt(row, "keep it", {"source": source}) for row, source in enumerate(sources)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A local folder with a small backbone for each method."""
    torch.manual_seed(0)
    where = {method: tmp_path_factory.mktemp(method) for method in ("dino", "perceptual")}
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
                          initializer_range=0.5)  # fmt: skip
    Dinov2Model(config).save_pretrained(where["dino"])
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}}
    BitImageProcessor(**size).save_pretrained(where["dino"])
    save_for_hf(timm.create_model("test_resnet"), where["perceptual"])
    return {method: str(folder) for method, folder in where.items()}


@pytest.fixture
def build(folders):
    return lambda method, **options: Similarity(method=method, model=folders[method], **options)


both = pytest.mark.parametrize("method", ["dino", "perceptual"])


@torch.no_grad()
def test_dino_is_the_cosine_of_the_class_tokens(build, folders):
    media, sources = noise(3), noise(3, 50, 30).pil()
    network, prepare = Dinov2Model.from_pretrained(folders["dino"]), BitImageProcessor.from_pretrained(folders["dino"])

    def token(picture):
        return network(**prepare(images=[picture], return_tensors="pt")).last_hidden_state[0, 0].double()

    pairs = [(token(a), token(b)) for a, b in zip(media.pil(), sources, strict=True)]
    wanted = torch.stack([a @ b / (a.norm() * b.norm()) for a, b in pairs]).float()
    assert wanted.std() > 1e-3
    assert_close(build("dino")(media, asked(sources)), wanted, rtol=0, atol=1e-5)


def by_place(folder, picture, source, weights):
    """1 - the distance of two pictures, one place of one layer at a time."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True).eval()
    maps = [
        [features[0].double().numpy() for features in network(torch.from_numpy((np.array(image) / 255 - 0.5) / 0.5)
         .float().permute(2, 0, 1)[None])]
        for image in (picture, source)
    ]  # fmt: skip
    total = 0.0
    for a, b, w in zip(*maps, weights, strict=True):
        _, height, width = a.shape
        for y in range(height):
            for x in range(width):
                u, v = a[:, y, x] / np.linalg.norm(a[:, y, x]), b[:, y, x] / np.linalg.norm(b[:, y, x])
                total += float(w @ (u - v) ** 2) / (height * width)
    return 1 - total


@pytest.fixture
def linear(tmp_path):
    """A file of learned weights as it is published, and the weights."""
    weights = [torch.rand(width) / width for width in CHANNELS]
    path = tmp_path / "lin.pth"
    torch.save({f"lin{i}.model.1.weight": w.view(1, -1, 1, 1) for i, w in enumerate(weights)}, path)
    return str(path), [w.double().numpy() for w in weights]


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True], ids=["even", "learned"])
def test_perceptual_is_the_weighted_distance_over_all_places(build, folders, linear, given):
    media, sources = noise(2, 32, 48), noise(2, 32, 48).pil()
    path, weights = linear
    weights = weights if given else [np.full(width, 0.1) for width in CHANNELS]
    wanted = [by_place(folders["perceptual"], *pair, weights) for pair in zip(media.pil(), sources, strict=True)]
    found = build("perceptual", linear=path if given else "")(media, asked(sources))
    assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_the_distance_of_features_by_hand():
    a = torch.tensor([[[[3.0, 0.0, 0.0]], [[4.0, 0.0, 2.0]]]])  # [1, 2, 1, 3]: (3, 4), (0, 0), (0, 2)
    b = torch.tensor([[[[6.0, 0.0, 5.0]], [[8.0, 0.0, 0.0]]]])  # the same direction, none either, orthogonal
    weight = torch.tensor([0.25, 1.0]).view(1, 2, 1, 1)
    assert_close(distance([a], [b], [weight]), torch.tensor([1.25 / 3]))
    assert_close(distance([a, b], [b, b], [weight, weight]), torch.tensor([1.25 / 3]))


@torch.no_grad()
def test_perceptual_brings_a_source_to_the_size_of_the_picture(build):
    media, (source,) = noise(1, 32, 48), noise(1, 64, 64).pil()
    scorer = build("perceptual")
    fitted = source.resize((48, 32), Image.Resampling.BICUBIC)
    assert torch.equal(scorer(media, asked([source])), scorer(media, asked([fitted])))


@torch.no_grad()
@both
def test_a_source_in_another_mode_is_its_rgb_version(build, method):
    media, (source,) = noise(1), noise(1).pil()
    scorer = build(method)
    grey = source.convert("L")
    assert torch.equal(scorer(media, asked([grey])), scorer(media, asked([grey.convert("RGB")])))


@torch.no_grad()
@both
def test_the_gold_case_is_in_its_bounds(build, method):
    scorer = build(method)
    gold = scorer.gold()
    scores = scorer(gold.media, gold.prompts)[:, None]
    assert ((gold.lower <= scores) & (scores <= gold.upper)).all()


@both
def test_a_batch_may_be_split_and_permuted(build, steady, method):
    sources = [*noise(2, 40, 40).pil(), *noise(1, 50, 30).pil()]
    steady(build(method), noise(3), asked(sources))


def test_the_default_backbone_gives_the_layers_of_lpips():
    with torch.device("meta"):
        network = timm.create_model("vgg16.tv_in1k", features_only=True, out_indices=range(5))
    convolutions = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)]
    taps = list(network.return_layers)
    assert network.feature_info.channels() == [64, 128, 256, 512, 512]
    assert all(isinstance(network[tap], nn.ReLU) for tap in taps)
    before = [sum(int(name.split("_")[1]) < int(tap.split("_")[1]) for name in convolutions) for tap in taps]
    assert before == [2, 4, 7, 10, 13]  # relu1_2, relu2_2, relu3_3, relu4_3, relu5_3


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.pop("lin3.model.1.weight"), r"missing keys: lin3\.model\.1\.weight"),
        (lambda s: s.update({"lin5.model.1.weight": torch.zeros(1)}), r"unexpected keys: lin5\.model\.1\.weight"),
        (lambda s: s.update({"lin0.model.1.weight": torch.zeros(1, 64, 1, 1)}),
         r"wrong shapes: lin0\.model\.1\.weight \[1, 64, 1, 1\] for \[1, 32, 1, 1\]"),
    ],
    ids=["missing", "unexpected", "shape"],
)  # fmt: skip
def test_learned_weights_of_another_backbone_are_refused(linear, spoil, told):
    path, _ = linear
    state = torch.load(path)
    spoil(state)
    torch.save(state, path)
    with pytest.raises(ValueError, match=told):
        learned(path, CHANNELS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "ssim"}, "method is 'ssim'; give one of dino, perceptual"),
        ({"linear": "vgg.pth"}, "linear = vgg.pth is of perceptual"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Similarity(**options)


def test_a_backbone_that_lacks_weights_is_refused(folders, tmp_path):
    shutil.copytree(folders["dino"], tmp_path / "dino")
    state = load_file(tmp_path / "dino" / "model.safetensors")
    del state["layernorm.bias"]
    save_file(state, tmp_path / "dino" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model = .+dino is no complete AutoModel \(it lacks layernorm.bias\)"):
        Similarity(model=str(tmp_path / "dino"))(noise(1), asked(noise(1).pil()))


@both
def test_what_is_missing_is_named(build, method):
    assert not build(method).missing()
    (told,) = Similarity(method=method, model="no/such").missing()
    assert "model = no/such is not on this machine" in told


def test_absent_learned_weights_are_named(build):
    (told,) = build("perceptual", linear="/nowhere/vgg.pth").missing()
    assert "linear = /nowhere/vgg.pth" in told
