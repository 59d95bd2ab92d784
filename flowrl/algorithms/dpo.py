"""Diffusion-DPO (2311.12908), online: of every group the best samples against the worst.

l = mean_D (v - u)^2, u = eps - x0,    m = -b/2 [(l_w - l_w,ref) - (l_l - l_l,ref)],    L = -log sigmoid(m)

Winner w and loser l share (t, eps); m is the margin of the reward that the policy implies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.algorithms._objective import first_of_group, misfit, positive
from flowrl.algorithms._points import ForwardProcess
from flowrl.credit import best_worst
from flowrl.types import Cond, Point, Rollout, Roots


@dataclass(frozen=True, kw_only=True)
class DPO(ForwardProcess):
    """`pairs` of each group, the k-th best against the k-th worst; `beta` is b; `reference` is the base or lags."""

    acts_with: ClassVar[Literal["current", "old"]] = "current"
    pairs: int = 1
    beta: float = 100.0
    reference: Literal["ref", "old"] = "ref"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < 1:
            raise ValueError(f"algorithm.pairs is {self.pairs}: it must be at least 1")
        positive("algorithm", beta=self.beta)

    def points(self, rollout: Rollout, cond: Cond, updates: int, key: tuple[int, int]) -> Iterator[Point]:
        """Rows winner, loser, winner, loser, ...: pair k of group g belongs to update (k + g) % updates."""
        rows, formed = self.chosen(rollout)
        roots, k = rollout.roots, torch.arange(self.pairs, device=rows.device).expand(rows.shape[:2])
        group, first = roots.group[rows[..., 0]], first_of_group(roots.group)[rows[..., 0]]
        update, pair = (k + group) % updates, group * self.pairs + k
        # both rows of a pair go by one name, that of the group's k-th sample, so they draw one (t, eps)
        prompt, prompt_id, index, pair, formed, update = (
            values.flatten().repeat_interleave(2)
            for values in (roots.prompt[first], roots.prompt_id[first], roots.index[first] + k, pair, formed, update)
        )
        rows = rows.flatten()
        paired = replace(
            rollout, roots=Roots(prompt, prompt_id, index, pair), root=torch.arange(len(rows), device=rows.device),
            x0=rollout.x0[rows], adv=rollout.adv[rows], weight=formed.to(rollout.weight.dtype),
        )  # fmt: skip
        for u in range(updates):
            p = self.noised(paired, cond[rows], (update == u).nonzero().squeeze(1), key)
            yield replace(p, unit=2, items={**p.items, "sample": rows[p.items["sample"]]})

    def chosen(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(samples [G, K, 2], formed [G, K]): winners and losers; a pair that is not formed is the group's first twice.

        So every step has the same number of rows, and those of a pair that is not formed have weight 0.
        """
        group = rollout.roots.group
        ids, slot = group.unique(return_inverse=True)
        found = best_worst(rollout.adv.where(rollout.weight > 0, torch.nan), group, self.pairs)
        count = slot[found[:, 0]].bincount(minlength=len(ids))
        formed = torch.arange(self.pairs, device=group.device) < count[:, None]
        first = torch.empty_like(ids).scatter_(0, slot, first_of_group(group))
        rows = first[:, None, None].repeat(1, self.pairs, 2)
        rows[formed] = found
        return rows, formed

    def loss(self, p: Point) -> Tensor:
        return -logsigmoid(self.margin(p)).repeat_interleave(2)

    def margin(self, p: Point) -> Tensor:
        """[I / 2] m of each pair."""
        anchor = p.v_ref if self.reference == "ref" else p.v_old
        gain = misfit(p, p.v) - misfit(p, anchor)
        return -self.beta / 2 * (gain[0::2] - gain[1::2])

    def metrics(self, p: Point) -> dict[str, Tensor]:
        margin = self.margin(p).repeat_interleave(2)
        return {"margin": margin, "accuracy": (margin.sign() + 1) / 2}

    def portions(self, group_size: int, prompts: int) -> dict[str, int]:
        return {"algorithm.pairs": self.pairs, "data.prompts_per_step / processes": prompts}

    def objections(self, config: Any) -> Iterator[str]:
        yield from super().objections(config)
        name, data = config.algorithm_name, config.data
        if 2 * self.pairs > data.group_size:
            yield (
                f"algorithm.pairs = {self.pairs} with data.group_size = {data.group_size}: a pair takes two samples of "
                f"a group; take data.group_size={2 * self.pairs} or fewer pairs"
            )
        if self.reference == "ref" and config.policy.old.rate:
            yield (
                f"policy.old.rate = {config.policy.old.rate:g} with algorithm.reference = ref: algorithm.name = {name} "
                "acts with the current policy, so nothing reads the old one; take algorithm.reference=old or remove "
                "policy.old"
            )
