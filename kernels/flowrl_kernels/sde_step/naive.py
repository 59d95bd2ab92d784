"""The definition of a stochastic step and of how far a given one lies from its mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def sde_step(
    x: Tensor, v: Tensor, dt: Tensor, pull: Tensor, rest: Tensor, std: Tensor, row: Tensor, noise: Tensor | None,
    x_next: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_next [E, *L] in `dtype` and the mean [E] of (x_next - mean)^2 over a row's elements; see the package."""
    dt, pull, rest, std = (value.view(-1, *[1] * (x.ndim - 1)) for value in (dt, pull, rest, std))
    mean = (x + dt * v + pull * (x + rest * v))[row]
    if x_next is None:
        assert noise is not None, "a step is either drawn or given"
        x_next = (mean + std[row] * noise).detach().to(dtype)
    return x_next, (x_next.to(mean.dtype) - mean).square().flatten(1).mean(1)
