"""Times: the grid a sampler walks from noise (t = 1) to data (t = 0), and the laws training draws t from.

A shift k maps [0, 1] onto itself and spends more of the grid near noise: shift(s) = k s / (1 + (k - 1) s).
"""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

Time = TypeVar("Time", float, Tensor)


def shift(s: Time, k: float) -> Time:
    """k s / (1 + (k - 1) s), the identity at k = 1."""
    return k * s / (1 + (k - 1) * s)


def flow_match_euler(steps: int, k: float, terminal: float | None = None) -> Tensor:
    """[steps + 1] the static grid of diffusers' FlowMatchEulerDiscreteScheduler.

    It shifts twice: the smallest of its 1000 training times when it is built, and the line from 1 down to that time
    when the number of steps is set. So its last step before 0 is tiny and the one before that large, unless the grid
    is stretched so that its last time before 0 is `terminal`.
    """
    times = shift(torch.linspace(1, shift(1 / 1000, k), steps, dtype=torch.float64), k)
    if terminal and steps > 1:
        times = 1 - (1 - times) * (1 - terminal) / (1 - times[-1])
    return torch.cat([times, times.new_zeros(1)])


def single_shift(steps: int, k: float) -> Tensor:
    """[steps + 1] one shift of an even grid, as DanceGRPO (2505.07818) and MixGRPO (2507.21802) take it."""
    return shift(torch.linspace(1, 0, steps + 1, dtype=torch.float64), k)


def uniform(u: Tensor) -> Tensor:
    """t = u."""
    return u


def logit_normal(u: Tensor) -> Tensor:
    """log(t / (1 - t)) ~ N(0, 1), the law SD3 was trained with (2403.03206)."""
    return torch.special.ndtri(u).sigmoid()


def linear(u: Tensor) -> Tensor:
    """p(t) = 2 t."""
    return u.sqrt()


# u [B] uniform in [0, 1) -> t [B]: the inverse distribution functions of t
LAWS: dict[str, Callable[[Tensor], Tensor]] = {"uniform": uniform, "logit_normal": logit_normal, "linear": linear}
Law = Literal["uniform", "logit_normal", "linear", "grid"]


def from_grid(u: Tensor, grid: Tensor) -> Tensor:
    """t [B], each a time of grid [T + 1] but its final 0, all equally likely; u [B] uniform in [0, 1)."""
    return grid[(u * (len(grid) - 1)).long()]


def draw(law: Law, u: Tensor, grid: Tensor) -> Tensor:
    """t of the shape of u, uniform in [0, 1), by a law of its own or from the times of the rollout's grid.

    A law is drawn into the range of the grid, beyond which a diffusion model knows no timestep.
    """
    return from_grid(u, grid) if law == "grid" else grid[-1] + (grid[0] - grid[-1]) * LAWS[law](u)
