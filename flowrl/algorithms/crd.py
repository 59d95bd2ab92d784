"""Centered reward distillation, CRD (2603.14128): the reward that the policy implies is regressed on the true one.

r = mean_D [(v_old - u)^2 / w_old - (v - u)^2 / w],    w = sg(mean_D |v - u|) or 1,    u = eps - x0
R = 1/2 + clip(A / c, -1, 1) / 2,    r^c = r - sg(sum_j p_j r_j),    R^c = R - sum_j p_j R_j,    sum over the group
L = c/b [ (b r^c - R^c)^2  or  BCE(sigmoid(b r^c), sigmoid(R^c)) ] + k(R) mean_D (v - v_teacher)^2

Centring cancels the partition function of the optimum p_old exp(R / b) / Z(prompt), so it is done inside a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowrl import flow, grids
from flowrl.algorithms._objective import block_mean, positive, target
from flowrl.algorithms._points import ForwardProcess
from flowrl.types import Point

LEAST = 1e-4  # of the KL's coefficient, where it follows the reward


@dataclass(frozen=True, kw_only=True)
class CRD(ForwardProcess):
    """`beta` is b, `adv_max` is c, `adaptive` takes w; the teacher is the base under `teacher_guidance`.

    p is uniform at `temperature` T < 0. At T > 0 L is the mean over p = softmax(R / T) and softmax(-R / T), at T = 0
    over softmax(R) among R > 0 and uniform. k(R) is `kl`, or with `kl_by_reward` rises from 1e-4 at R = 0 to `kl`.
    """

    acts_with: ClassVar[Literal["current", "old"]] = "current"
    one_draw_a_group: ClassVar[bool] = True
    surveys: ClassVar[bool] = True
    beta: float = 1.0
    adv_max: float = 5.0
    match: Literal["mse", "bce"] = "mse"
    adaptive: bool = True
    temperature: float = -1.0
    kl: float = 0.1
    kl_by_reward: bool = True
    teacher_guidance: float = 4.5
    times: grids.Law = "grid"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("algorithm", beta=self.beta, adv_max=self.adv_max)
        if self.kl < 0:
            raise ValueError(f"algorithm.kl is {self.kl}: it must be at least 0, where 0 is none")
        if 0 < self.temperature < 0.01:  # exp(1 / T) would overflow
            raise ValueError(f"algorithm.temperature is {self.temperature}: give at least 0.01, or 0 for R > 0 alone")

    def survey(self, p: Point) -> Tensor:
        return self.implied(p)

    def settle(self, found: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        """[I, 2, directions] the means of r and of R over an item's group and draw, by each p."""
        reward, block = self.reward(p).double(), p.items["block"]
        means = [
            torch.stack([block_mean(x, block, p.weight.double() * share) for x in (found.double(), reward)], 1)
            for share in self.shares(reward)
        ]
        return torch.stack(means, 2)

    def shares(self, reward: Tensor) -> list[Tensor]:
        """p [I] of each direction, not normalised."""
        if self.temperature < 0:
            return [torch.ones_like(reward)]
        if self.temperature == 0:
            return [reward.exp() * (reward > 0), torch.ones_like(reward)]
        return [(sign * (reward - 0.5) / self.temperature).exp() for sign in (1, -1)]

    def loss(self, p: Point) -> Tensor:
        implied, reward = self.implied(p), self.reward(p)
        mean_implied, mean_reward = p.items["settled"].to(implied.dtype).unbind(1)
        found, wanted = self.beta * (implied[:, None] - mean_implied), reward[:, None] - mean_reward
        if self.match == "mse":
            off = (found - wanted).square()
        else:
            off = binary_cross_entropy_with_logits(found, wanted.sigmoid().to(found.dtype), reduction="none")
        loss = self.adv_max / self.beta * off.mean(1)
        if self.kl:
            least = min(LEAST, self.kl) if self.kl_by_reward else self.kl
            loss = loss + (least + (self.kl - least) * reward) * flow.mean_sq(p.v - self.teacher(p))
        return loss

    def reward(self, p: Point) -> Tensor:
        """[I] R."""
        return 0.5 + 0.5 * (p.adv / self.adv_max).clamp(-1, 1)

    def implied(self, p: Point) -> Tensor:
        """[I] r."""
        return self.misfit(p, p.v_old) - self.misfit(p, p.v)

    def misfit(self, p: Point, v: Tensor) -> Tensor:
        """[I] mean_D (v - u)^2 / w, with w in float64 and at least 1e-5."""
        off = v - target(p)
        misfit = flow.mean_sq(off)
        if self.adaptive:
            w = off.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
            misfit = (misfit / w).to(misfit.dtype)
        return misfit

    def teacher(self, p: Point) -> Tensor:
        if self.teacher_guidance == self.guidance:
            return p.v_ref
        with torch.no_grad():
            return p.at(p.x, p.t, guidance=self.teacher_guidance).v_ref

    def metrics(self, p: Point) -> dict[str, Tensor]:
        return {"implied_reward": self.implied(p), "moved": flow.mean_sq(p.v - p.v_old)}
