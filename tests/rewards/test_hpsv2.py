"""HPSv2 against raw open_clip at a small size, and the layout of its published file at full size."""

import pytest
import torch
from torch.testing import assert_close

from flowrl_rewards import hpsv2
from flowrl_rewards.hpsv2 import HPSv2, read


def transformer(name, layers, width):
    """Name and shape of the entries of a transformer in the published file."""
    shapes = {}
    for i in range(layers):
        block = f"{name}.resblocks.{i}"
        shapes |= {f"{block}.{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
        shapes |= {f"{block}.attn.out_proj.weight": (width, width), f"{block}.attn.out_proj.bias": (width,)}
        shapes |= {f"{block}.mlp.c_fc.weight": (4 * width, width), f"{block}.mlp.c_fc.bias": (4 * width,)}
        shapes |= {f"{block}.mlp.c_proj.weight": (width, 4 * width), f"{block}.mlp.c_proj.bias": (width,)}
    return shapes


def published(vision, text, grid, patch, context, embed, vision_layers, text_layers):
    """Name and shape of every entry of HPS_v2.1_compressed.pt at some size."""
    norms = {"visual.ln_pre": vision, "visual.ln_post": vision, "ln_final": text}
    return {
        "logit_scale": (),
        "positional_embedding": (context, text),
        "text_projection": (text, embed),
        "token_embedding.weight": (49408, text),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": (grid**2 + 1, vision),
        "visual.proj": (vision, embed),
        "visual.conv1.weight": (vision, 3, patch, patch),
        **{f"{name}.{kind}": (width,) for name, width in norms.items() for kind in ("weight", "bias")},
        **transformer("visual.transformer", vision_layers, vision),
        **transformer("transformer", text_layers, text),
    }


FULL = published(1280, 1024, 16, 14, 77, 1024, 32, 24)
SMALL = published(16, 16, 4, 8, 12, 8, 2, 2)


@pytest.fixture
def weights(open_network, open_clip_name, monkeypatch, tmp_path):
    """A file of the published layout at the small size."""
    monkeypatch.setattr(hpsv2, "ARCHITECTURE", open_clip_name)
    state = open_network.state_dict()
    torch.save({"epoch": 0, "state_dict": {key: state[key] for key in SMALL}}, tmp_path / hpsv2.FILE)
    return tmp_path / hpsv2.FILE


def test_the_published_file_fits_the_architecture():
    network = read({key: torch.empty(shape, device="meta") for key, shape in FULL.items()}, "the file")
    assert sum(parameter.numel() for parameter in network.parameters()) == 986_109_441


@pytest.mark.parametrize("size", [(48, 48), (40, 64), (63, 20)], ids=["square", "wide", "high"])
def test_hpsv2_is_the_cosine_of_pictures_whose_longer_side_fits(open_network, weights, sized, size):
    import open_clip
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    media, prompts = sized(*size)
    height, width = (round(32 * side / max(size)) for side in size)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    wanted = []
    with torch.inference_mode():
        for image, prompt in zip(media.images, prompts, strict=True):
            frame = torch.zeros(3, 32, 32)
            top, left = (32 - height) // 2, (32 - width) // 2
            fitted = resize(image / 255, [height, width], InterpolationMode.BICUBIC, antialias=True)
            frame[:, top : top + height, left : left + width] = fitted
            seen = open_network.encode_image(((frame - mean) / std)[None])[0]
            read = open_network.encode_text(open_clip.tokenize([prompt.text], context_length=12))[0]
            wanted.append(seen @ read / (seen.norm() * read.norm()))
        got = HPSv2(weights=str(weights))(media, prompts)
    assert torch.stack(wanted).std() > 0.02
    assert_close(got, torch.stack(wanted), atol=1e-5, rtol=1e-5)


def test_scores_follow_their_samples(weights, sized, steady):
    steady(HPSv2(weights=str(weights.parent)), *sized(40, 44))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("visual.proj"), "missing keys: visual.proj"),
        (lambda state: state.update(region=torch.zeros(1)), "unexpected keys: region"),
        (lambda state: state.update(logit_scale=torch.zeros(2)), r"wrong shapes: logit_scale \[2\] for \[\]"),
        (lambda state: state.clear(), "missing keys: ln_final.bias"),
    ],
    ids=["missing", "unexpected", "shape", "another file"],
)
def test_another_layout_is_refused_by_its_keys(weights, sized, change, told):
    file = torch.load(weights)
    change(file["state_dict"])
    torch.save(file, weights)
    with pytest.raises(ValueError, match=f"HPS_v2.1_compressed.pt is not the file that this scorer reads .*{told}"):
        HPSv2(weights=str(weights))(*sized(32, 32))


def test_what_is_not_on_this_machine_is_told(weights, monkeypatch):
    assert not HPSv2(weights=str(weights)).missing()
    (sentence,) = HPSv2(weights="nobody/no-such-weights").missing()
    assert sentence.startswith("weights = nobody/no-such-weights is not on this machine")
    monkeypatch.setattr("flowrl_rewards._weights.find_spec", lambda name: None)
    assert "[rewards]" in HPSv2(weights=str(weights)).missing()[0]
