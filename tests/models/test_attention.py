"""Sharing text changes nothing but the work: same velocities, same gradients, for every family that we know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from diffusers import (
    LTXVideoTransformer3DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch.testing import assert_close

from flowrl.models.attention import SharedContext
from flowrl.types import Cond

WIDTH, TOKENS = 12, 7  # of the text


@dataclass(frozen=True)
class Family:
    """A network by its settings, and how the stock pipeline calls it with (x, t, text, mask)."""

    network: type
    settings: Mapping[str, Any]
    latent: tuple[int, ...]
    masked: bool
    call: Callable[..., Any]


def plain(network, x, t, text, mask):
    masks = {} if mask is None else {"encoder_attention_mask": mask}
    return network(hidden_states=x, encoder_hidden_states=text, timestep=t, return_dict=False, **masks)[0]


def pixart(network, x, t, text, mask):
    sizes = {"resolution": None, "aspect_ratio": None}
    return network(x, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=t, return_dict=False,
                   added_cond_kwargs=sizes)[0]  # fmt: skip


def ltx(network, x, t, text, mask):
    return network(x, text, t, mask, num_frames=1, height=2, width=3, return_dict=False)[0]


def unet(network, x, t, text, mask):
    return network(x, t, text, return_dict=False)[0]


FAMILIES = {
    "sana": Family(
        SanaTransformer2DModel,
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
         "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
         "caption_channels": WIDTH, "sample_size": 4, "qk_norm": "rms_norm_across_heads"},
        (4, 4, 4), True, plain,
    ),
    "sd15": Family(
        UNet2DConditionModel,
        {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "cross_attention_dim": WIDTH,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 2, "norm_num_groups": 4,
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        (4, 8, 8), False, unet,
    ),
    "pixart": Family(
        PixArtTransformer2DModel,
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
         "cross_attention_dim": 16, "sample_size": 4, "caption_channels": WIDTH, "use_additional_conditions": False,
         "norm_num_groups": 1},
        (4, 4, 4), True, pixart,
    ),
    "wan": Family(
        WanTransformer3DModel,
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
         "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 16},
        (4, 1, 4, 4), False, plain,
    ),
    "ltx": Family(
        LTXVideoTransformer3DModel,
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
         "cross_attention_dim": 16, "caption_channels": WIDTH},
        (6, 4), True, ltx,
    ),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def built(family, share=True):
    """(network in float64, its shared context)."""
    torch.manual_seed(0)
    network = family.network(**family.settings).double().eval()
    return network, SharedContext(network, share)


def condition(family, version=None):
    g = torch.Generator().manual_seed(2)
    inputs = {"text": torch.randn(3, TOKENS, WIDTH, generator=g, dtype=torch.float64)}
    if family.masked:
        inputs["mask"] = torch.tensor([[1] * TOKENS, [1] * 4 + [0] * 3, [1] + [0] * 6])
    return Cond(inputs, torch.tensor([2, 0, 0, 1, 2]), version=version)


def velocity(family, network, shared, cond, seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(cond), *family.latent, generator=g, dtype=torch.float64)
    t = 1000 * torch.rand(len(cond), generator=g, dtype=torch.float64)
    with shared.of(cond, cond.rows) as (text, mask):
        return family.call(network, x, t, text, mask)


def gradients(network, v):
    weight = torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view_as(v)
    (v * weight).sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_velocity_and_every_gradient_are_the_stock_networks(family):
    both = [built(family, share) for share in (True, False)]
    v, stock_v = (velocity(family, *one, condition(family)) for one in both)
    assert_close(v, stock_v, rtol=1e-10, atol=1e-10)
    mine, stocks = (gradients(network, some) for (network, _), some in zip(both, (v, stock_v), strict=True))
    assert mine.keys() == stocks.keys()
    for name, gradient in stocks.items():  # a norm of diffusers is in float32 whatever its input is
        assert_close(mine[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_keys_and_values_do_not_depend_on_t(family):
    network, shared = built(family)
    cond, seen = condition(family), []
    for version in (1, 2):
        with torch.no_grad():
            velocity(family, network, shared, replace(cond, version=version), seed=version)
        seen.append(shared._kept[version])
    assert seen[0].keys() == seen[1].keys() and len(seen[0]) > 0
    for layer, (k, v) in seen[0].items():
        assert torch.equal(k, seen[1][layer][0]) and torch.equal(v, seen[1][layer][1])


def projections(network, rows):
    """Count the tokens that pass `to_k` of cross-attention layers."""
    hooks = []
    for name, module in network.named_modules():
        if name.endswith("attn2.to_k"):
            hooks.append(module.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[:2].numel())))
    return hooks


def test_text_is_projected_once_a_prompt_and_once_a_version(family):
    network, shared = built(family)
    cond, rows = condition(family), []
    layers = len(projections(network, rows))
    with torch.no_grad():
        for version in (1, 1, 2, 1, 2):
            velocity(family, network, shared, replace(cond, version=version))
        assert rows == [3 * TOKENS] * layers * 2
        rows.clear()
        velocity(family, network, shared, replace(condition(family), version=1))  # other text
        assert rows == [3 * TOKENS] * layers
    rows.clear()
    velocity(family, network, shared, replace(cond[torch.tensor([1, 2])], version=1))  # gradients reach it
    assert rows == [TOKENS] * layers, "of the prompts of the batch alone"


def test_a_new_version_reads_the_new_weights(family):
    network, shared = built(family)
    stock, repeated = built(family, share=False)
    cond = condition(family, version=1)
    with torch.no_grad():
        velocity(family, network, shared, cond)
        for some in (network, stock):
            for name, p in some.named_parameters():
                if "attn2.to_v" in name:
                    p.add_(0.5)
        v = velocity(family, network, shared, replace(cond, version=2))
        assert_close(v, velocity(family, stock, repeated, cond), rtol=1e-10, atol=1e-10)


def test_few_versions_are_kept(family):
    network, shared = built(family)
    cond = condition(family)
    with torch.no_grad():
        for version in range(6):
            velocity(family, network, shared, replace(cond, version=version))
    assert list(shared._kept) == [3, 4, 5]


def test_recomputing_blocks_in_backward_reads_the_same_text(family):
    network, shared = built(family)
    expected = gradients(network, velocity(family, network, shared, condition(family)))
    again, shared = built(family)
    again.enable_gradient_checkpointing(shared.checkpoint)
    again.train()
    v = velocity(family, again, shared, condition(family))
    with torch.no_grad():  # another reading before backward
        velocity(family, again, shared, condition(family)[torch.tensor([0, 1, 2])])
    for name, gradient in gradients(again, v).items():
        assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10)


def test_without_a_reading_the_network_is_the_stock_one(family):
    (network, _), (stock, repeated) = built(family), built(family, share=False)
    cond = condition(family)
    with torch.no_grad():
        x = torch.ones(len(cond), *family.latent, dtype=torch.float64)
        with repeated.of(cond, cond.rows) as (text, mask):
            args = x, torch.full((len(cond),), 500.0, dtype=torch.float64), text, mask
        assert torch.equal(family.call(network, *args), family.call(stock, *args))


def test_a_failure_leaves_no_reading(family):
    network, shared = built(family)
    with pytest.raises(RuntimeError, match="in the middle"), shared.of(condition(family), torch.tensor([0])):
        raise RuntimeError("in the middle")
    assert shared.reading is None
