"""Surrogates of the policy gradient: what a decision of advantage A is charged at ratio rho.

At rho = 1 the gradient in log rho is -A, times 1 - alpha for PSPO. Those that need to know the whole update are in
_surveyed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._objective import positive
from flowrl.registry import SURROGATES, OneOf
from flowrl.types import LATER, Point


class Surrogate:
    """(log-ratio [I], A [I], settled [I, ...] where it `surveys`) -> loss [I]."""

    surveys: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        raise NotImplementedError

    def settle(self, log_ratio: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        """[I, ...] from all the log-ratios [I] of a point; `total` sums a tensor over processes."""
        raise NotImplementedError

    def metrics(self, log_ratio: Tensor, settled: Tensor = LATER) -> dict[str, Tensor]:
        return {"ratio": log_ratio.exp()}


Chosen = Annotated[Surrogate, OneOf(SURROGATES, default="ppo")]  # the type of a field `surrogate`


@dataclass(frozen=True, kw_only=True)
class Clipped(Surrogate):
    """Has a range of the ratio, 1 - c to 1 + c; c is in the units of the log-ratio, so of the mean over the latent."""

    clip: float

    def __post_init__(self) -> None:
        positive("algorithm.surrogate", clip=self.clip)

    def metrics(self, log_ratio: Tensor, settled: Tensor = LATER) -> dict[str, Tensor]:
        return outside(log_ratio.exp(), 1 - self.clip, 1 + self.clip)


@dataclass(frozen=True, kw_only=True)
class PPO(Clipped):
    """max(-A rho, -A clip(rho, 1 - c, 1 + c)) (1707.06347)."""

    name: Literal["ppo"] = "ppo"
    clip: float = 1e-4

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        return clipped(log_ratio.exp(), adv, 1 - self.clip, 1 + self.clip)


@dataclass(frozen=True, kw_only=True)
class SPO(Clipped):
    """-A rho + |A| / 2c (rho - 1)^2 (2401.16025): least at rho = 1 + c sign(A), and pulls back from beyond."""

    name: Literal["spo"] = "spo"
    clip: float = 0.03

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        rho = log_ratio.exp()
        return -adv * rho + adv.abs() / (2 * self.clip) * (rho - 1).square()


@dataclass(frozen=True, kw_only=True)
class PSPO(Surrogate):
    """-A ((1 - alpha) rho + alpha), the ratio of the mixture (1 - alpha) pi + alpha pi_old (2509.21282)."""

    name: Literal["pspo"] = "pspo"
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"algorithm.surrogate.alpha is {self.alpha}: it must lie in [0, 1)")

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        return -adv * ((1 - self.alpha) * log_ratio.exp() + self.alpha)


def clipped(rho: Tensor, adv: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """[I] max(-A rho, -A clip(rho, low, high))."""
    return torch.maximum(-adv * rho, -adv * rho.clamp(low, high))  # type: ignore[arg-type]


def outside(rho: Tensor, low: Tensor | float, high: Tensor | float) -> dict[str, Tensor]:
    return {"ratio": rho, "clip_frac": ((rho < low) | (rho > high)).float()}
