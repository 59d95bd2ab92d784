"""PickScore against a raw CLIPModel behind the PIL processor of CLIP."""

import pytest
import torch
from torch.testing import assert_close

from flowrl_rewards.pickscore import PickScore
from tests.either import PilProcessor


@pytest.mark.parametrize("size", [(32, 32), (48, 61), (71, 40)], ids=["square", "wide", "high"])
def test_pickscore_is_the_logit_of_pictures_prepared_by_pil(hub_clip, sized, size):
    from transformers import AutoTokenizer, CLIPModel

    media, prompts = sized(*size)
    pixels = PilProcessor.from_pretrained(hub_clip)(images=media.pil(), return_tensors="pt").pixel_values
    network, tokenizer = CLIPModel.from_pretrained(hub_clip), AutoTokenizer.from_pretrained(hub_clip)
    with torch.inference_mode():
        texts = tokenizer([prompt.text for prompt in prompts], padding=True, return_tensors="pt")
        seen = network.visual_projection(network.vision_model(pixel_values=pixels).pooler_output)
        read = network.text_projection(network.text_model(**texts).pooler_output)
        wanted = torch.stack([x @ y / (x.norm() * y.norm()) for x, y in zip(seen, read, strict=True)])
        wanted = wanted * network.logit_scale.exp()
        got = PickScore(model=str(hub_clip), processor=str(hub_clip))(media, prompts)
        part = PickScore(model=str(hub_clip), processor=str(hub_clip), scale=1 / 26)(media, prompts)
    assert wanted.std() > 1
    assert_close(got, wanted, atol=1e-4, rtol=1e-5)
    assert_close(part, wanted / 26, atol=1e-5, rtol=1e-5)


def test_scores_follow_their_samples(hub_clip, sized, steady):
    steady(PickScore(model=str(hub_clip), processor=str(hub_clip)), *sized(40, 44), atol=1e-4)


def test_what_is_not_on_this_machine_is_told_by_its_option(hub_clip):
    assert not PickScore(model=str(hub_clip), processor=str(hub_clip)).missing()
    sentences = PickScore(model="nobody/no-such-model", processor="/no/such/folder").missing()
    assert [sentence.split(" is ")[0] for sentence in sentences] == [
        "model = nobody/no-such-model",
        "processor = /no/such/folder",
    ]


def test_a_scale_is_positive():
    with pytest.raises(ValueError, match="reward pickscore: scale is 0; give a positive factor"):
        PickScore(scale=0)
