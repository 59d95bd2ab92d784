"""The stages of a step that learns from its own samples: act, judge and credit.

Samples may be made in portions of `compute.prompts_at_once` prompts: scorers judge one while the next is sampled.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from flowrl import forwards, watch
from flowrl.clock import Clock
from flowrl.credit import edge_advantages, group_advantages
from flowrl.rewards import Media
from flowrl.sample import sample
from flowrl.session import Session, first_noise
from flowrl.tell import Sums
from flowrl.types import Cond, Prompt, Rollout, Roots
from flowrl.verdicts import random_states_kept


def judged(s: Session, cond: Cond, roots: Roots, prompts: list[Prompt], step: int, clock: Clock, sums: Sums) -> Rollout:
    """A rollout with reward columns, NaN where a scorer gave no verdict."""
    rollouts, asked, total = [], [], len(roots) * s.config.sampler.leaves
    with random_states_kept():
        for part in portions(s, roots):
            with clock("act"):
                rollouts.append(act(s, cond, part, step))
            with clock("judge"):
                made = rollouts[-1]
                images, rows, group = s.adapter.decode(made.x0), made.prompt.tolist(), made.group.cpu()
                asked.append(s.rewards.ask(Media(images), [prompts[row] for row in rows], group, total))
                if s.config.watch and s.config.watch.due(step):
                    for name, values in watch.panel(images, group).items():
                        sums.moments(f"probe/{name}", values)
        with clock("judge"):
            verdicts = s.rewards.verdicts(asked)
    for name, column in zip(s.columns, verdicts.scores.T, strict=True):
        sums.spread(f"reward/{name}", column)
    return replace(joined(rollouts), rewards=verdicts.scores)


def portions(s: Session, roots: Roots) -> list[Roots]:
    """The samples of `compute.prompts_at_once` prompts at a time."""
    size = s.config.data.group_size
    sizes = [prompts * size for prompts in forwards.portions(s.config, len(roots) // size)]
    columns = [getattr(roots, one.name).split(sizes) for one in fields(Roots)]
    return [Roots(*column) for column in zip(*columns, strict=True)]


def act(s: Session, cond: Cond, roots: Roots, step: int) -> Rollout:
    """Samples from the policy that acts, with its stochastic steps on record."""
    c = s.config
    noise = first_noise(s, roots, step)
    with s.policy.reading(c.algorithm.acts_with):
        return sample(
            s.velocity, noise, cond[roots.prompt], roots, s.adapter.grid(c.sampler.steps), c.sampler.plan(c.seed, step),
            c.sampler, (c.seed, step), keep_v=c.algorithm.keep_v, version=s.policy.versions[c.algorithm.acts_with],
            vp=s.adapter.vp,
        )  # fmt: skip


def joined(parts: list[Rollout]) -> Rollout:
    """One rollout of several; what points at a root, a state or an edge goes on pointing at it."""
    if len(parts) == 1:
        return parts[0]
    roots = states = edges = 0
    moved = []
    for part in parts:
        tree = replace(part.states, root=part.states.root + roots)
        steps = replace(part.edges, state=part.edges.state + states, parent=_shifted(part.edges.parent, edges))
        moved.append(replace(part, root=part.root + roots, leaf=_shifted(part.leaf, edges), states=tree, edges=steps))
        roots, states, edges = roots + len(part.roots), states + len(tree.t), edges + len(steps.logp)
    return replace(
        moved[0], roots=_catenated([p.roots for p in moved]), states=_catenated([p.states for p in moved]),
        edges=_catenated([p.edges for p in moved]),
        **{name: torch.cat([getattr(p, name) for p in moved]) for name in ("x0", "root", "leaf")},
    )  # fmt: skip


def _shifted(index: Tensor, by: int) -> Tensor:
    return torch.where(index < 0, index, index + by)


def _catenated(tables: list[Any]) -> Any:
    """Tables of equal columns, one under the other; a column that the first does not keep is kept by none."""
    columns = {one.name: [getattr(table, one.name) for table in tables] for one in fields(tables[0])}
    kind: Any = type(tables[0])
    return kind(**{name: None if parts[0] is None else torch.cat(parts) for name, parts in columns.items()})


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
