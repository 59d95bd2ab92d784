"""CLIP scores against what open_clip and transformers themselves say of random models."""

import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import interpolate
from torch.testing import assert_close

from flowrl.types import Prompt
from flowrl_rewards.clip import CLIPScore, OpenCLIP

SIZES = pytest.mark.parametrize("size", [(32, 32), (48, 60), (70, 41)], ids=["square", "wide", "high"])


@pytest.fixture(scope="module")
def folder(open_network, open_clip_config, tmp_path_factory):
    """The network in open_clip's own format, with another mean and way to resize than usual."""
    folder = tmp_path_factory.mktemp("open_clip")
    preprocess = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "resize_mode": "squash"}
    config = {"model_cfg": open_clip_config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(open_network.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@torch.no_grad()
def raw_cosines(network, prepare, media, prompts):
    """Straight from open_clip, one sample at a time."""
    import open_clip

    tokenize = open_clip.get_tokenizer("ViT-B-32")
    cosines = []
    for picture, prompt in zip(media.pil(), prompts, strict=True):
        seen = network.encode_image(prepare(picture)[None])[0]
        read = network.encode_text(tokenize([prompt.text], context_length=12))[0]
        cosines.append(seen @ read / (seen.norm() * read.norm()))
    return torch.stack(cosines)


@SIZES
def test_a_folder_of_open_clip_gives_its_cosine(folder, open_network, sized, size):
    import open_clip

    media, prompts = sized(*size)
    cfg = {"image_size": 32, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "resize_mode": "squash"}
    prepare = open_clip.image_transform(**cfg, is_train=False)
    wanted = raw_cosines(open_network, prepare, media, prompts)
    with torch.inference_mode():
        got, doubled = OpenCLIP(path=str(folder))(media, prompts), OpenCLIP(path=str(folder), scale=2.0)(media, prompts)
    assert wanted.std() > 0.05
    assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert_close(doubled, 2 * wanted, atol=1e-5, rtol=1e-5)


def test_a_weight_file_is_read_into_its_architecture(open_network, open_clip_name, sized, tmp_path):
    import open_clip

    torch.save({"state_dict": open_network.state_dict()}, tmp_path / "weights.pt")
    media, prompts = sized(48, 60)
    with torch.inference_mode():
        got = OpenCLIP(path=str(tmp_path / "weights.pt"), model=open_clip_name)(media, prompts)
    assert_close(got, raw_cosines(open_network, open_clip.image_transform(32, is_train=False), media, prompts))


def test_open_clip_scores_follow_their_samples(folder, sized, steady):
    steady(OpenCLIP(path=str(folder)), *sized(40, 40))


def test_a_folder_without_weights_is_not_filled_with_random_ones(folder, sized, tmp_path):
    (tmp_path / "open_clip_config.json").write_text((folder / "open_clip_config.json").read_text())
    with pytest.raises(RuntimeError, match="could not be loaded"):
        OpenCLIP(path=str(tmp_path))(*sized(32, 32))


@torch.no_grad()
def raw_logits(folder, pixels, prompts):
    """Straight from transformers, texts padded to the longest and masked."""
    from transformers import AutoTokenizer, CLIPModel

    texts = AutoTokenizer.from_pretrained(folder)(
        [prompt.text for prompt in prompts], padding=True, truncation=True, max_length=12, return_tensors="pt"
    )
    return CLIPModel.from_pretrained(folder)(pixel_values=pixels, **texts).logits_per_image.diagonal()


@SIZES
def test_clip_score_is_the_logit_of_bilinearly_resized_float_pictures(hub_clip, sized, size):
    media, prompts = sized(*size)
    short = min(size)
    height, width = (int(32 * side / short) for side in size)
    pixels = interpolate(media.images / 255, (height, width), mode="bilinear", antialias=True)
    top, left = round((height - 32) / 2), round((width - 32) / 2)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    wanted = raw_logits(hub_clip, (pixels[..., top : top + 32, left : left + 32] - mean) / std, prompts)
    with torch.inference_mode():
        got = CLIPScore(model=str(hub_clip))(media, prompts)
        thirtieth = CLIPScore(model=str(hub_clip), scale=1 / 30)(media, prompts)
    assert wanted.std() > 0.5
    assert_close(got, wanted, atol=1e-4, rtol=1e-5)
    assert_close(thirtieth, wanted / 30, atol=1e-5, rtol=1e-5)


def test_clip_scores_follow_their_samples(hub_clip, sized, steady):
    steady(CLIPScore(model=str(hub_clip)), *sized(40, 44), atol=1e-4)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_texts_that_are_cut_are_told_once_with_their_number(folder, hub_clip, sized, caplog, library):
    scorer = OpenCLIP(path=str(folder)) if library == "open_clip" else CLIPScore(model=str(hub_clip))
    fits = "a b c d e f g h i j"  # ten tokens and the two ends
    prompts = [Prompt(0, fits), Prompt(1, fits + " k"), Prompt(2, fits + " k l m"), Prompt(3, ""), Prompt(4, "x")]
    media, _ = sized(32, 32)
    with torch.inference_mode():
        scorer(media, [prompts[0]] * 5)
        assert "tokens" not in caplog.text
        scores = scorer(media, prompts)
        scorer(media, prompts)
    assert [record.getMessage() for record in caplog.records if "tokens" in record.getMessage()] == [
        "2 of 5 texts have more than 12 tokens; their ends are not read"
    ]
    assert scores.isfinite().all()


def test_weights_that_lack_a_part_are_refused(hub_clip, sized, tmp_path):
    from safetensors.torch import load_file

    copytree(hub_clip, tmp_path, dirs_exist_ok=True)
    state = load_file(hub_clip / "model.safetensors")
    del state["text_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no complete CLIPModel \(it lacks text_projection.weight\)"):
        CLIPScore(model=str(tmp_path))(*sized(32, 32))


@pytest.mark.parametrize("scorer", [OpenCLIP, CLIPScore], ids=["open_clip", "clip_score"])
@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_positive(scorer, scale):
    with pytest.raises(ValueError, match=r"scale is .*; give a positive factor"):
        scorer(scale=scale)


def test_a_weight_file_and_an_architecture_go_together(tmp_path):
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ValueError, match=r"weights.pt is a weight file; add model"):
        OpenCLIP(path=str(tmp_path / "weights.pt"))
    with pytest.raises(
        ValueError, match=r"model = 'ViT-B-32' is of a weight file, and path = .* is none; correct path"
    ):
        OpenCLIP(path=str(tmp_path), model="ViT-B-32")


def test_what_is_not_on_this_machine_is_told(folder, hub_clip, monkeypatch):
    assert not OpenCLIP(path=str(folder)).missing() and not CLIPScore(model=str(hub_clip)).missing()
    (sentence,) = OpenCLIP(path="nobody/no-such-clip").missing()
    assert sentence.startswith("path = nobody/no-such-clip is not on this machine")
    (sentence,) = CLIPScore(model=str(folder)).missing()
    assert sentence.startswith(f"model = {folder} is not on this machine")
    monkeypatch.setattr("flowrl_rewards._weights.find_spec", lambda name: None)
    assert "open_clip is not installed" in OpenCLIP(path=str(folder)).missing()[0]
