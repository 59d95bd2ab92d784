"""A mixture of Gaussians with its exact velocity: the model on which fixed points are known (`flowrl lab`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from flowrl import draws, grids
from flowrl.types import Cond, LatentSpec, Prompt


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """The block `model:` of K isotropic Gaussians in D dimensions; their means and stds are what is trained."""

    guidance: ClassVar[float] = 1.0  # no prompt, nothing to be guided by
    means: tuple[tuple[float, ...], ...] = ((0.0,),)  # [K, D]
    stds: tuple[float, ...] = (1.0,)  # [K]
    weights: tuple[float, ...] = (1.0,)  # [K] up to a factor

    def __post_init__(self) -> None:
        if not self.means or not self.means[0] or {*map(len, self.means)} != {len(self.means[0])}:
            raise ValueError(f"model.means is {self.means}: give at least one component, each the same D > 0 numbers")
        for name in ("stds", "weights"):
            values = vars(self)[name]
            if len(values) != len(self.means) or min(values) <= 0:
                raise ValueError(
                    f"model.{name} is {values}: give one positive number to each of the {len(self.means)} components "
                    "of model.means"
                )

    def load(self, device: torch.device, dtype: torch.dtype) -> GaussianAdapter:
        return GaussianAdapter(Mixture(self).to(device), device, dtype)


class Mixture(nn.Module):
    """p(x0) = sum_k w_k N(x0; m_k, s_k^2 I) under the path x_t = (1 - t) x0 + t eps.

    Given the component, x_t is N((1 - t) m_k, V_k I), V_k = (1 - t)^2 s_k^2 + t^2, and the velocity is linear in x;
    what it is of the mixture is the mean over the components' posterior:

        v_k = (t - (1 - t) s_k^2) / V_k (x - (1 - t) m_k) - m_k,    v = sum_k p(k | x_t) v_k = E[eps - x0 | x_t]
    """

    log_weight: Tensor  # [K]

    def __init__(self, config: Gaussian) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(config.means))  # [K, D]
        self.log_std = nn.Parameter(torch.tensor(config.stds).log())  # [K]
        self.register_buffer("log_weight", (torch.tensor(config.weights) / math.fsum(config.weights)).log())

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """v [B, D] at x [B, D], t [B], in the dtype of x."""
        mean, log_std, log_weight, t = (value.to(x.dtype) for value in (self.mean, self.log_std, self.log_weight, t))
        s, t = (2 * log_std).exp(), t[:, None]
        var = (1 - t).square() * s + t.square()  # [B, K]
        off = x[:, None] - (1 - t)[..., None] * mean  # [B, K, D]
        log_p = log_weight - x.shape[1] / 2 * var.log() - off.square().sum(2) / (2 * var)
        v = ((t - (1 - t) * s) / var)[..., None] * off - mean
        return (log_p.softmax(1)[..., None] * v).sum(1)


class GaussianAdapter:
    """The laboratory's: latents [D] in the dtype of `load`, an even grid, prompts that say nothing, no pictures."""

    pipeline: Any = None
    size = (0, 0)
    pipeline_call: dict[str, Any] = {}
    export_name: ClassVar[str] = "mixture"
    lora_targets: Sequence[str] = ()
    t_range = (0.0, 1.0)
    checkpoint = None
    vp = False

    def __init__(self, network: Mixture, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self.latent = LatentSpec((network.mean.shape[1],))

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        return Cond({}, torch.arange(len(prompts), device=self.device))

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        if cond.guidance > 1:
            raise ValueError(
                f"guidance is {cond.guidance:g}: model.name = gaussian has no prompt to be guided by; take 1"
            )
        return self.network(x, t)

    def noise(self, keys: Iterable[Sequence[int]]) -> Tensor:
        return draws.normal(self.latent.shape, keys).to(self.device, self.dtype)

    def grid(self, steps: int) -> Tensor:
        return grids.single_shift(steps, 1.0).to(self.device, self.dtype)

    def decode(self, x0: Tensor) -> NoReturn:
        raise ValueError("model.name = gaussian has no pictures to judge: run flowrl lab, or take model.name=sd3")

    def latents(self, images: Tensor) -> NoReturn:
        self.decode(images)

    def reconstruct(self, images: Tensor) -> NoReturn:
        self.decode(images)
