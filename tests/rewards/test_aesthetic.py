"""The aesthetic score against plain matrix products on a raw CLIP embedding, in the published layout."""

import pytest
import torch
from torch.testing import assert_close

from flowrl_rewards.aesthetic import Aesthetic, read
from tests.either import PilProcessor

WIDTHS = {"0": (1024, None), "2": (128, 1024), "4": (64, 128), "6": (16, 64), "7": (1, 16)}


def published(width):
    """The entries of sac+logos+ava1-l14-linearMSE.pth for embeddings of a width, random."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for place, (out, into) in WIDTHS.items():
        into = into or width
        state[f"layers.{place}.weight"] = torch.randn(out, into, generator=generator) / into**0.5
        state[f"layers.{place}.bias"] = torch.randn(out, generator=generator)
    return state


@pytest.fixture
def weights(tmp_path):
    torch.save(published(8), tmp_path / "aesthetic-model.pth")
    return tmp_path / "aesthetic-model.pth"


def by_hand(state, embeds):
    x = embeds / embeds.norm(dim=1, keepdim=True)
    for place in WIDTHS:
        x = x @ state[f"layers.{place}.weight"].T + state[f"layers.{place}.bias"]
    return x[:, 0]


def test_the_score_is_affine_in_the_unit_embedding(hub_clip, weights, sized):
    from transformers import CLIPModel

    media, prompts = sized(48, 61)
    pixels = PilProcessor.from_pretrained(hub_clip)(images=media.pil(), return_tensors="pt").pixel_values
    with torch.inference_mode():
        network = CLIPModel.from_pretrained(hub_clip)
        embeds = network.visual_projection(network.vision_model(pixel_values=pixels).pooler_output)
        got = Aesthetic(weights=str(weights), model=str(hub_clip))(media, prompts)
    wanted = by_hand(published(8), embeds)
    assert wanted.std() > 0.01
    assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_published_sizes_are_read():
    embeds = torch.randn(3, 768)
    unit = embeds / embeds.norm(dim=1, keepdim=True)
    with torch.inference_mode():
        assert_close(read(published(768), 768, "the file")(unit), by_hand(published(768), embeds))


def test_the_prompt_is_not_read_and_scores_follow_their_pictures(hub_clip, weights, sized, steady):
    scorer = Aesthetic(weights=str(weights.parent), model=str(hub_clip))
    media, prompts = sized(40, 44)
    steady(scorer, media, prompts)
    with torch.inference_mode():
        assert torch.equal(scorer(media, prompts), scorer(media, prompts[::-1]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("layers.6.bias"), "missing keys: layers.6.bias"),
        (lambda state: state.update({"layers.8.bias": torch.zeros(1)}), "unexpected keys: layers.8.bias"),
        (lambda state: state.update(published(16)), r"wrong shapes: layers.0.weight \[1024, 16\] for \[1024, 8\]"),
    ],
    ids=["missing", "unexpected", "another CLIP"],
)
def test_another_layout_is_refused_by_its_keys(hub_clip, weights, sized, change, told):
    state = torch.load(weights)
    change(state)
    torch.save(state, weights)
    with pytest.raises(ValueError, match=f"is not the file that this scorer reads .*{told}"):
        Aesthetic(weights=str(weights), model=str(hub_clip))(*sized(32, 32))


def test_what_is_not_on_this_machine_is_told_by_its_option(hub_clip, weights):
    assert not Aesthetic(weights=str(weights), model=str(hub_clip)).missing()
    sentences = Aesthetic(weights="/no/such/file.pth", model="nobody/no-such-model").missing()
    assert [sentence.split(" is ")[0] for sentence in sentences] == [
        "weights = /no/such/file.pth",
        "model = nobody/no-such-model",
    ]
