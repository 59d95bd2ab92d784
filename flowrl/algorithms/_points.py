"""Where objectives look: noised data for forward-process methods, stored states of rollouts. One Point an update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl import draws, flow, grids
from flowrl.algorithms._objective import Objective, first_of_group, shares
from flowrl.types import Cond, Point, Rollout


@dataclass(frozen=True, kw_only=True)
class ForwardProcess(Objective):
    """Looks at x_t = (1 - t) x0 + t eps of the samples, at `draws` fresh (t, eps) each, t by the law `times`.

    The draws are stratified: one in each of `draws` equal parts of the law's quantiles. `guidance` is that of the
    velocities in the loss, whatever the rollout's was: u = eps - x0 is a target for the conditional velocity alone.
    """

    acts_with: ClassVar[Literal["current", "old"]] = "old"
    one_draw_a_group: ClassVar[bool] = False  # the samples of a group share (t, eps), and stay together
    draws: int = 1
    times: grids.Law = "uniform"
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"algorithm.draws is {self.draws}: it must be at least 1")

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        for share in shares(rollout, updates, key, self.one_draw_a_group):
            yield self.noised(rollout, cond, share, key)

    def noised(self, rollout: Rollout, cond: Cond, share: Tensor, key: tuple[int, int]) -> Point:
        """The point of the samples `share` [n]: n rows for the first draw, then n for the second, and so on."""
        roots, device = rollout.roots, rollout.x0.device
        drawn_by = first_of_group(roots.group)[share] if self.one_draw_a_group else share
        keys = [(*key, draws.NOISING, *who) for who in roots.of(drawn_by)]
        u = (torch.arange(self.draws) + draws.uniform((self.draws,), keys)) / self.draws  # [n, draws]
        t = grids.draw(self.times, u, rollout.grid.cpu()).T.flatten().float().to(device)
        eps = torch.cat([draws.normal(rollout.x0.shape[1:], [(*k, d) for k in keys]) for d in range(self.draws)])
        sample, eps = share.repeat(self.draws), eps.to(device)
        x0, row = rollout.x0[sample], torch.arange(len(t), device=device)
        block = roots.group[sample] * self.draws + row // len(share)
        return Point(
            flow.interpolate(x0, eps, t), t, replace(cond, guidance=self.guidance)[sample], row,
            rollout.adv[sample], rollout.weight[sample], {"x0": x0, "eps": eps, "sample": sample, "block": block},
        )  # fmt: skip

    def portions(self, group_size: int, prompts: int) -> dict[str, int]:
        if self.one_draw_a_group:
            return {"data.prompts_per_step / processes": prompts}
        return {"data.group_size": group_size}

    def objections(self, config: Any) -> Iterator[str]:
        name = config.algorithm_name
        if config.sampler.branch != 1:
            yield (
                f"sampler.branch = {config.sampler.branch}: algorithm.name = {name} learns from samples and has no use "
                "for a tree; take sampler.branch=1 and a larger data.group_size"
            )
        for charge in ("path_kl", "step_kl"):
            if charge in config.regularise:
                yield (
                    f"regularise.{charge} = {config.regularise[charge]:g} is a KL of stochastic steps, from which "
                    f"algorithm.name = {name} does not learn: take regularise.velocity_kl"
                )


@dataclass(frozen=True, kw_only=True)
class ReverseProcess(Objective):
    """Looks at the states that the rollout left by a stochastic step; its items are the edges."""

    acts_with: ClassVar[Literal["current", "old"]] = "current"

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        states, edges, grid = rollout.states, rollout.edges, rollout.grid
        at = torch.searchsorted(-grid, -states.t)  # which step of the grid a state leaves by
        for share in shares(rollout, updates, key, together=2 if self.paired else 1):
            row = torch.isin(states.root, share).nonzero().squeeze(1)
            item = torch.isin(edges.state, row).nonzero().squeeze(1)
            state = edges.state[item]
            step = {"t_next": states.t_next[row], "eta": states.eta[row], "spread": states.spread[row]}
            if states.v is not None:
                step["v"] = states.v[row].float()
            root = states.root[state]
            block = rollout.roots.group[root] * len(grid) + at[state]
            yield Point(
                states.x[row].float(), states.t[row], cond[states.root[row]],
                torch.searchsorted(row, state), edges.adv[item], edges.weight[item],
                {"x_next": edges.x_next[item].float(), "logp": edges.logp[item], "root": root, "block": block}, step,
                rollout.kernel, float(grid[1]) if grid[0] == 1 else 1.0,
            )  # fmt: skip

    def objections(self, config: Any) -> Iterator[str]:
        name = config.algorithm_name
        if config.sampler.eta == 0:
            yield (
                f"algorithm.name = {name} learns from stochastic steps and sampler.eta = 0 takes none: "
                "take sampler.kernel=flow_sde sampler.eta=0.7"
            )
        if config.policy.old.rate:
            yield (
                f"policy.old.rate = {config.policy.old.rate:g}: algorithm.name = {name} acts with the current policy, "
                "so the old one is what acted; remove policy.old"
            )


def replay(p: Point, v: Tensor) -> Tensor:
    """[I] the log-prob of the stored edges under velocity v [B, *L]."""
    return flow.replay(p.kernel, p.x, v, *p.how, p.item, p.items["x_next"])
