"""Who deserves what: advantages inside groups, their way up a tree, and the best and worst of a group.

A group is the samples that answer one prompt; only the `global` and `gdpo` scales look beyond it. All statistics are in
float64. A sample that lacks a verdict (NaN) in a column in use takes part in nothing: advantage 0, weight 0.

Shape letters: N samples, E edges, R reward columns, G groups, M pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.types import Edges

Normalise = Literal["group", "global", "gdpo", "centre"]
Backup = Literal["uniform", "mean_logp", "siblings", "depth"]
Reduce = Callable[[Tensor], Tensor]

FLOOR = 1e-4  # added to a standard deviation, as Flow-GRPO does
ALIKE = 1e-6  # the standard deviation below which BranchGRPO takes the edges of a tree at one depth for equal


@dataclass(frozen=True)
class Credit:
    """The block `credit:` of a run. `clip` bounds |advantage|, null leaves it unbounded; `backup` is for the edges."""

    normalise: Normalise = "group"
    clip: float | None = 5.0
    backup: Backup = "uniform"

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"credit.clip is {self.clip}: give a positive bound, or null for none")


def alone(sums: Tensor) -> Tensor:
    """The reduction over a single process."""
    return sums


def column_advantages(
    rewards: Tensor, group: Tensor, normalise: Normalise = "group", reduce: Reduce = alone
) -> tuple[Tensor, Tensor]:
    """Advantages [N, R] of every reward column and weights [N] of the samples, both float64.

        A = (r - mean of the group) / (std + 1e-4),    population std

    of the group, or for "global" of all verdicts of the batch (Flow-GRPO, 2505.05470); "centre" does not divide.
    rewards [N, R], group [N].
    A column that is constant in a group, up to rounding in the rewards' dtype, gives that group exactly 0. A group of
    fewer than 2 verdicts has weight 0. `reduce` sums a tensor over processes; no group spans two of them.
    """
    seen = ~rewards.isnan().any(1)
    r = rewards[seen].double()
    ids, slot = group[seen].unique(return_inverse=True)

    def grouped(how: str, values: Tensor) -> Tensor:  # [N, R] reduced over each group, one row a sample again
        table = values.new_zeros(len(ids), values.shape[1])
        return table.scatter_reduce(0, slot[:, None].expand_as(values), values, how, include_self=False)[slot]

    off = r - grouped("mean", r)
    if normalise == "global":
        total = reduce(r.new_tensor(len(r)))
        mean = reduce(r.sum(0)) / total
        std = (reduce((r - mean).square().sum(0)) / total).sqrt()
    else:
        std = grouped("mean", off.square()).sqrt()
    spread = grouped("amax", r) - grouped("amin", r)
    varies = spread > 4 * torch.finfo(rewards.dtype).eps * grouped("amax", r.abs())

    adv, weight = torch.zeros_like(rewards, dtype=torch.float64), seen.double()
    adv[seen] = (off if normalise == "centre" else off / (std + FLOOR)).where(varies, 0)
    weight[seen] = (slot.bincount()[slot] >= 2).double()
    return adv, weight


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    column_weights: Tensor,
    normalise: Normalise = "group",
    clip: float | None = 5.0,
    reduce: Reduce = alone,
) -> tuple[Tensor, Tensor]:
    """Advantages [N] and weights [N] of samples judged by several columns: the weighted sum of column advantages.

    rewards [N, R], group [N], column_weights [R]; a column of weight 0 is not looked at. "gdpo" (GDPO, 2601.05242)
    divides the sum by its own std over the batch, plus 1e-4; its mean there is 0 by construction. Then |A| <= clip.
    """
    used = column_weights != 0
    columns, weight = column_advantages(rewards[:, used], group, normalise, reduce)
    adv = (columns * column_weights[used].double()).sum(1)
    if normalise == "gdpo":
        power, total = reduce(torch.stack([adv.square().sum(), weight.sum()]))
        adv = adv / ((power / total.clamp(min=1)).sqrt() + FLOOR)
    if clip is not None:
        adv = adv.clamp(-clip, clip)
    return adv.to(rewards.dtype), weight.to(rewards.dtype)


def edge_advantages(
    adv: Tensor, weight: Tensor, leaf: Tensor, edges: Edges, tree: Tensor, how: Backup = "uniform"
) -> tuple[Tensor, Tensor]:
    """Advantages and weights [E] of the edges of a forest, from those of its leaves [N]; tree [E] numbers its trees.

    An edge has what `backup` gives it, over the leaves with a verdict; without one below it, its weight is 0. Then

        siblings    A(e) - the mean over the edges that leave the same state: Q - V with siblings for V
        depth       (A(e) - mean) / std over the edges of its tree at its depth, 0 where std < 1e-6 (BranchGRPO)

    An only child has nobody to be compared with: it keeps the mean that was taken from the edge above it, so that all
    steps between two branchings share one advantage, and the edges of a chain keep their sample's.
    """
    seen, total = (backup(value, leaf, edges.parent, edges.logp, how) for value in (weight, adv * weight))
    judged, value = seen > 0, (total / seen.clamp(min=1e-12)).double()
    depth = _depth(edges.parent)
    if how == "siblings":
        mean, count = _mean(value, edges.state, judged)
        base = mean.where(count > 1, 0)
        for d in depth.unique()[1:]:
            only = (depth == d) & (count < 2)
            base[only] = base[edges.parent[only]]
        value = value - base
    elif how == "depth" and len(depth):
        level = tree * (depth.max() + 1) + depth
        value = value - _mean(value, level, judged)[0]
        std = _mean(value.square(), level, judged)[0].sqrt()
        value = (value / std).where(std >= ALIKE, 0)
    return value.where(judged, 0).to(adv.dtype), judged.to(weight.dtype)


def backup(adv: Tensor, leaf: Tensor, parent: Tensor, logp: Tensor, weights: Backup = "uniform") -> Tensor:
    """Advantages [E] of the edges of a forest, from those of its leaves: a mean over the edges below (TreeGRPO).

        A(leaf edge) = A(its sample),    A(e) = sum over children c of w_c A(c)

    w is the softmax of logp [E] over the children for "mean_logp", and uniform else. adv, leaf [N]: the edge a sample
    ends in, -1 for none; parent [E], -1 at a root. On a chain every edge gets its sample's advantage, bit for bit. The
    map is linear: where samples have weight 0, backup(adv) / backup(weight) is the mean over the others.
    """
    edges = len(parent)
    score = logp.double() if weights == "mean_logp" else logp.new_zeros(edges, dtype=torch.float64)
    above = parent.where(parent >= 0, edges)  # a last row stands above the roots
    top = score.new_zeros(edges + 1).scatter_reduce(0, above, score, "amax", include_self=False)
    share = (score - top[above]).exp()
    share = (share / share.new_zeros(edges + 1).index_add(0, above, share)[above]).to(adv.dtype)

    out = adv.new_zeros(edges + 1)
    out[leaf[leaf >= 0]] = adv[leaf >= 0]
    depth = _depth(parent)
    for d in depth.unique().flip(0)[:-1]:
        level = (depth == d).nonzero().squeeze(1)
        out.index_add_(0, above[level], share[level] * out[level])
    return out[:edges]


def best_worst(adv: Tensor, group: Tensor, pairs: int = 1) -> Tensor:
    """Pairs [M, 2] of the k-th best and the k-th worst sample of each group, k < pairs, the first of equals first.

    adv, group [N], NaN = no verdict. A group has only those of its pairs whose best is better than its worst, and they
    come first: none where its verdicts are all equal, or fewer than 2.
    """
    found = [group.new_empty(0, 2)]
    for one in group.unique():
        rows = ((group == one) & ~adv.isnan()).nonzero().squeeze(1)
        best, worst = (rows[adv[rows].argsort(descending=down, stable=True)][:pairs] for down in (True, False))
        found.append(torch.stack([best, worst], 1)[adv[best] > adv[worst]])
    return torch.cat(found)


def _depth(parent: Tensor) -> Tensor:
    """[E] how many edges lie above each edge of a forest; parent [E], -1 at a root."""
    at, depth = parent, torch.zeros_like(parent)
    while (inside := at >= 0).any():
        depth, at = depth + inside, parent[at].where(inside, -1)
    return depth


def _mean(values: Tensor, block: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, count) [E] over the judged edges of the same block."""
    _, slot = block.unique(return_inverse=True)
    count, top = (torch.zeros_like(values).index_add(0, slot, part * judged) for part in (judged.to(values), values))
    return (top / count.clamp(min=1))[slot], count[slot]
