"""DiffusionNFT (2509.16117): regress towards an implicit good policy and away from an implicit bad one.

v+ = (1 - b) v_old + b v,    v- = (1 + b) v_old - b v,    r = 1/2 + clip(A / c, -1, 1) / 2
L  = c/b [ r |x0(v+) - x0|^2 / w+  +  (1 - r) |x0(v-) - x0|^2 / w- ],    w = sg(mean |x0(v) - x0|)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl import flow, grids
from flowrl.algorithms._objective import positive
from flowrl.algorithms._points import ForwardProcess
from flowrl.types import Point


@dataclass(frozen=True, kw_only=True)
class NFT(ForwardProcess):
    """`beta` is b, how far the two policies lie from the old one; `adv_max` is c."""

    beta: float = 1.0
    adv_max: float = 5.0
    times: grids.Law = "grid"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("algorithm", beta=self.beta, adv_max=self.adv_max)

    def loss(self, p: Point) -> Tensor:
        r = 0.5 + 0.5 * (p.adv / self.adv_max).clamp(-1, 1)
        good, bad = p.v_old.lerp(p.v, self.beta), p.v_old.lerp(p.v, -self.beta)
        return self.adv_max / self.beta * (r * misfit(p, good) + (1 - r) * misfit(p, bad))

    def metrics(self, p: Point) -> dict[str, Tensor]:
        return {"moved": flow.mean_sq(p.v - p.v_old)}


def misfit(p: Point, v: Tensor) -> Tensor:
    """[I] mean_D (x0_hat - x0)^2 / w, with w the detached mean |x0_hat - x0| >= 1e-5 in float64."""
    off = flow.clean(p.x, v, p.t) - p.items["x0"]
    w = off.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
    return (off.square().flatten(1).mean(1) / w).to(torch.promote_types(off.dtype, torch.float32))
