"""FDFO (2603.12893): two trajectories that were nudged apart give a derivative of the reward, which moves the velocity.

A pair starts from nearly one noise and takes its stochastic steps on its own. Of one of its two, against the other:

    dR = (R - R') / 2,    dx = (x0 - x0') / 2,    g = dx / (mean_D dx^2 + 1e-6),    v_tgt = v_roll - g
    rho = exp(-mean_D (v - v_tgt)^2 + mean_D g^2),    L = -dR rho + |dR| / 2c (rho - 1)^2

at each stored state of both, v_roll being the rollout's velocity there. At v = v_roll the gradient in v is 2 dR g / D:
descent moves the predicted data x_t - t v along +dR g. There is no log-probability and no statistic of a group in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl import flow
from flowrl.algorithms._points import ReverseProcess
from flowrl.algorithms._surrogates import SPO
from flowrl.types import Cond, Point, Rollout

FLOOR = 1e-6  # added to mean_D dx^2


@dataclass(frozen=True, kw_only=True)
class Paired(ReverseProcess):
    """dR is half the difference of two advantages: of two rewards with `credit: {normalise: centre, clip: null}`."""

    keep_v: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    surrogate: SPO = field(default_factory=SPO)

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        other, root = partner(rollout.roots.group), rollout.states.root[rollout.edges.state]
        dr, dx = ((value - value[other]) / 2 for value in (rollout.adv, rollout.x0))
        g = dx / flow.like(flow.mean_sq(dx) + FLOOR, dx)
        weight = rollout.weight * rollout.weight[other]
        edges = replace(rollout.edges, adv=dr[root], weight=weight[root])
        for p in super().points(replace(rollout, edges=edges), cond, updates, key):
            yield replace(p, items={**p.items, "g": g[p.items["root"]]})

    def loss(self, p: Point) -> Tensor:
        return self.surrogate(self.log_ratio(p), p.adv)

    def log_ratio(self, p: Point) -> Tensor:
        """[I] log rho as -mean_D d (d + 2 g), d = v - v_roll: exactly 0 where d is."""
        d = (p.v - p.v_old)[p.item]
        return -(d * (d + 2 * p.items["g"])).flatten(1).mean(1)

    def metrics(self, p: Point) -> dict[str, Tensor]:
        return {**self.surrogate.metrics(self.log_ratio(p)), "pairs": p.adv.ne(0).to(p.adv.dtype)}

    def portions(self, group_size: int, prompts: int) -> dict[str, int]:
        return {"data.group_size / 2": group_size // 2}

    def objections(self, config: Any) -> Iterator[str]:
        yield from super().objections(config)
        name, size = config.algorithm_name, config.data.group_size
        if config.sampler.leaves > 1:
            yield (
                f"sampler.branch = {config.sampler.branch}: algorithm.name = {name} compares the two trajectories of a "
                "pair and has no use for a tree; take sampler.branch=1 and a larger data.group_size"
            )
        if size % 2:
            yield (
                f"data.group_size = {size} with algorithm.name = {name}: members 1 and 2 of a group are a pair, and so "
                f"on; take data.group_size={size + 1}"
            )
        if config.data.shared_noise == 0:
            yield (
                f"data.shared_noise = 0 with algorithm.name = {name}: the two of a pair would have nothing in common, "
                "and their difference says nothing of either; take data.shared_noise=0.9975"
            )


def partner(group: Tensor) -> Tensor:
    """[N] the other one of each sample's pair: members 2k and 2k + 1 of a group, in the order of their rows."""
    order = group.argsort(stable=True)
    return torch.empty_like(order).scatter(0, order, order.view(-1, 2).flip(1).flatten())
