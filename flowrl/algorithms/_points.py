"""Where objectives look: the noised data of forward-process methods, the stored states of rollouts.

`points` yields one Point an update. Every update takes an equal share of every group, by a permutation keyed with
(seed, step, prompt), so that the updates are the same for any number of processes and any micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl import draws, flow, grids
from flowrl.types import Cond, Point, Rollout


def shares(rollout: Rollout, updates: int, key: tuple[int, int]) -> Iterator[Tensor]:
    """`updates` index tensors over the root samples, each with an equal share of every group."""
    roots = rollout.roots
    update = torch.empty_like(roots.index)
    for group in roots.group.unique():
        mine = (roots.group == group).nonzero().squeeze(1)
        order = draws.permutation(
            len(mine), *key, draws.ORDER, int(roots.prompt_id[mine[0]]), int(roots.index[mine[0]])
        )
        update[mine[order.to(mine.device)]] = torch.arange(len(mine), device=mine.device) * updates // len(mine)
    for u in range(updates):
        yield (update == u).nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True)
class ForwardProcess:
    """Looks at x_t = (1 - t) x0 + t eps of the samples, at `draws` fresh (t, eps) each, t by the law `times`.

    The draws of one sample are stratified: one in each of `draws` equal parts of the law's quantiles.
    """

    acts_with: ClassVar[str] = "old"
    keep_v: ClassVar[bool] = False
    draws: int = 1
    times: grids.Law = "uniform"

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        for share in shares(rollout, updates, key):
            keys = [(*key, draws.NOISING, *who) for who in rollout.roots.of(share)]
            device = rollout.x0.device
            u = (torch.arange(self.draws) + draws.uniform((self.draws,), keys)) / self.draws  # [n, draws]
            t = grids.draw(self.times, u, rollout.grid.cpu()).T.flatten().float().to(device)
            eps = torch.cat([draws.normal(rollout.x0.shape[1:], [(*k, d) for k in keys]) for d in range(self.draws)])
            sample, eps = share.repeat(self.draws), eps.to(device)
            x0 = rollout.x0[sample]
            yield Point(
                flow.interpolate(x0, eps, t), t, cond[sample], torch.arange(len(t), device=device),
                rollout.adv[sample], rollout.weight[sample], {"x0": x0, "eps": eps},
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReverseProcess:
    """Looks at the states that the rollout left by a stochastic step; its items are the edges."""

    acts_with: ClassVar[str] = "current"

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        states, edges, grid = rollout.states, rollout.edges, rollout.grid
        for share in shares(rollout, updates, key):
            row = torch.isin(states.root, share).nonzero().squeeze(1)
            item = torch.isin(edges.state, row).nonzero().squeeze(1)
            step = {"t_next": states.t_next[row], "eta": states.eta[row]}
            if states.v is not None:
                step["v"] = states.v[row].float()
            yield Point(
                states.x[row].float(), states.t[row], cond[states.root[row]],
                torch.searchsorted(row, edges.state[item]), edges.adv[item], edges.weight[item],
                {"x_next": edges.x_next[item].float(), "logp": edges.logp[item]}, step,
                rollout.kernel, float(grid[1]) if grid[0] == 1 else 1.0,
            )  # fmt: skip


def replay(p: Point, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [I, *L], std [I], logp [I]) of the stored edges under velocity v [B, *L]."""
    mean, std = flow.step(p.kernel, p.x, v, p.t, p.step["t_next"], p.step["eta"], p.cap)
    mean, std = mean[p.item], std[p.item]
    return mean, std, flow.log_prob(p.kernel, p.items["x_next"], mean, std)
