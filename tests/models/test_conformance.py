"""Every adapter against its stock pipeline: same samples, same keys, same LoRA files."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import get_peft_model_state_dict
from torch.testing import assert_close

from flowrl import draws
from flowrl.models.sana import Sana
from flowrl.models.sd3 import SD3
from flowrl.models.sd15 import SD15
from flowrl.policy import LoRA, Policy, Slots
from flowrl.sample import Sampler, sample
from flowrl.types import Prompt, Roots
from tests.tiny import PROMPTS, tiny_sana, tiny_sd3, tiny_sd15

CPU = torch.device("cpu")
ASKED = [Prompt(i, text) for i, text in enumerate(PROMPTS)]


@dataclass(frozen=True)
class Family:
    build: Callable[..., Path]
    model: Callable[..., Any]
    settings: Mapping[str, Any]
    adapted: int  # layers that LoRA adapts in the tiny network
    idle: frozenset[str]  # those of them whose gradient is 0
    unit: int = 2  # pixels


FAMILIES = {
    # the last block has no text output, and what the text asks in it is thrown away
    "sd3": Family(
        tiny_sd3, SD3, {"max_sequence_length": 1}, 2 * 8 - 1, frozenset({"transformer_blocks.1.attn.add_q_proj"})
    ),
    "sana": Family(tiny_sana, Sana, {"max_sequence_length": 10, "instruction": False}, 2 * 8, frozenset(), 32),
    "sd15": Family(tiny_sd15, SD15, {}, 4 * 8, frozenset()),
}


@dataclass(frozen=True)
class Tiny:
    """A family's very small pipeline on disk."""

    family: Family
    folder: Path

    def load(self, dtype=torch.float32, folder=None, **settings):
        model = self.family.model(path=str(folder or self.folder), **{**self.family.settings, **settings})
        return model.load(CPU, dtype)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    family = FAMILIES[request.param]
    return Tiny(family, family.build(tmp_path_factory.mktemp("tiny") / request.param))


def noise_of(adapter):
    return adapter.noise([(0, 0, draws.ROOT, p.id, 0) for p in ASKED])


def ours(adapter, steps, velocity=None):
    """[P, *L] one deterministic sample of each prompt."""
    cond, place = adapter.encode(ASKED), torch.arange(len(ASKED))
    roots, sampler = Roots(place, place, torch.zeros_like(place), place), Sampler(steps=steps)
    grid = adapter.grid(steps)
    return sample(
        velocity or adapter.velocity,
        noise_of(adapter),
        cond,
        roots,
        grid,
        sampler.plan(0, 0),
        sampler,
        (0, 0),
        vp=adapter.vp,
    ).x0


def stock(pipeline, adapter, steps):
    """[P, *L] what the stock pipeline makes of the same noise."""
    pipeline.scheduler = adapter.first_order()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=[p.text for p in ASKED], negative_prompt=[adapter.config.negative] * len(ASKED),
        latents=noise_of(adapter), num_inference_steps=steps, output_type="latent", **adapter.pipeline_call,
    ).images  # fmt: skip


@pytest.mark.parametrize("guidance", [1.0, 4.0], ids=["unguided", "guided"])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_deterministic_samples_are_those_of_the_stock_pipeline(tiny, steps, guidance):
    adapter = tiny.load(guidance=guidance, negative="two")
    assert_close(ours(adapter, steps), stock(adapter.pipeline, adapter, steps), atol=2e-5, rtol=0)


def test_guidance_and_prompts_matter(tiny):
    plain, guided = (ours(tiny.load(guidance=g), 4) for g in (1.0, 4.0))
    assert (plain - guided).abs().amax((1, 2, 3)).min() > 1e-2
    cond, x = tiny.load().encode(ASKED), torch.zeros(len(ASKED), 4, 4, 4)
    v = tiny.load().velocity(x, torch.full((len(ASKED),), 0.5), cond)
    assert torch.pdist(v.flatten(1)).min() > 1e-2


@pytest.mark.parametrize("shift, terminal", [(1.0, None), (3.0, None), (1.0, 0.125), (3.0, 0.1)])
def test_the_grid_is_the_installed_schedulers(tiny, tmp_path, shift, terminal):
    if tiny.family.model is SD15:
        pytest.skip("a diffusion model, whose scheduler has no shift")
    adapter = tiny.load(folder=tiny.family.build(tmp_path / "built", shift=shift, shift_terminal=terminal))
    for steps in (2, 4, 10):
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(adapter.pipeline.scheduler.config)
        scheduler.set_timesteps(steps)
        assert_close(adapter.grid(steps), scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 4.0], ids=["unguided", "guided"])
def test_a_batch_of_mixed_times_and_prompts_is_its_rows_one_by_one(tiny, guidance):
    adapter = tiny.load(guidance=guidance)
    cond = adapter.encode(ASKED)
    rows, t = torch.tensor([3, 0, 0, 4, 1]), torch.tensor([1.0, 0.7, 0.2, 0.01, 0.5]).clamp(*adapter.t_range)
    x = noise_of(adapter)
    with torch.no_grad():
        batch = adapter.velocity(x, t, cond[rows])
        single = [adapter.velocity(x[i : i + 1], t[i : i + 1], cond[rows[i : i + 1]]) for i in range(5)]
        alone = [adapter.velocity(x[i : i + 1], t[i : i + 1], adapter.encode([ASKED[r]])) for i, r in enumerate(rows)]
    assert batch.dtype == torch.float32 and batch.shape == (5, *adapter.latent.shape)
    assert_close(batch, torch.cat(single), atol=1e-5, rtol=0)
    assert_close(batch, torch.cat(alone), atol=1e-5, rtol=0)


def with_lora(adapter, rank=2):
    policy = Policy(adapter, LoRA(rank=rank, alpha=2 * rank), Slots(), seed=0, autocast=None)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters:
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return policy


def test_the_gradient_reaches_every_lora_target_and_nothing_else(tiny):
    adapter = tiny.load()
    policy = with_lora(adapter)
    adapted = {name.split(".lora_")[0] for name in policy.names}
    targets = {n for n, _ in adapter.network.named_modules() if n.endswith(tuple(adapter.lora_targets))}
    assert adapted == targets and len(targets) == tiny.family.adapted
    x = noise_of(adapter)
    adapter.velocity(x, torch.full((len(x),), 0.6), adapter.encode(ASKED)).square().sum().backward()
    still = {n.split(".lora_")[0] for n, p in zip(policy.names, policy.parameters, strict=True) if not p.grad.any()}
    assert still == tiny.family.idle
    rest = [p for name, p in adapter.network.named_parameters() if name not in policy.names]
    assert all(p.grad is None for p in (*rest, *adapter.pipeline.vae.parameters()))


def test_state_dict_keys_stay_stock(tiny):
    adapter = tiny.load()
    Policy(adapter, None, Slots(), seed=0, autocast=None)
    stock_network = type(adapter.network).from_pretrained(tiny.folder / adapter.export_name)
    assert list(adapter.network.state_dict()) == list(stock_network.state_dict())


def test_a_lora_file_gives_the_stock_pipeline_our_samples(tiny, tmp_path):
    adapter = tiny.load()
    base = ours(adapter, 4)
    with_lora(adapter)
    tuned = ours(adapter, 4)
    assert (tuned - base).abs().max() > 0.1
    layers, settings = get_peft_model_state_dict(adapter.network), adapter.network.peft_config["default"].to_dict()
    name = adapter.export_name
    adapter.pipeline.save_lora_weights(
        tmp_path, **{f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": settings}
    )
    fresh = tiny.load()
    fresh.pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    assert_close(stock(fresh.pipeline, adapter, 4), tuned, atol=1e-4, rtol=0)


def test_bf16_weights_give_nearly_the_float32_velocity(tiny):
    x, t = noise_of(tiny.load()), torch.linspace(0.1, 0.9, len(ASKED))
    with torch.no_grad():
        full, half = (a.velocity(x, t, a.encode(ASKED)) for a in (tiny.load(), tiny.load(torch.bfloat16)))
    assert half.dtype == torch.float32
    assert (half - full).square().mean().sqrt() < 0.03 * full.square().mean().sqrt()


def test_decoding_rounds_the_stock_pictures(tiny):
    adapter = tiny.load()
    x0 = ours(adapter, 4)
    pictures = adapter.decode(x0)
    vae, processor = adapter.pipeline.vae, adapter.pipeline.image_processor
    with torch.no_grad():
        z = x0 / vae.config.scaling_factor + adapter.shift
        expected = processor.postprocess(vae.decode(z).sample, output_type="np")
    assert pictures.dtype == torch.uint8 and pictures.shape == (len(ASKED), 3, *adapter.size)
    assert (pictures.permute(0, 2, 3, 1).numpy() - expected * 255).__abs__().max() <= 0.5 + 1e-3


def test_a_resolution_off_the_models_unit_is_refused(tiny):
    unit = tiny.family.unit
    with pytest.raises(ValueError, match=f"model.resolution {4 * unit + 1} is no multiple of {unit}: take {4 * unit}"):
        tiny.load(resolution=4 * unit + 1)


def test_a_folder_that_is_not_there_is_named(tiny, tmp_path):
    with pytest.raises(ValueError, match="model.path .*nowhere.* is no folder"):
        tiny.load(folder=tmp_path / "nowhere")


def test_a_prompt_that_is_cut_is_told_once(tiny, caplog):
    adapter = tiny.load()
    limit = {"sd3": 12, "sana": 10, "sd15": 12}[type(adapter).__name__.removesuffix("Adapter").lower()]
    prompts = [Prompt(3, "one"), Prompt(7, "one " * limit)]
    stock = logging.getLogger("diffusers")  # its messages do not reach the root
    stock.addHandler(caplog.handler)
    try:
        for _ in range(2):
            adapter.encode(prompts)
    finally:
        stock.removeHandler(caplog.handler)
    [message] = caplog.messages
    assert message.startswith("prompt 7 has ") and f"read up to {limit}: it is cut after" in message
