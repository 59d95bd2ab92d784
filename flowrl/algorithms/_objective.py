"""What every objective is, and how the samples of a rollout are shared out to its updates and compared in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl import draws, flow
from flowrl.types import Point, Rollout


class Objective:
    """What the loop asks of every algorithm besides `points` and `loss`.

    Where a loss needs to know something of the whole update first (the mean over a group, an effective sample size),
    `surveys` is true: `survey` measures every part without gradient, and what `settle` makes of it, [I, ...], is
    items["settled"] in `loss`.
    """

    acts_with: ClassVar[Literal["current", "old"]]
    keep_v: ClassVar[bool] = False
    surveys: ClassVar[bool] = False
    paired: ClassVar[bool] = False  # members 2k and 2k + 1 of a group share an update, and noise with nobody else

    def survey(self, p: Point) -> Tensor:
        """[I, ...] of a part, without gradient."""
        raise NotImplementedError

    def settle(self, found: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        """[I, ...] from all the survey of an unbound point; `total` sums a tensor over processes."""
        raise NotImplementedError

    def metrics(self, p: Point) -> dict[str, Tensor]:
        """Values [I] by name, logged as train/<name>."""
        return {}

    def portions(self, group_size: int, prompts: int) -> dict[str, int]:
        """What `optimiser.updates` may share out, of the `prompts` groups of a process: it must divide one of these."""
        return {"data.group_size": group_size}

    def objections(self, config: Any) -> Iterator[str]:
        """Why the other settings of a run do not go with this method, a sentence each with a way out."""
        yield from ()


def positive(block: str, **settings: float) -> None:
    """ValueError for a setting of the block that is not above 0."""
    for key, value in settings.items():
        if value <= 0:
            raise ValueError(f"{block}.{key} is {value}: it must be positive")


def target(p: Point) -> Tensor:
    """[I, *L] u = eps - x0, what a velocity is matched to."""
    return p.items["eps"] - p.items["x0"]


def misfit(p: Point, v: Tensor) -> Tensor:
    """[I] the matching loss mean_D (v - u)^2."""
    return flow.mean_sq(v - target(p))


def shares(
    rollout: Rollout, updates: int, key: tuple[int, int], whole: bool = False, together: int = 1
) -> Iterator[Tensor]:
    """`updates` index tensors over the root samples, each with an equal share of every group, or of the `whole` groups.

    Each `together` members of a group that follow one another have one share. The rule depends on (seed, step, prompt)
    alone, so that the updates are the same for any number of processes.
    """
    roots = rollout.roots
    update = torch.empty_like(roots.index)
    for group in roots.group.unique():
        mine = (roots.group == group).nonzero().squeeze(1)
        if whole:
            update[mine] = group % updates
            continue
        n, who = len(mine) // together, (int(roots.prompt_id[mine[0]]), int(roots.index[mine[0]]))
        order = draws.permutation(n, *key, draws.ORDER, *who).to(mine.device)
        share = torch.arange(n, device=mine.device) * updates // n
        update[mine.view(n, together)[order]] = share[:, None]
    for u in range(updates):
        yield (update == u).nonzero().squeeze(1)


def block_mean(values: Tensor, block: Tensor, weight: Tensor) -> Tensor:
    """[I] the weighted mean over the items of the same block; values, block, weight [I]."""
    ids, slot = block.unique(return_inverse=True)
    weight = weight.to(values.dtype)
    top = values.new_zeros(len(ids)).index_add(0, slot, values * weight)
    return (top / values.new_zeros(len(ids)).index_add(0, slot, weight).clamp(min=1e-30))[slot]


def first_of_group(group: Tensor) -> Tensor:
    """[N] the first sample of each sample's group."""
    _, slot = group.unique(return_inverse=True)
    first = torch.full_like(slot, len(slot)).scatter_reduce(
        0, slot, torch.arange(len(slot), device=slot.device), "amin"
    )
    return first[slot]
