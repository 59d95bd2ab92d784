"""Advantage-weighted matching, AWM (2509.25050): a policy gradient whose log-likelihood is minus the matching loss.

l = mean_D (v - u)^2, u = eps - x0,    q = -W(l, t),    rho = exp(q - q_old),    a = c A / 5
L = max(-a rho, -a clip(rho, 1 - clip, 1 + clip)) + k mean_D (v - v_old)^2

With W = (1 - t) / t l and t uniform, the mean of q is the evidence lower bound of log p(x0) up to a constant; the other
W have its direction and another scale. `ghuber` is W = t ((l + 1e-10)^p - 1e-10^p) / p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl import flow, grids
from flowrl.algorithms._objective import block_mean, misfit, positive
from flowrl.algorithms._points import ForwardProcess
from flowrl.algorithms._surrogates import clipped, outside
from flowrl.types import Point

TINY = 1e-10
FULL = 5.0  # the advantage that weighs adv_max: the bound of credit.clip in Flow-GRPO's family


@dataclass(frozen=True, kw_only=True)
class AWM(ForwardProcess):
    """`weight` is W and `power` its p, `adv_max` is c, `old_kl` is k.

    `ratio`: "one" has q_old = sg(q), so the gradient is REINFORCE's; "draw" has q_old of v_old at each (t, eps);
    "sample" the same with q - q_old averaged over the draws of a sample first.
    """

    weight: Literal["uniform", "t", "t2", "huber", "ghuber", "elbo"] = "ghuber"
    power: float = 0.25
    ratio: Literal["one", "draw", "sample"] = "one"
    clip: float = 1.0
    adv_max: float = 1.0
    old_kl: float = 1.0
    draws: int = 6
    times: grids.Law = "grid"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("algorithm", power=self.power, clip=self.clip, adv_max=self.adv_max)
        if self.old_kl < 0:
            raise ValueError(f"algorithm.old_kl is {self.old_kl}: it must be at least 0, where 0 is none")

    @property
    def surveys(self) -> bool:  # type: ignore[override]
        return self.ratio == "sample"

    def survey(self, p: Point) -> Tensor:
        return torch.zeros_like(p.adv, dtype=torch.float64) if p.fresh else self.gain(p)

    def settle(self, found: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        return block_mean(found, p.items["sample"], torch.ones_like(found))

    def loss(self, p: Point) -> Tensor:
        charged = clipped(self.log_ratio(p).exp(), self.adv_max / FULL * p.adv, 1 - self.clip, 1 + self.clip)
        return charged + self.old_kl * flow.mean_sq(p.v - p.v_old) if self.old_kl else charged

    def log_ratio(self, p: Point) -> Tensor:
        """[I] log rho, in float64."""
        if self.ratio == "draw":
            return self.gain(p)
        # a value settled without gradient, and the gradient of this row's share of it
        q = self.q(p, p.v)
        return q - q.detach() + (p.items["settled"] if self.surveys else 0)

    def gain(self, p: Point) -> Tensor:
        """[I] q - q_old, in float64; 0 where the two velocities are the same."""
        return self.q(p, p.v) - self.q(p, p.v_old)

    def q(self, p: Point, v: Tensor) -> Tensor:
        """[I] -W of the matching loss of velocity v [B, *L], in float64."""
        ell, t = misfit(p, v.double()), p.t.double()
        match self.weight:
            case "uniform":
                return -ell
            case "t":
                return -t * ell
            case "t2":
                return -t.square() * ell
            case "huber":
                return -t * ((ell + TINY).sqrt() - TINY**0.5)
            case "ghuber":
                return -t * ((ell + TINY) ** self.power - TINY**self.power) / self.power
            case "elbo":
                return -(1 - t) / t * ell

    def metrics(self, p: Point) -> dict[str, Tensor]:
        return outside(self.log_ratio(p).exp(), 1 - self.clip, 1 + self.clip)
