"""The stages of a step that learns from `data.pairs`: pictures are encoded, not sampled, and no reward is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from flowrl.clock import Clock
from flowrl.sample import sample
from flowrl.session import Session
from flowrl.tell import Sums
from flowrl.types import Cond, Prompt, Rollout, Roots


def judged(s: Session, cond: Cond, roots: Roots, prompts: list[Prompt], step: int, clock: Clock, sums: Sums) -> Rollout:
    """The pictures of the step's pairs as samples; one column, 1 for the chosen picture and -1 for the rejected one."""
    with clock("act"):
        rollout = act(s, cond, roots, step)
    return replace(rollout, rewards=1.0 - 2.0 * (roots.index % 2)[:, None])


def act(s: Session, cond: Cond, roots: Roots, step: int) -> Rollout:
    """Of each pair first the chosen picture; no step was taken to them."""
    c, (height, width) = s.config, s.adapter.size
    everyone = roots.of(torch.arange(len(roots)))
    images = np.stack([s.pairs[prompt][index % 2].fitted(width, height) for prompt, index in everyone])
    return sample(
        s.velocity, s.adapter.latents(torch.from_numpy(images)), cond[roots.prompt], roots,
        s.adapter.grid(c.sampler.steps), ([], []), c.sampler, (c.seed, step),
        version=s.policy.versions[c.algorithm.acts_with],
    )  # fmt: skip


def credit(s: Session, rollout: Rollout, sums: Sums) -> Rollout:
    """The verdicts as they are."""
    adv = rollout.rewards[:, 0]
    return replace(rollout, adv=adv, weight=torch.ones_like(adv))
