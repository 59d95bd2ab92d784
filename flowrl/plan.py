"""What a run will do, worked out from its config before any weight is loaded, and refused where it cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.algorithms._points import ForwardProcess
from flowrl.config import Config
from flowrl.config_file import refuse
from flowrl.credit import Credit
from flowrl.forwards import (
    Forwards,
    calls,
    counted,
    imagined,
    live_states,
    readings,
    rows_per_forward,
    rows_per_update,
    stochastic_steps,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Numbers of one step; all but `world` and `n_prompts` are those of one process."""

    config: Config
    world: int
    n_prompts: int | None
    samples: int
    states: int  # that are left by a stochastic step
    edges: int
    rows_per_update: int
    rows_per_forward: int
    micro_batches: int  # of an update
    forwards: Forwards  # of a step after the first
    reads_ref: bool  # an update looks at the base's velocity

    def lines(self) -> list[str]:
        """What the user is told before the weights are loaded."""
        c, f = self.config, self.forwards
        stochastic = f", {self.states:,} states with {self.edges:,} stochastic steps" if self.edges else ""
        rollout = f"{c.sampler.steps} steps of {c.sampler.kernel}{stochastic}"
        lines = [
            f"a step: {_count(c.data.prompts_per_step, 'prompt')} x {c.data.group_size} = "
            f"{self.samples * self.world:,} samples, {self.samples:,} on each of {_count(self.world, 'process')}",
            f"rollout: {'none, since pairs of pictures are given' if c.data.pairs else rollout}",
            f"learning: {_count(c.optimiser.updates, 'update')} of {_count(self.rows_per_update, 'row')} in "
            f"{_count(self.micro_batches, 'micro-batch')} of up to {self.rows_per_forward} rows",
            f"forwards, as rows (calls): rollout {f.rollout}, updates {f.current}, old and reference {f.others}",
        ]
        if self.n_prompts is not None:
            epoch = math.ceil(self.n_prompts / c.data.prompts_per_step)
            lines.insert(0, f"{self.n_prompts:,} prompts, once through in {_count(epoch, 'step')} of {c.steps:,}")
        return lines


def plan(config: Config, world: int = 1, n_prompts: int | None = None) -> Plan:
    """The plan of a run on `world` processes. ConfigError: every reason why it cannot work, each with a way out."""
    refuse("the plan", reasons(config, world))
    look, live = imagined(config), live_states(config, 0, world)
    rows = rows_per_update(config, look, world)
    chunk = min(rows_per_forward(config), max([*live[:-1], rows]))
    states, edges = stochastic_steps(config, world)
    reads_ref = any(r.slot == "ref" and not r.place for r in readings(config, look, fresh=False))
    return Plan(
        config, world, n_prompts, live[-1], states, edges, rows, chunk, calls(rows, look.at_once(chunk)),
        counted(config, look, 1, world), reads_ref,
    )  # fmt: skip


def reasons(config: Config, world: int = 1) -> Iterator[str]:
    """Why a run cannot work, each with a way out."""
    yield from _uneven(config, world)
    yield from _idle(config) if config.data.pairs else _silent(config)
    if config.watch:
        yield from config.watch.objections(config.steps, config.data.pairs)
    if not config.data.pairs or isinstance(config.algorithm, ForwardProcess):
        yield from config.algorithm.objections(config)


def _idle(config: Config) -> Iterator[str]:
    """Settings that have nothing to do where pairs of pictures are given."""
    if not isinstance(config.algorithm, ForwardProcess):
        yield (
            f"algorithm.name = {config.algorithm_name} learns from the stochastic steps of its own samples, and "
            "data.pairs gives pictures alone; take algorithm.name=dpo or data.prompts"
        )
    if config.sampler.eta:
        yield f"sampler.eta = {config.sampler.eta:g}: with data.pairs no step is taken; take sampler={{steps: 8}}"
    if config.credit != Credit():
        yield "credit is given, but the pictures of data.pairs are 1 and -1 as they stand; remove the block"


def _uneven(config: Config, world: int) -> Iterator[str]:
    """Shares that are not equal."""
    prompts, group, updates = config.data.prompts_per_step, config.data.group_size, config.optimiser.updates
    if prompts % world:
        more = " or ".join(str(n) for n in (prompts - prompts % world, prompts - prompts % world + world) if n)
        yield (
            f"data.prompts_per_step = {prompts} does not split evenly over {world} processes: "
            f"take {more} prompts, or {_divisors(prompts, world)} processes"
        )
    portions = config.algorithm.portions(group, max(1, prompts // world))
    if group * config.sampler.leaves > 1 and all(n % updates for n in portions.values()):
        given = " or ".join(f"{name} = {n}" for name, n in portions.items())
        yield (
            f"optimiser.updates = {updates} does not divide {given}: every update learns from an equal share; "
            f"take {_divisors(max(portions.values()), updates)} updates"
        )


def _silent(config: Config) -> Iterator[str]:
    """Rewards that cannot tell the samples of a group apart."""
    data, weights = config.data, {}
    if data.group_size * config.sampler.leaves < 2:
        yield (
            f"data.group_size = {data.group_size}: no relative signal, since an advantage is a reward less its group's "
            "mean; take 4 or more, and where memory is short lower compute.rows_per_forward, which changes no result"
        )
    if data.shared_noise == 1 and config.sampler.eta == 0:
        yield (
            f"data.shared_noise = {data.shared_noise:g} with sampler.eta = 0: all samples of a group would be the same "
            "picture; take shared_noise=0 or a stochastic sampler"
        )
    if config.credit.backup != "uniform" and config.sampler.leaves == 1:
        yield (
            f"credit.backup = {config.credit.backup} with a sampler that does not branch: it weighs or compares the "
            "edges of a tree, and a chain has none to choose from; take credit.backup=uniform or set sampler.branch"
        )
    for spec in config.rewards:
        weights[spec.name] = weights.get(spec.name, 0.0) + spec.weight
    if not any(weights.values()):
        given = ", ".join(f"{spec.name} {spec.weight:g}" for spec in config.rewards)
        yield f"rewards = {given}: the weights add up to 0 for every reward, which is no signal; change or remove one"


def _count(n: int, thing: str) -> str:
    plural = thing if n == 1 else f"{thing}{'es' if thing.endswith(('s', 'ch')) else 's'}"
    return f"{n:,} {plural}"


def _divisors(n: int, near: int) -> str:
    """The two divisors of n nearest to a number, for a message."""
    fitting = sorted((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))[:2]
    return " or ".join(map(str, sorted(fitting)))
