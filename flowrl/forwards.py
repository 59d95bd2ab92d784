"""How often a run evaluates its network, worked out from the config alone: what is promised and tested.

Counts are those of one process. A call is one forward of the network; its rows are the rows of that forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from flowrl.algorithms._points import ForwardProcess
from flowrl.config import Config
from flowrl.registry import REGULARISERS
from flowrl.types import Cond, Point

AUTO_ROWS = 64  # rows_per_forward "auto": what would fit is not known before the model is loaded


@dataclass(frozen=True)
class Count:
    rows: int = 0
    calls: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.rows + other.rows, self.calls + other.calls)

    def __mul__(self, times: int) -> Count:
        return Count(self.rows * times, self.calls * times)

    def __str__(self) -> str:
        return f"{self.rows:,} ({self.calls:,})"


@dataclass(frozen=True)
class Forwards:
    """Of one step of a run."""

    rollout: Count
    current: Count  # v, with gradient
    others: Count  # v_old and v_ref, where their weights differ from those at hand


def forwards(config: Config, step: int, world: int = 1) -> Forwards:
    """The forwards of step 0, 1, ... on each process, where no update so far was left out.

    The rollout has one for each live state. An update has one for each row, and one more for each version of the
    weights that it reads besides. A guided forward has every row twice, with the prompt and with the negative.
    """
    twice = 2 if config.model.guidance > 1 else 1
    chunk, rows, updates = rows_per_forward(config), rows_per_update(config, world), config.optimiser.updates
    rollout = Count()
    for live in live_states(config, step, world)[:-1]:
        rollout += Count(live * twice, calls(live, chunk))
    update, read = Count(rows * twice, calls(rows, chunk)), slots_read(config)
    return Forwards(
        rollout, update * updates, update * sum(_other_versions(config, read, step, u) for u in range(updates))
    )


def live_states(config: Config, step: int, world: int = 1) -> list[int]:
    """[steps + 1] how many states there are at each time of the grid; the last are the samples."""
    _, branch = config.sampler.plan(config.seed, step)
    roots = config.data.prompts_per_step // world * config.data.group_size
    return list(accumulate(branch, mul, initial=roots))


def stochastic_steps(config: Config, world: int = 1) -> tuple[int, int]:
    """(states that are left by a stochastic step, edges) of a rollout, the same wherever its window lies."""
    eta, _ = config.sampler.plan(config.seed, 0)
    live = live_states(config, 0, world)
    noisy = [k for k, level in enumerate(eta) if level]
    return sum(live[k] for k in noisy), sum(live[k + 1] for k in noisy)


def rows_per_update(config: Config, world: int = 1) -> int:
    """Rows that an update looks at: draws of the samples for a forward process, states for a reverse process."""
    if isinstance(config.algorithm, ForwardProcess):
        rows = live_states(config, 0, world)[0] * config.algorithm.draws
    else:
        rows, _ = stochastic_steps(config, world)
    return rows // config.optimiser.updates


def rows_per_forward(config: Config) -> int:
    rows = config.compute.rows_per_forward
    return AUTO_ROWS if rows == "auto" else rows


def calls(rows: int, chunk: int) -> int:
    return -(-rows // chunk)


def slots_read(config: Config) -> frozenset[str]:
    """The slots whose velocities the loss and the regularisers read, found by charging a point of one row."""
    seen: set[str] = set()

    def read(slot: str) -> Tensor:
        seen.add(slot)
        return torch.zeros(1, 1)

    x, half, row = torch.zeros(1, 1), torch.full((1,), 0.5), torch.zeros(1, dtype=torch.long)
    point = Point(
        x, half, Cond({}, row), row, half, half, {"x0": x, "eps": x, "x_next": x, "logp": half},
        {"t_next": half / 2, "eta": half}, config.sampler.kernel, read=read,
    )  # fmt: skip
    for charge in (config.algorithm.loss, *(REGULARISERS[name] for name in config.regularise)):
        charge(point)
    return frozenset(seen)


def _other_versions(config: Config, read: frozenset[str], step: int, update: int) -> int:
    """How many versions of the weights an update reads besides those it has; a version is the updates made before it.

    The reference is version 0. The old policy is a copy of what the step began with or, where it keeps something of
    itself, a version of its own.
    """
    updates, old = config.optimiser.updates, config.policy.old
    begun = step * updates
    slow = old.kept(begun if old.clock == "update" else step) > 0
    versions = {"current": begun + update, "ref": 0, "old": -1 if slow and step else begun}
    have = {versions["current"]}
    if config.algorithm.keep_v:  # the rollout's velocities
        have.add(versions["old"] if config.algorithm.acts_with == "old" else begun)
    return len({versions[slot] for slot in read} - have)
