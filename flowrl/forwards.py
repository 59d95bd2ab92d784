"""How often a run evaluates its network, worked out from the config alone: what is promised and tested.

Counts are those of one process. A call is one forward of the network; its rows are the rows of that forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from flowrl.config import Config
from flowrl.credit import alone
from flowrl.registry import REGULARISERS
from flowrl.sample import sample
from flowrl.types import Cond, Point, Roots

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
    others: Count  # without: v_old and v_ref, where their weights differ from those at hand, and surveys


@dataclass(frozen=True)
class Reading:
    """One look at a velocity: of which slot, at which of an update's places, with gradient or without."""

    place: int
    slot: str
    grad: bool
    guided: bool


def forwards(config: Config, step: int, world: int = 1) -> Forwards:
    """The forwards of step 0, 1, ... on each process, where no update so far was left out.

    The rollout has one for each live state. An update has one for each row, and one more for each version of the
    weights that it reads besides. A guided forward has every row twice, with the prompt and with the negative.
    """
    return counted(config, imagined(config), step, world)


def counted(config: Config, look: Point, step: int, world: int) -> Forwards:
    """`forwards`, by an imagined update."""
    chunk, updates = rows_per_forward(config), config.optimiser.updates
    rollout, prompts = Count(), config.data.prompts_per_step // world
    for live in live_states(config, step, world)[:-1]:
        for share in portions(config, prompts):
            some = live * share // prompts
            rollout += Count(some * (2 if config.model.guidance > 1 else 1), calls(some, chunk))
    rows = rows_per_update(config, look, world)
    batches = calls(rows, look.at_once(chunk))
    first, later = readings(config, look, fresh=True), readings(config, look, fresh=False)
    current = others = Count()
    for update in range(updates):
        fresh = not update and (config.algorithm.acts_with == "current" or not _slow(config, step))
        for grad, guided in _run(first if fresh else later, config, step, update):
            count = Count(rows * (2 if guided else 1), batches)
            current, others = (current + count, others) if grad else (current, others + count)
    return Forwards(rollout, current, others)


def portions(config: Config, prompts: int) -> list[int]:
    """How many prompts are sampled together, portion by portion."""
    size = config.compute.prompts_at_once or prompts
    return [min(size, prompts - first) for first in range(0, prompts, size)]


def live_states(config: Config, step: int, world: int = 1) -> list[int]:
    """[steps + 1] how many states there are at each time of the grid; the last are the samples, or given ones alone."""
    branch = [] if config.data.pairs else config.sampler.plan(config.seed, step)[1]
    roots = config.data.prompts_per_step // world * config.data.group_size
    return list(accumulate(branch, mul, initial=roots))


def stochastic_steps(config: Config, world: int = 1) -> tuple[int, int]:
    """(states that are left by a stochastic step, edges) of a rollout, the same wherever its window lies."""
    eta, _ = config.sampler.plan(config.seed, 0)
    live = live_states(config, 0, world)
    noisy = [k for k, level in enumerate(eta) if level]
    return sum(live[k] for k in noisy), sum(live[k + 1] for k in noisy)


def rows_per_update(config: Config, look: Point, world: int = 1) -> int:
    """Rows that an update looks at, all groups being alike; `look` is an imagined one."""
    return len(look) * (config.data.prompts_per_step // world) // config.optimiser.updates


def rows_per_forward(config: Config) -> int:
    rows = config.compute.rows_per_forward
    return AUTO_ROWS if rows == "auto" else rows


def calls(rows: int, chunk: int) -> int:
    return -(-rows // chunk)


def readings(config: Config, look: Point, fresh: bool) -> list[Reading]:
    """What an update reads, in order, found by charging an imagined one; `fresh`: the weights are those that acted."""
    seen: list[Reading] = []
    places: list[Point] = []

    def bound(p: Point) -> Point:
        place = len(places)
        places.append(p)

        def read(slot: str) -> Tensor:
            seen.append(Reading(place, slot, torch.is_grad_enabled(), p.cond.guidance > 1))
            return torch.zeros_like(p.x)

        return replace(p, read=read, fresh=fresh, bind=bound)

    algorithm, part = config.algorithm, bound(look)
    if algorithm.surveys:
        with torch.no_grad():
            settled = algorithm.settle(algorithm.survey(part), look, alone)
        part = replace(part, items={**part.items, "settled": settled})
    for charge in (algorithm.loss, *(REGULARISERS[name] for name in config.regularise)):
        charge(part)
    with torch.no_grad():
        algorithm.metrics(part)
    return seen


def imagined(config: Config) -> Point:
    """The first update of a rollout of latents of one element, with as many groups as updates."""
    size, groups = config.data.group_size, config.optimiser.updates
    group = torch.arange(groups).repeat_interleave(size)
    roots, cond = Roots(group, group, torch.arange(size).repeat(groups), group), Cond({}, group, config.model.guidance)
    grid, noise = torch.linspace(1, 0, config.sampler.steps + 1), torch.linspace(-1, 1, len(group))[:, None]
    rollout = sample(
        lambda x, t, cond: x, noise, cond, roots, grid, config.sampler.plan(config.seed, 0), config.sampler, (0, 0),
        keep_v=config.algorithm.keep_v,
    )  # fmt: skip
    n, edges = len(rollout.x0), rollout.edges
    judged = replace(edges, adv=torch.ones(len(edges.logp)), weight=torch.ones(len(edges.logp)))
    rollout = replace(rollout, adv=torch.linspace(-1, 1, n), weight=torch.ones(n), edges=judged)
    return next(config.algorithm.points(rollout, cond, groups, (0, 0)))


def _run(seen: list[Reading], config: Config, step: int, update: int) -> Iterator[tuple[bool, bool]]:
    """(with gradient, guided) of each forward that these readings cost: what `Policy.bound` does, by versions alone.

    A version is the number of updates made before it. The reference is version 0. The old policy is a copy of what
    the step began with or, where it keeps something of itself, a version of its own.
    """
    begun = step * config.optimiser.updates
    versions = {"current": begun + update, "ref": 0, "old": -1 if _slow(config, step) else begun}
    have: set[tuple[int, int]] = set()
    if config.algorithm.keep_v:  # the rollout's velocities
        have.add((0, versions["old"] if config.algorithm.acts_with == "old" else begun))
    live: set[int] = set()
    for r in seen:
        version = versions[r.slot]
        current = version == versions["current"]
        if r.slot != "current" and (r.place, version) in have:
            continue
        if current and r.grad and r.place not in live:
            live.add(r.place)
            yield True, r.guided
        elif not (current and r.place in live) and (r.place, version) not in have:
            have.add((r.place, version))
            yield False, r.guided


def _slow(config: Config, step: int) -> bool:
    """Whether the old policy has kept something of itself when a step begins."""
    old = config.policy.old
    return step > 0 and old.kept(step * config.optimiser.updates if old.clock == "update" else step) > 0
