"""What a run will do, worked out from its config before any weight is loaded, and refused where it cannot work.

Counts are those of one process. A call is one forward of the network; its rows are the rows of that forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from flowrl.algorithms._points import ForwardProcess, ReverseProcess
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.config import Config
from flowrl.config_file import refuse
from flowrl.registry import REGULARISERS
from flowrl.types import Cond, Point

AUTO_ROWS = 64  # rows_per_forward "auto": what it fits on is not known before the model is loaded
STEPWISE = {"path_kl", "step_kl"}  # regularisers of a stochastic step


@dataclass(frozen=True)
class Count:
    """Forwards of the network: rows in all, and the calls they are split into."""

    rows: int = 0
    calls: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.rows + other.rows, self.calls + other.calls)

    def __mul__(self, times: int) -> Count:
        return Count(self.rows * times, self.calls * times)


@dataclass(frozen=True)
class Forwards:
    """The forwards of one step of a run: those of the rollout, of the loss (with gradient), of v_old and v_ref."""

    act: Count
    learn: Count
    others: Count


@dataclass(frozen=True)
class Plan:
    config: Config
    world: int
    n_prompts: int | None
    roots: int  # samples that start from noise, on each process
    samples: int  # that end in pictures, on each process
    states: int  # from which a stochastic step is taken
    edges: int
    rows_per_update: int
    rows_per_forward: int
    micro_batches: int  # of each update
    forwards: Forwards  # of a step after the first

    def lines(self) -> list[str]:
        """What the user is told before the weights are loaded."""
        c, f = self.config, self.forwards
        per_step, updates = c.data.prompts_per_step, c.optimiser.updates
        prompts = f", of {self.n_prompts:,} in the file" if self.n_prompts is not None else ""
        stochastic = f", {self.states:,} states with {self.edges:,} stochastic steps" if self.edges else ""
        return [
            f"a step: {per_step} prompts x {c.data.group_size} = {self.samples * self.world:,} samples{prompts}; "
            f"{self.samples:,} on each of {self.world} process{'es' * (self.world > 1)}",
            f"rollout: {c.sampler.steps} steps of {c.sampler.kernel}{stochastic}",
            f"learning: {updates} update{'s' * (updates > 1)} of {self.rows_per_update:,} rows, each in "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of at most {self.rows_per_forward} rows",
            f"forwards a step and process, rows (calls): rollout {_said(f.act)}, updates {_said(f.learn)}, "
            f"old and reference velocities {_said(f.others)}; {c.steps:,} steps",
        ]


def plan(config: Config, world: int = 1, n_prompts: int | None = None) -> Plan:
    """The plan of a run on `world` processes. ConfigError: all reasons why it cannot work, each with a way out."""
    refuse("the run cannot work", _reasons(config, world))
    live = _live(config, world, 0)
    eta, branch = config.sampler.plan(config.seed, 0)
    stochastic = [(rows, children) for rows, noise, children in zip(live, eta, branch, strict=False) if noise]
    rows = _rows_per_update(config, world)
    chunk = min(_chunk(config), max(*live[:-1], rows))
    return Plan(
        config, world, n_prompts, live[0], live[-1], sum(rows for rows, _ in stochastic),
        sum(rows * children for rows, children in stochastic), rows, chunk, _calls(rows, chunk),
        forwards(config, 1, world),
    )  # fmt: skip


def forwards(config: Config, step: int, world: int = 1) -> Forwards:
    """The forwards of step 0, 1, ... of a run in which no update is left out, on each process.

        rollout: one a live state;  updates: one a row, and one more for each other version of the weights it reads
    """
    twice = 2 if config.model.guidance > 1 else 1  # a guided call holds every row with its negative
    chunk, rows = _chunk(config), _rows_per_update(config, world)
    act = sum((Count(live * twice, _calls(live, chunk)) for live in _live(config, world, step)[:-1]), Count())
    update = Count(rows * twice, _calls(rows, chunk))
    updates = config.optimiser.updates
    read = reads(config)
    return Forwards(act, update * updates, update * sum(_others(config, read, step, u) for u in range(updates)))


def reads(config: Config) -> frozenset[str]:
    """The slots whose velocities the loss and the regularisers read, found by charging a point of one row."""
    seen: set[str] = set()

    def read(slot: str) -> Tensor:
        seen.add(slot)
        return torch.zeros(1, 1)

    one, zero = torch.full((1,), 0.5), torch.zeros(1, 1)
    point = Point(
        zero, one, Cond({}, torch.zeros(1, dtype=torch.long)), torch.zeros(1, dtype=torch.long), one, one,
        {"x0": zero, "eps": zero, "x_next": zero, "logp": one}, {"t_next": one / 2, "eta": one, "v": zero},
        config.sampler.kernel, 1.0, read,
    )  # fmt: skip
    for charge in (config.algorithm.loss, *(REGULARISERS[name] for name in config.regularise)):
        charge(point)
    return frozenset(seen)


def _others(config: Config, read: frozenset[str], step: int, update: int) -> int:
    """How many versions of the weights an update reads besides those it has: a version is the number of updates before.

    The reference is version 0. The old policy is a copy of what the last step left, or, where it keeps something of
    itself, a version of its own.
    """
    updates, old = config.optimiser.updates, config.policy.old
    begun = step * updates
    slow = step > 0 and old.kept(begun if old.clock == "update" else step) > 0
    versions = {"current": begun + update, "ref": 0, "old": -1 if slow else begun}
    acted = versions["old"] if config.algorithm.acts_with == "old" else begun
    have = {versions["current"]} | ({acted} if config.algorithm.keep_v else set())
    return len({versions[slot] for slot in read} - have)


def _live(config: Config, world: int, step: int) -> list[int]:
    """[steps + 1] the live states at each time of the grid; the last are the samples."""
    _, branch = config.sampler.plan(config.seed, step)
    return list(accumulate(branch, mul, initial=config.data.prompts_per_step // world * config.data.group_size))


def _rows_per_update(config: Config, world: int) -> int:
    live, (eta, _) = _live(config, world, 0), config.sampler.plan(config.seed, 0)
    if isinstance(config.algorithm, ForwardProcess):
        rows = live[0] * config.algorithm.draws
    else:
        rows = sum(states for states, noise in zip(live, eta, strict=False) if noise)
    return rows // config.optimiser.updates


def _chunk(config: Config) -> int:
    rows = config.compute.rows_per_forward
    return AUTO_ROWS if rows == "auto" else rows


def _calls(rows: int, chunk: int) -> int:
    return -(-rows // chunk)


def _said(count: Count) -> str:
    return f"{count.rows:,} ({count.calls:,})"


def _multiples(n: int, of: int) -> str:
    """The nearest multiples, for a message."""
    return " or ".join(str(m) for m in (n - n % of, n - n % of + of) if m)


def _divisors(n: int, near: int) -> str:
    fit = [d for d in range(1, n + 1) if n % d == 0]
    return " or ".join(map(str, sorted(sorted(fit, key=lambda d: abs(d - near))[:2])))


def _reasons(config: Config, world: int) -> Iterator[str]:
    d, s, a, updates = config.data, config.sampler, config.algorithm, config.optimiser.updates
    name, kind = config.algorithm_name, type(config.algorithm)
    if d.group_size < 2:
        yield (
            "data.group_size = 1: a group of one has no relative signal, since an advantage is a reward less its "
            "group's mean; take 4 or more, and to save memory lower compute.rows_per_forward, which changes no result"
        )
    ...
