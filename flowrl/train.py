"""The loop: ask, act, judge, credit, learn, tell. Nothing else calls backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flowrl import offline, online
from flowrl.algorithms._objective import Objective
from flowrl.clock import Clock
from flowrl.policy import Policy
from flowrl.registry import REGULARISERS
from flowrl.regularise import norm_ratio
from flowrl.session import Session, ask
from flowrl.tell import Sums
from flowrl.types import Cond, Point, Rollout


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
    way = offline if s.pairs else online
    with clock("ask"):
        prompts, roots = ask(s, step)
        cond = s.adapter.encode(prompts)
    rollout = way.judged(s, cond, roots, prompts, step, clock, sums)
    with clock("credit"):
        return way.credit(s, rollout, sums), cond


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
