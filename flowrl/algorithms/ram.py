"""Reinforce adjoint matching, RAM (2605.10759): regress on the base's velocity, moved along or against the sample's.

L = 1/M mean_D (v - sg[v_ref + M A (u - v_old)])^2,    u = eps - x0

Its fixed point is the base tilted by exp(M A) where the reward is linear, and near it otherwise. `path_cost` (section
5) makes it exact: the value of x_t is less what steering away from the base costs, in nats, between x_t and the data.
With x_s on the way, s ~ U(0, t), eps = r eps' + sqrt(1 - r^2) z and r = s (1 - t) / (t (1 - s)), the target gets

sg[ t / (1 - t) (c_s - c_t) (eps_hat(x_t) - z / sqrt(1 - r^2)) ],    c = (1 - t) / t |v_old - v_ref|^2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl import draws, flow, grids
from flowrl.algorithms._objective import positive, target
from flowrl.algorithms._points import ForwardProcess
from flowrl.types import Cond, Point, Rollout, Roots

T_RANGE = (0.03, 0.97)  # of the exact form, whose terms divide by t and by 1 - t
S_RANGE = (0.01, 0.999)  # of s / t


@dataclass(frozen=True, kw_only=True)
class RAM(ForwardProcess):
    """`scale` is M, in nats per unit of advantage."""

    scale: float = 100.0
    path_cost: bool = False
    draws: int = 8
    times: grids.Law = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("algorithm", scale=self.scale)
        if self.guidance != 1:
            raise ValueError(
                f"algorithm.guidance is {self.guidance}: RAM regresses on eps - x0, whose mean is the plain "
                "conditional velocity and no guided one; leave it at 1 and guide the rollout with model.guidance"
            )

    def noised(self, rollout: Rollout, cond: Cond, share: Tensor, key: tuple[int, int]) -> Point:
        p = super().noised(rollout, cond, share, key)
        return self.bridged(p, rollout.roots, share, key) if self.path_cost else p

    def bridged(self, p: Point, roots: Roots, share: Tensor, key: tuple[int, int]) -> Point:
        """The point with an earlier x_s on the way to each x_t, s ~ U(0, t); the law of x_t stays."""
        keys, x0, z = [(*key, draws.BRIDGE, *who) for who in roots.of(share)], p.items["x0"], p.items["eps"]
        u = draws.uniform((self.draws,), keys).T.flatten().to(p.t)
        eps_s = torch.cat([draws.normal(x0.shape[1:], [(*k, d) for k in keys]) for d in range(self.draws)]).to(z)
        t = p.t.clamp(*T_RANGE)
        s = t * u.clamp(*S_RANGE)
        r, rest = bridge(s, t)
        eps = flow.like(r, z) * eps_s + flow.like(rest, z) * z
        items = {**p.items, "eps": eps, "z": z, "s": s, "x_s": flow.interpolate(x0, eps_s, s)}
        return replace(p, x=flow.interpolate(x0, eps, t), t=t, items=items)

    def loss(self, p: Point) -> Tensor:
        goal = p.v_ref + flow.like(self.scale * p.adv, p.x) * (target(p) - p.v_old)
        if self.path_cost:
            goal = goal + cost_pull(p)
        return flow.mean_sq(p.v - goal) / self.scale

    def metrics(self, p: Point) -> dict[str, Tensor]:
        moved = {"moved": flow.mean_sq(p.v - p.v_old)}
        return {**moved, "path_cost": cost(p)} if self.path_cost else moved


def bridge(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(r, sqrt(1 - r^2)) [B] in float64: the correlation of the noises of x_s and x_t, and what is left for fresh."""
    s, t = s.double(), t.double()
    r = s * (1 - t) / (t * (1 - s))
    return r, (1 - r.square()).sqrt()


def cost(p: Point) -> Tensor:
    """[B] c = (1 - t) / t |v_old - v_ref|^2, summed over the elements: the cost of steering in nats per unit of t."""
    return (1 - p.t) / p.t * (p.v_old - p.v_ref).square().flatten(1).sum(1)


@torch.no_grad()
def cost_pull(p: Point) -> Tensor:
    """[B, *L] what the cost between x_t and the data adds to the target, from one time s on the way.

    c_t is known at x_t: it changes no mean, and takes away the variance as s -> t.
    """
    _, rest = bridge(p.items["s"], p.t)
    gap = p.t / (1 - p.t) * (cost(p.at(p.items["x_s"], p.items["s"])) - cost(p))
    return flow.like(gap, p.x) * (flow.noise(p.x, p.v_old, p.t) - p.items["z"] / flow.like(rest, p.x))
