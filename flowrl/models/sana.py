"""Sana (2410.10629), and the embedded `shapes-sana`, over diffusers' SanaPipeline; text is read in cross-attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flowrl.models.attention import SharedContext
from flowrl.models.base import guided, locate, quiet_loading
from flowrl.models.latents import LatentAdapter
from flowrl.types import Cond, Prompt

if TYPE_CHECKING:
    from diffusers import SanaPipeline


@dataclass(frozen=True, kw_only=True)
class Sana:
    """The block `model:` of a run on Sana; `guidance` 1 or less is none, as in the stock pipeline."""

    path: str
    guidance: float = 1.0
    negative: str = ""
    resolution: int | None = None  # pixels, the model's own where null
    max_sequence_length: int = 300
    instruction: bool = True  # the stock pipeline's long instruction to the text encoder, before each prompt
    share_context: bool = (
        True  # text is stored and projected once a prompt; false repeats it as the stock pipeline does
    )
    trim_padding: bool = True  # leave out positions that are padding in every prompt of a step
    revision: str | None = None
    decode_batch: int = 32

    def __post_init__(self) -> None:
        for name, low in (("guidance", 0), ("max_sequence_length", 1), ("decode_batch", 1)):
            if vars(self)[name] < low:
                raise ValueError(f"model.{name} is {vars(self)[name]}: it must be at least {low}")

    def load(self, device: torch.device, dtype: torch.dtype) -> SanaAdapter:
        path = locate(self.path)
        with quiet_loading():
            from diffusers import SanaPipeline

            pipeline = SanaPipeline.from_pretrained(path, revision=self.revision, torch_dtype=dtype)
        return SanaAdapter(self, pipeline.to(device))


class SanaAdapter(LatentAdapter):
    export_name: ClassVar[str] = "transformer"
    lora_targets: Sequence[str] = ("to_k", "to_q", "to_v", "to_out.0")

    def __init__(self, config: Sana, pipeline: SanaPipeline) -> None:
        network, pixels = pipeline.transformer, pipeline.vae_scale_factor
        if network.config.guidance_embeds:
            raise ValueError(
                f"model.path {config.path!r} is a Sana distilled to few steps, which is not served: take Sana"
            )
        unit = math.lcm(32, pixels * network.config.patch_size)  # the stock pipeline asks for multiples of 32
        super().__init__(config, pipeline, network, unit, pixels * network.config.sample_size)
        self.context = SharedContext(network, config.share_context)
        self.checkpoint = self.context.checkpoint
        default = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
        self._instruction = default if config.instruction else None
        self.pipeline_call: dict[str, Any] = {
            "height": self.size[0], "width": self.size[1], "max_sequence_length": config.max_sequence_length,
            "guidance_scale": config.guidance, "use_resolution_binning": False,
            "complex_human_instruction": self._instruction,
        }  # fmt: skip

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        self.warn_truncated(prompts, {"the text encoder": (self.pipeline.tokenizer, self.config.max_sequence_length)})
        text, mask = self._embed([p.text for p in prompts], self._instruction)
        negative, negative_mask = self._negative
        text, mask = torch.cat([text, negative]), torch.cat([mask, negative_mask])
        if self.config.trim_padding:
            seen = mask.any(0)
            text, mask = text[:, seen], mask[:, seen]
        return Cond({"text": text, "mask": mask}, torch.arange(len(prompts), device=self.device), self.config.guidance)

    @cached_property
    def _negative(self) -> tuple[Tensor, Tensor]:
        return self._embed([self.config.negative], None)

    def _embed(self, texts: list[str], instruction: list[str] | None) -> tuple[Tensor, Tensor]:
        """[P, L, C] and the mask [P, L] of what is no padding."""
        text, mask, _, _ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, device=self.device,
            max_sequence_length=self.config.max_sequence_length, complex_human_instruction=instruction,
        )  # fmt: skip
        return text.to(self.pipeline.transformer.dtype), mask

    def encoded(self, pixels: Tensor) -> Tensor:
        return self.pipeline.vae.encode(pixels).latent

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        def forward(x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
            with self.context.of(cond, rows) as (text, mask):
                scale = 1000 * self.pipeline.transformer.config.timestep_scale
                v = self.network(
                    x.to(text.dtype), encoder_hidden_states=text, encoder_attention_mask=mask, timestep=t * scale,
                    return_dict=False,
                )[0]  # fmt: skip
            return v.to(torch.promote_types(v.dtype, torch.float32))

        if cond.guidance <= 1:
            return forward(x, t, cond.rows)
        negative = torch.full_like(cond.rows, len(cond.inputs["text"]) - 1)
        return guided(forward, x, t, cond.guidance, [cond.rows], [negative])
