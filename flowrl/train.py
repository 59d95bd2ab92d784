"""The loop: ask, act, judge, credit, learn, tell. Nothing else calls backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flowrl import offline
from flowrl.algorithms._objective import Objective
from flowrl.credit import edge_advantages, group_advantages
from flowrl.policy import Policy
from flowrl.registry import REGULARISERS
from flowrl.regularise import norm_ratio
from flowrl.rewards import Media
from flowrl.sample import sample
from flowrl.session import Session, ask, first_noise
from flowrl.tell import Sums
from flowrl.types import Cond, Point, Prompt, Rollout, Roots


class Diverged(ValueError):
    """Several updates in a row had to be left out."""


PATIENCE = 5  # updates left out in a row before a run stops


def train_step(s: Session, step: int, clock: Clock | None = None) -> dict[str, float]:
    """One rollout and its updates, its stages by a clock; returns the step's metrics, the same on every rank."""
    clock, sums = clock or Clock(), Sums()
    rollout, cond = rolled_out(s, step, clock, sums)
    with clock("learn"):
        learn(s, rollout, cond, step, sums)
    return {**sums.reduced(s.total), **clock.seconds}


def rolled_out(s: Session, step: int, clock: Clock, sums: Sums) -> tuple[Rollout, Cond]:
    """What a step learns from: samples with their credit, or pairs of pictures that are given; and its condition."""
    doing, judging, crediting = (offline.act, offline.judge, offline.credit) if s.pairs else (act, judge, credit)
    with clock("ask"):
        prompts, roots = ask(s, step)
        cond = s.adapter.encode(prompts)
    with clock("act"):
        rollout = doing(s, cond, roots, step)
    with clock("judge"):
        rollout = judging(s, rollout, prompts, sums)
    with clock("credit"):
        return crediting(s, rollout, sums), cond


def act(s: Session, cond: Cond, roots: Roots, step: int) -> Rollout:
    """Samples from the policy that acts, with its stochastic steps on record."""
    c = s.config
    noise = first_noise(s, roots, step)
    with s.policy.reading(c.algorithm.acts_with):
        return sample(
            s.velocity, noise, cond[roots.prompt], roots, s.adapter.grid(c.sampler.steps), c.sampler.plan(c.seed, step),
            c.sampler, (c.seed, step), keep_v=c.algorithm.keep_v, version=s.policy.versions[c.algorithm.acts_with],
        )  # fmt: skip


def judge(s: Session, rollout: Rollout, prompts: list[Prompt], sums: Sums) -> Rollout:
    """Reward columns of the samples, NaN where a scorer gave no verdict."""
    row, group = rollout.prompt.cpu(), rollout.group.cpu()
    verdicts = s.rewards(Media(s.adapter.decode(rollout.x0)), [prompts[i] for i in row.tolist()], group)
    for name, column in zip(s.columns, verdicts.scores.T, strict=True):
        sums.spread(f"reward/{name}", column)
    return replace(rollout, rewards=verdicts.scores)


def credit(s: Session, rollout: Rollout, sums: Sums) -> Rollout:
    """Advantages and weights of samples and, by back-up, of edges."""
    c, edges, device = s.config.credit, rollout.edges, rollout.x0.device
    columns = rollout.rewards.new_tensor(s.rewards.weights)
    group = rollout.group.cpu()
    adv, weight = group_advantages(rollout.rewards, group, columns, c.normalise, c.clip, s.total)
    flat = torch.zeros(int(group.max()) + 1).index_add(0, group, (adv * weight).abs())[group.unique()] == 0
    sums.mean("credit/zero_std_frac", flat.float())
    adv, weight = adv.to(device), weight.to(device)
    tree = rollout.states.root[edges.state]
    edge_adv, edge_weight = edge_advantages(adv, weight, rollout.leaf, edges, tree, c.backup)
    return replace(rollout, adv=adv, weight=weight, edges=replace(edges, adv=edge_adv, weight=edge_weight))


def learn(s: Session, rollout: Rollout, cond: Cond, step: int, sums: Sums) -> None:
    """The updates of one rollout; afterwards the old policy follows."""
    key, updates = (s.config.seed, step), s.config.optimiser.updates
    judged = bool(s.total(rollout.weight.sum()))
    for point in s.config.algorithm.points(rollout, cond[rollout.roots.prompt], updates, key):
        if judged:
            update(s, point, rollout.version, sums)
        else:
            _left_out(s, sums, "no sample has had a verdict: see the scorers' warnings")
    s.policy.acted()


def update(s: Session, point: Point, acted: int, sums: Sums) -> None:
    """One optimiser step: the sum over rows divided by the weight of all ranks, which is known beforehand.

    So neither the micro-batch nor the number of processes changes the gradient. DDP averages over ranks, hence the
    factor num_processes.
    """
    acc, algorithm = s.accelerator, s.config.algorithm
    charges = [(name, c, REGULARISERS[name]) for name, c in s.config.regularise.items()]
    totals = s.total(torch.stack([point.weight.sum(), point.row_weight().sum()]))
    if not totals[0]:  # equal rewards, say, of which no pair is formed
        return sums.mean("train/skipped", torch.ones(1))
    parts = bound_parts(s.policy, algorithm, point, acted, s.plan.rows_per_forward, s.total)
    for n, part in enumerate(parts, start=1):
        with nullcontext() if n == len(parts) else acc.no_sync(s.adapter.network):
            values = algorithm.loss(part)
            loss = values @ part.weight.to(values.dtype) / totals[0]
            for name, c, charge in charges:
                charged = charge(part)
                loss = loss + c * (charged @ part.row_weight().to(charged.dtype)) / totals[1]
                sums.mean(f"train/{name}", charged.detach(), part.row_weight())
            acc.backward(loss * acc.num_processes)
        sums.mean("train/loss", values.detach(), part.weight)
        with torch.no_grad():
            for name, value in algorithm.metrics(part).items():
                sums.mean(f"train/{name}", value, part.weight)
            if s.plan.reads_ref:
                tell_norms(part, sums)
    _step(s, sums)


def _step(s: Session, sums: Sums) -> None:
    """Clip and step; an update without a finite gradient is left out and counted."""
    o = s.config.optimiser
    for group in s.optimiser.param_groups:
        group["lr"] = o.lr * min(1.0, (s.policy.updates + 1) / (o.warmup + 1))
    norm = cast(Tensor, s.accelerator.clip_grad_norm_(s.policy.parameters, o.max_grad_norm))
    finite = bool(torch.isfinite(norm))
    if finite or s.accelerator.scaler is not None:  # a scaler leaves out the step itself, and must see it to adapt
        s.optimiser.step()
    if finite:
        s.policy.stepped()
        sums.mean("train/grad_norm", norm.detach().reshape(1))
    s.optimiser.zero_grad()
    if not finite:
        return _left_out(s, sums, "the gradient has not been finite: lower optimiser.lr or raise the KL")
    sums.mean("train/skipped", torch.zeros(1))
    s.skipped_in_a_row = 0


def _left_out(s: Session, sums: Sums, why: str) -> None:
    """Count an update that was left out. Diverged: the last PATIENCE updates all were."""
    sums.mean("train/skipped", torch.ones(1))
    s.skipped_in_a_row += 1
    if s.skipped_in_a_row >= PATIENCE:
        raise Diverged(f"for {PATIENCE} updates in a row {why}")


def bound_parts(
    policy: Policy, algorithm: Objective, point: Point, acted: int, rows: int, total: Callable[[Tensor], Tensor]
) -> list[Point]:
    """The micro-batches of a point, bound to a policy; an objective that surveys has settled them."""
    parts = [policy.bound(part, acted) for part in point.parts(rows)]
    if not algorithm.surveys:
        return parts
    with torch.no_grad():
        found = torch.cat([algorithm.survey(part) for part in parts])
        settled = algorithm.settle(found, point, total).split([len(part.adv) for part in parts])
    return [replace(p, items={**p.items, "settled": own}) for p, own in zip(parts, settled, strict=True)]


def tell_norms(part: Point, sums: Sums) -> None:
    """|v| / |v_ref|, over all rows and in four bins of t."""
    ratio, weight = norm_ratio(part), part.row_weight()
    sums.mean("train/v_norm_ratio", ratio, weight)
    for k, name in enumerate(("0.00-0.25", "0.25-0.50", "0.50-0.75", "0.75-1.00")):
        inside = (part.t * 4).long().clamp(max=3) == k
        sums.mean(f"train/v_norm_ratio/t_{name}", ratio, weight * inside)


class Clock:
    """Seconds by stage, as time/<stage>."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begun = now()
        yield
        self.seconds[f"time/{stage}"] = now() - begun


def now() -> float:
    """Seconds, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
