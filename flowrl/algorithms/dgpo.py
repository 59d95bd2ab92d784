"""Direct group preference optimisation, DGPO (2510.08425): DPO between the better and the worse part of a group.

l = mean_D (v - u)^2, u = eps - x0,    S = b mean over the group of A (l - l_ref),    L = sg(sigmoid(S)) A l

Its gradient is that of -log sigmoid(-S), up to the factor b / G. With rho = exp(l_old - l), a sample that has already
moved far enough, A > 0 and rho > 1 + c or A <= 0 and rho < 1 - c, adds no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl import grids
from flowrl.algorithms._objective import block_mean, misfit, positive
from flowrl.algorithms._points import ForwardProcess
from flowrl.types import Cond, Point, Rollout


@dataclass(frozen=True, kw_only=True)
class DGPO(ForwardProcess):
    """`beta` is b, `clip` is c (null: none); `reference` is the base or the old policy.

    t is one of the `noisiest` times of the rollout's grid, or of all (null), where `times` is "grid".
    """

    one_draw_a_group: ClassVar[bool] = True
    surveys: ClassVar[bool] = True
    beta: float = 100.0
    reference: Literal["ref", "old"] = "ref"
    clip: float | None = 0.01
    times: grids.Law = "grid"
    noisiest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("algorithm", beta=self.beta)
        if self.clip is not None and not 0 < self.clip < 1:
            raise ValueError(f"algorithm.clip is {self.clip}: it must lie between 0 and 1, or be null for no clip")
        if self.noisiest is not None and self.noisiest < 1:
            raise ValueError(f"algorithm.noisiest is {self.noisiest}: give at least 1 time, or null for all")

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        if self.noisiest is not None:  # the last time of a grid is never drawn
            rollout = replace(rollout, grid=rollout.grid[: self.noisiest + 1])
        yield from super().points(rollout, cond, updates, key)

    def survey(self, p: Point) -> Tensor:
        """[I] b A (l - l_ref), the samples' parts of S."""
        if self.reference == "old" and p.fresh:
            return torch.zeros_like(p.adv)
        anchor = p.v_ref if self.reference == "ref" else p.v_old
        return self.beta * p.adv * (misfit(p, p.v) - misfit(p, anchor))

    def settle(self, found: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        """[I] sigmoid(S) of an item's group and draw."""
        return block_mean(found, p.items["block"], p.weight).sigmoid()

    def loss(self, p: Point) -> Tensor:
        ell = misfit(p, p.v)
        if self.clip is not None:
            ell = ell.detach().where(self.clipped(p), ell)
        return p.items["settled"] * p.adv * ell

    def clipped(self, p: Point) -> Tensor:
        """[I] which samples have moved far enough."""
        rho = (misfit(p, p.v_old) - misfit(p, p.v).detach()).exp()
        assert self.clip is not None
        return (rho > 1 + self.clip).where(p.adv > 0, rho < 1 - self.clip)

    def metrics(self, p: Point) -> dict[str, Tensor]:
        if self.clip is None:
            return {"pull": p.items["settled"]}
        return {"pull": p.items["settled"], "clip_frac": self.clipped(p).float()}

    def objections(self, config: Any) -> Iterator[str]:
        yield from super().objections(config)
        if self.noisiest is not None and (self.times != "grid" or self.noisiest > config.sampler.steps):
            yield (
                f"algorithm.noisiest = {self.noisiest} with algorithm.times = {self.times} and sampler.steps = "
                f"{config.sampler.steps}: it chooses among the times of the rollout's grid; take algorithm.times=grid "
                f"and at most {config.sampler.steps}, or null"
            )
