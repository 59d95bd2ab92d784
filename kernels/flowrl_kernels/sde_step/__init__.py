"""One step of a stochastic sampler and how likely it was, in one read of the state, its velocity and the noise."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_kernels.backend import chosen, why_not_triton
from flowrl_kernels.sde_step import naive


def sde_step(
    x: Tensor, v: Tensor, dt: Tensor, pull: Tensor, rest: Tensor, std: Tensor, row: Tensor, *,
    noise: Tensor | None = None, x_next: Tensor | None = None, dtype: torch.dtype = torch.float32,
    back_end: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Edges that leave the rows they point at: drawn from noise, or given; and their squared distance from the mean.

        mean = x + dt v + pull (x + rest v),    x_next = mean + std noise,    square = mean_D (x_next - mean)^2

    x, v [B, *L]; dt, pull, rest, std [B]; row [E] int, the row an edge leaves; noise or x_next [E, *L]. Returns x_next
    in `dtype`, or as given, and square [E], of x_next as it was rounded, so that a step has the same square when it is
    drawn and when it is replayed. In float32 at least. square is differentiable in x and v; x_next is not. From square
    follows the log-probability in nats an element, -square / (2 std^2) - log(std) - log(2 pi) / 2.

    `back_end` is naive (the definition), triton, or auto: triton on a GPU, else naive.
    """
    why_not = {"naive": "", "triton": why_not_triton(x)}
    if chosen(back_end, why_not, ("triton", "naive") if x.is_cuda else ("naive",)) == "naive":
        return naive.sde_step(x, v, dt, pull, rest, std, row, noise, x_next, dtype)
    from flowrl_kernels.sde_step import kernel  # not every machine has triton

    return kernel.sde_step(x, v, dt, pull, rest, std, row, noise, x_next, dtype)
