"""What adapters over an image autoencoder have in common: pictures, noise and the grid of a first-order scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl import draws, grids
from flowrl.models.base import to_uint8
from flowrl.types import LatentSpec, Prompt

log = logging.getLogger(__name__)


class LatentAdapter:
    """Latents z = (encoding - shift) scale of a stock pipeline's `vae`, whose pictures are square."""

    t_range = (0.0, 1.0)
    checkpoint = None
    vp = False
    latent: LatentSpec

    def __init__(self, config: Any, pipeline: Any, network: Any, unit: int, side: int) -> None:
        """`unit` is what the sides of a picture are multiples of in pixels, `side` the model's own."""
        self.config, self.pipeline, self.network = config, pipeline, network.eval()
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module) and part is not network:
                part.requires_grad_(False)
        pipeline.vae.float()  # decoders overflow in half precision
        size = config.resolution or side
        if size % unit:
            raise ValueError(f"model.resolution {size} is no multiple of {unit}: take {size - size % unit}")
        self.size = (size, size)
        side = size // pipeline.vae_scale_factor
        self.latent = LatentSpec((network.config.in_channels, side, side))
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        return self.pipeline.vae.device

    def encoded(self, pixels: Tensor) -> Tensor:
        """[N, C, h, w] the mean of the autoencoder's latents of pictures in [-1, 1]."""
        return self.pipeline.vae.encode(pixels).latent_dist.mean

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        z = x0.to(vae.dtype) / vae.config.scaling_factor + self.shift
        return torch.cat([to_uint8(vae.decode(part).sample) for part in z.split(self.config.decode_batch)])

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        pixels = (part.to(self.device).float() / 127.5 - 1 for part in images.split(self.config.decode_batch))
        z = torch.cat([self.encoded(part) for part in pixels])
        return (z - self.shift) * self.pipeline.vae.config.scaling_factor

    @property
    def shift(self) -> float:
        return getattr(self.pipeline.vae.config, "shift_factor", None) or 0.0

    def reconstruct(self, images: Tensor) -> Tensor:
        return self.decode(self.latents(images))

    def noise(self, keys: Iterable[Sequence[int]]) -> Tensor:
        return draws.normal(self.latent.shape, keys).to(self.device)

    def first_order(self) -> Any:
        """The scheduler that the pipeline's config makes of the first-order class: its Euler steps are the ODE's."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        config = self.pipeline.scheduler.config
        shift = {"shift": config["flow_shift"]} if "flow_shift" in config else {}  # as a multistep scheduler calls it
        return FlowMatchEulerDiscreteScheduler.from_config(config, **shift)

    def grid(self, steps: int) -> Tensor:
        scheduler = self.first_order().config
        return grids.flow_match_euler(steps, scheduler.shift, scheduler.shift_terminal).float().to(self.device)

    def warn_truncated(self, prompts: Sequence[Prompt], readers: dict[str, tuple[Any, int]]) -> None:
        """Say once of a prompt which encoder cuts it, and where; `readers`: name to (tokenizer, tokens it reads)."""
        for name, (tokenizer, limit) in readers.items():
            for prompt in prompts:
                ids = tokenizer(prompt.text, truncation=False, verbose=False).input_ids
                if len(ids) > limit and prompt.text not in self._warned:
                    kept = tokenizer.decode(ids[: limit - 1], skip_special_tokens=True)
                    log.warning(
                        "prompt %d has %d tokens for %s, read up to %d: it is cut after %r",
                        prompt.id, len(ids), name, limit, kept[-40:],
                    )  # fmt: skip
        self._warned.update(p.text for p in prompts)
