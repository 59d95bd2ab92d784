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

Normalise = Literal["group", "global", "gdpo", "centre"]
Backup = Literal["uniform", "mean_logp"]
Reduce = Callable[[Tensor], Tensor]

FLOOR = 1e-4  # added to a standard deviation, as Flow-GRPO does


@dataclass(frozen=True)
class Credit:
    """The block `credit:` of a run. `clip` bounds |advantage|; null leaves it unbounded."""

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


def backup(adv: Tensor, leaf: Tensor, parent: Tensor, logp: Tensor, weights: Backup = "uniform") -> Tensor:
    """Advantages [E] of the edges of a forest, from those of its leaves: a mean over the edges below (TreeGRPO).

        A(leaf edge) = A(its sample),    A(e) = sum over children c of w_c A(c)

    w is uniform over the children, or their softmax of logp [E] ("mean_logp"). adv, leaf [N]: the edge a sample ends
    in, -1 for none; parent [E], -1 at a root. On a chain every edge gets its sample's advantage, bit for bit. The map
    is linear: where samples have weight 0, backup(adv) / backup(weight) is the mean over the others.
    """
    edges = len(parent)
    score = logp.double() if weights == "mean_logp" else logp.new_zeros(edges, dtype=torch.float64)
    above = parent.where(parent >= 0, edges)  # a last row stands above the roots
    top = score.new_zeros(edges + 1).scatter_reduce(0, above, score, "amax", include_self=False)
    share = (score - top[above]).exp()
    share = (share / share.new_zeros(edges + 1).index_add(0, above, share)[above]).to(adv.dtype)

    out = adv.new_zeros(edges + 1)
    out[leaf[leaf >= 0]] = adv[leaf >= 0]
    for level in reversed(_levels(above)):
        out.index_add_(0, above[level], share[level] * out[level])
    return out[:edges]


def best_worst(adv: Tensor, group: Tensor) -> Tensor:
    """Pairs [M, 2] of the best and the worst sample of each group, the first of equals; adv [N], NaN = no verdict.

    A group whose verdicts are all equal, or fewer than 2, has no pair.
    """
    pairs = []
    for one in group.unique():
        rows = ((group == one) & ~adv.isnan()).nonzero().squeeze(1)
        values = adv[rows]
        if len(rows) and values.max() > values.min():
            pairs.append(rows[torch.stack([values.argmax(), values.argmin()])])
    return torch.stack(pairs) if pairs else group.new_empty(0, 2)


def _levels(above: Tensor) -> list[Tensor]:
    """The edges of a forest by their depth, roots first and left out; above [E] is the edge above, E at a root."""
    climb = torch.cat([above, above.new_tensor([len(above)])])
    at, depth = above, torch.zeros_like(above)
    while (inside := at < len(above)).any():
        depth, at = depth + inside, climb[at]
    return [(depth == d).nonzero().squeeze(1) for d in depth.unique() if d > 0]
