"""Stable Diffusion 3 and 3.5 (2403.03206), and the embedded `shapes-sd3`, over diffusers' StableDiffusion3Pipeline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flowrl.models.base import guided, locate, quiet_loading
from flowrl.models.latents import LatentAdapter
from flowrl.types import Cond, Prompt

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


@dataclass(frozen=True, kw_only=True)
class SD3:
    """The block `model:` of a run on SD3; `guidance` 1 or less is none, as in the stock pipeline."""

    path: str
    guidance: float = 1.0
    negative: str = ""
    resolution: int | None = None  # pixels, the model's own where null
    max_sequence_length: int = 256  # T5 tokens; without T5 the stock pipeline attends to as many zero rows
    revision: str | None = None
    text_device: str | None = None  # of the text encoders, such as cpu or cuda:1; null: with the network
    decode_batch: int = 32

    def __post_init__(self) -> None:
        for name, low in (("guidance", 0), ("max_sequence_length", 1), ("decode_batch", 1)):
            if vars(self)[name] < low:
                raise ValueError(f"model.{name} is {vars(self)[name]}: it must be at least {low}")

    def load(self, device: torch.device, dtype: torch.dtype) -> SD3Adapter:
        path = locate(self.path)
        with quiet_loading():
            from diffusers import StableDiffusion3Pipeline

            index: Any = StableDiffusion3Pipeline.load_config(path, revision=self.revision)
            absent = {name: None for name, component in index.items() if component == [None, None]}  # no T5, say
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                path, revision=self.revision, torch_dtype=dtype, **absent
            )
        # it tells at every encoding what it cuts; `warn_truncated` does once a prompt
        logging.getLogger(StableDiffusion3Pipeline.__module__).setLevel(logging.ERROR)
        pipeline.to(device)
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
            if encoder is not None:
                encoder.to(self.text_device or device)
        return SD3Adapter(self, pipeline)


class SD3Adapter(LatentAdapter):
    export_name: ClassVar[str] = "transformer"
    lora_targets: Sequence[str] = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0",
    )  # fmt: skip

    def __init__(self, config: SD3, pipeline: StableDiffusion3Pipeline) -> None:
        pixels = pipeline.vae_scale_factor
        unit, side = pixels * pipeline.patch_size, pixels * pipeline.default_sample_size
        super().__init__(config, pipeline, pipeline.transformer, unit, side)
        self.pipeline_call: dict[str, Any] = {
            "height": self.size[0], "width": self.size[1], "max_sequence_length": config.max_sequence_length,
            "guidance_scale": config.guidance,
        }  # fmt: skip

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        self._warn(prompts)
        text, pooled = self._embed([p.text for p in prompts])
        negative, negative_pooled = self._negative
        inputs = {"text": text, "pooled": pooled, "negative": negative, "negative_pooled": negative_pooled}
        return Cond(inputs, torch.arange(len(prompts), device=self.device), self.config.guidance)

    @cached_property
    def _negative(self) -> tuple[Tensor, Tensor]:
        return self._embed([self.config.negative])

    def _warn(self, prompts: Sequence[Prompt]) -> None:
        pipe = self.pipeline
        readers = {"the CLIP encoders": (pipe.tokenizer, pipe.tokenizer.model_max_length)}
        if pipe.text_encoder_3 is not None:
            readers["T5"] = (pipe.tokenizer_3, self.config.max_sequence_length)
        self.warn_truncated(prompts, readers)

    def _embed(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        embeddings: Any = self.pipeline.encode_prompt(
            texts, texts, texts, device=self.pipeline.text_encoder.device, do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
        )  # fmt: skip
        sequence, _, pooled, _ = embeddings
        return sequence.to(self.device), pooled.to(self.device)

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        context = [cond.gather("text"), cond.gather("pooled")]
        if cond.guidance <= 1:
            return self._forward(x, t, *context)
        negative = [cond.gather("negative"), cond.gather("negative_pooled")]
        return guided(self._forward, x, t, cond.guidance, context, negative)

    def _forward(self, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        v = self.network(
            hidden_states=x.to(text.dtype), encoder_hidden_states=text, pooled_projections=pooled, timestep=t * 1000,
            return_dict=False,
        )[0]  # fmt: skip
        return v.float()
