"""The stock pipeline on our noise and prompts: what adapters and exported weights are checked against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import draws
from flowrl.export import LORA_FILE
from flowrl.policy import Slot
from flowrl.sample import Sampler, sample
from flowrl.session import Session
from flowrl.types import Roots

PROMPTS = 2  # of a run that are sampled, its first ones


def ours(s: Session, slot: Slot = "current") -> Tensor:
    """Latents [B, *L] of the weights of a slot, without noise in the steps."""
    sampler, cond = Sampler(steps=s.config.sampler.steps), s.adapter.encode(s.prompts[:PROMPTS])
    place, grid = torch.arange(len(cond), device=s.accelerator.device), s.adapter.grid(sampler.steps)
    roots, plan = Roots(place, place, place, place), sampler.plan(0, 0)
    with s.policy.reading(slot):
        return sample(s.velocity, _noise(s), cond, roots, grid, plan, sampler, (0, 0), vp=s.adapter.vp).x0


def theirs(s: Session, pipeline: Any) -> Tensor:
    """The same latents by a stock pipeline with its scheduler replaced by the first-order one of the same config."""
    pipeline.scheduler = s.adapter.first_order()
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(s.accelerator.device)  # text encoders that live elsewhere, which it does not expect
    with _autocast(s, getattr(pipeline, s.adapter.export_name)):
        return pipeline(
            prompt=[p.text for p in s.prompts[:PROMPTS]], latents=_noise(s), output_type="latent",
            negative_prompt=[s.config.model.negative] * len(s.prompts[:PROMPTS]),
            num_inference_steps=s.config.sampler.steps, **s.adapter.pipeline_call,
        ).images.float()  # fmt: skip


@contextmanager
def _autocast(s: Session, network: Any) -> Iterator[None]:
    """The network in the run's precision, and the network alone, as in training."""
    if s.policy.autocast is None:
        yield
        return
    stock, network.forward = (
        network.forward,
        torch.autocast(s.accelerator.device.type, s.policy.autocast)(network.forward),
    )
    try:
        yield
    finally:
        network.forward = stock


def fresh(s: Session) -> Any:
    """The run's pipeline as it is published."""
    return s.config.model.load(s.accelerator.device, s.accelerator.unwrap_model(s.adapter.network).dtype).pipeline


def put_in(s: Session, pipeline: Any, folder: Path) -> None:
    """Load exported weights by the pipeline's own means."""
    if s.config.lora:
        pipeline.load_lora_weights(folder, weight_name=LORA_FILE)
    else:
        network, name = type(s.accelerator.unwrap_model(s.adapter.network)), s.adapter.export_name
        pipeline.register_modules(**{name: network.from_pretrained(folder / name).to(s.accelerator.device)})


def _noise(s: Session) -> Tensor:
    return s.adapter.noise([(s.config.seed, 0, draws.ROOT, p.id, 0) for p in s.prompts[:PROMPTS]])
