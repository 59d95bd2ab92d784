"""Stable Diffusion 1.x and 2.x over diffusers' StableDiffusionPipeline: a diffusion model in the coordinates of a flow.

A variance-preserving path x = alpha x0 + sigma eps is the straight one in other coordinates (see `flow.vp_scale`):

    t = sigma / (alpha + sigma),    x' = x / (alpha + sigma) = (1 - t) x0 + t eps,    v = eps_hat - x0_hat

so an Euler step in (x', t) is a step of DDIM. The network's timestep at t is found by interpolating log(sigma / alpha)
in its table. Text is read in cross-attention, its padding with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl import flow
from flowrl.models.attention import SharedContext
from flowrl.models.base import guided, locate, quiet_loading
from flowrl.models.latents import LatentAdapter
from flowrl.types import Cond, Prompt

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline


@dataclass(frozen=True, kw_only=True)
class SD15:
    """The block `model:` of a run on SD1.x or SD2.x; `guidance` 1 or less is none, as in the stock pipeline."""

    path: str
    guidance: float = 1.0
    negative: str = ""
    resolution: int | None = None  # pixels, the model's own where null
    share_context: bool = (
        True  # text is stored and projected once a prompt; false repeats it as the stock pipeline does
    )
    revision: str | None = None
    decode_batch: int = 32

    def __post_init__(self) -> None:
        for name, low in (("guidance", 0), ("decode_batch", 1)):
            if vars(self)[name] < low:
                raise ValueError(f"model.{name} is {vars(self)[name]}: it must be at least {low}")

    def load(self, device: torch.device, dtype: torch.dtype) -> SD15Adapter:
        path = locate(self.path)
        with quiet_loading():
            from diffusers import StableDiffusionPipeline

            pipeline = StableDiffusionPipeline.from_pretrained(
                path, revision=self.revision, torch_dtype=dtype, safety_checker=None, requires_safety_checker=False
            )
        # it tells at every encoding what it cuts; `warn_truncated` does once a prompt
        logging.getLogger(StableDiffusionPipeline.__module__).setLevel(logging.ERROR)
        return SD15Adapter(self, pipeline.to(device))


class SD15Adapter(LatentAdapter):
    vp = True
    export_name: ClassVar[str] = "unet"
    lora_targets: Sequence[str] = ("to_k", "to_q", "to_v", "to_out.0")

    def __init__(self, config: SD15, pipeline: StableDiffusionPipeline) -> None:
        pixels = pipeline.vae_scale_factor
        super().__init__(config, pipeline, pipeline.unet, pixels, pixels * pipeline.unet.config.sample_size)
        scheduler = self.first_order()
        self.predicts = scheduler.config.prediction_type
        odds = (1 / scheduler.alphas_cumprod.double() - 1).sqrt()  # sigma / alpha of each timestep
        if torch.isinf(odds[-1]) and self.predicts == "epsilon":
            raise ValueError(
                f"model.path {config.path!r} predicts noise and its last timestep is noise alone, where that says "
                "nothing about the picture: take a model that predicts v"
            )
        self._log_odds = odds.log().numpy()
        self.t_range = tuple((odds / (1 + odds))[[0, -1]].tolist())
        self.context = SharedContext(self.network, config.share_context)
        self.checkpoint = self.context.checkpoint
        self.pipeline_call: dict[str, Any] = {
            "height": self.size[0], "width": self.size[1], "guidance_scale": config.guidance,
        }  # fmt: skip

    def first_order(self) -> Any:
        from diffusers import DDIMScheduler

        return DDIMScheduler.from_config(self.pipeline.scheduler.config, clip_sample=False)

    def grid(self, steps: int) -> Tensor:
        """[steps + 1] from the stock scheduler's first timestep to what it takes for the last: 0, or timestep 0."""
        scheduler = self.first_order()
        scheduler.set_timesteps(steps)
        alphas = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
        odds = (1 / alphas.double() - 1).sqrt()
        return (1 / (1 + 1 / odds)).float().to(self.device)

    def timestep(self, t: Tensor) -> Tensor:
        """[B] the network's timestep at t, between those of its table."""
        t = t.double().cpu()
        places = np.interp((t / (1 - t)).log().numpy(), self._log_odds, np.arange(len(self._log_odds)))
        return torch.from_numpy(places).float().to(self.device)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        tokenizer = self.pipeline.tokenizer
        self.warn_truncated(prompts, {"the CLIP encoder": (tokenizer, tokenizer.model_max_length)})
        text = torch.cat([self._embed([p.text for p in prompts]), self._negative])
        return Cond({"text": text}, torch.arange(len(prompts), device=self.device), self.config.guidance)

    @cached_property
    def _negative(self) -> Tensor:
        return self._embed([self.config.negative])

    def _embed(self, texts: list[str]) -> Tensor:
        """[P, L, C]."""
        return self.pipeline.encode_prompt(texts, self.device, 1, do_classifier_free_guidance=False)[0]

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        def forward(x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
            scale = flow.vp_scale(t.double())
            alpha, sigma = (flow.like(value / scale, x) for value in (1 - t, t))
            state = x / flow.like(scale, x)
            with self.context.of(cond, rows) as (text, _):
                out = self.network(state.to(text.dtype), self.timestep(t), text, return_dict=False)[0]
            out = flow.wide(out)
            if self.predicts == "v_prediction":
                return (sigma + alpha) * out + (sigma - alpha) * state
            return (out * (alpha + sigma) - state) / alpha

        if cond.guidance <= 1:
            return forward(x, t, cond.rows)
        negative = torch.full_like(cond.rows, len(cond.inputs["text"]) - 1)
        return guided(forward, x, t, cond.guidance, [cond.rows], [negative])
