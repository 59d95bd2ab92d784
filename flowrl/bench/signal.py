"""How many pictures an objective needs until its gradient is more signal than noise, at the base weights.

The gradients g_1 .. g_R of R rollouts are independent, with mean s and noise n: |s|^2 = mean of <g_i, g_j> over i != j,
and |n|^2 = mean |g_i|^2 - |s|^2. So R rollouts of N pictures reach a ratio of 1 where R N = N |n|^2 / |s|^2.
What pulls whatever the rewards are, as CRD's distance to its teacher does, counts as signal: `algorithm.kl=0` leaves it
out. Regularisers are always left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.clock import Clock
from flowrl.config import Config
from flowrl.session import Session, start
from flowrl.tell import Sums
from flowrl.train import bound_parts, rolled_out


def measure(config: Config, rollouts: int = 16) -> dict[str, Any]:
    """Pictures for a ratio of 1 with a range of one jackknife error of |s|^2 (null = none measured), and reward.

    Raises ValueError where pairs of pictures are given, which are all there are, and where a rollout has no verdict.
    """
    if config.data.pairs:
        raise ValueError(f"data.pairs = {config.data.pairs}: the bench asks for new pictures; give it data.prompts")
    s = start(replace(config, regularise={}))
    gradients, rewards = [], []
    for step in range(rollouts):
        gradient, reward = rollout_gradient(s, step)
        gradients.append(gradient)
        rewards.append(reward)
    signal, noise, error = signal_and_noise(torch.stack(gradients))
    pictures = s.plan.samples

    def needed(square: float) -> float | None:
        return pictures * noise / square if square > 0 else None

    return {
        "pictures": needed(signal), "range": [needed(signal + error), needed(signal - error)],
        "pictures_measured": pictures * rollouts, "reward": sum(rewards) / rollouts,
    }  # fmt: skip


def signal_and_noise(gradients: Tensor) -> tuple[float, float, float]:
    """|s|^2, |n|^2 and the jackknife error of |s|^2 from independent gradients [R, D]."""
    gram, n = (gradients.double() @ gradients.double().T), len(gradients)
    apart = gram.sum(1) - gram.diagonal()
    signal = apart.sum() / (n * (n - 1))
    without = (apart.sum() - 2 * apart) / ((n - 1) * (n - 2))  # |s|^2 from all rollouts but one
    error = ((n - 1) * (without - without.mean()).square().mean()).sqrt()
    return signal.item(), (gram.diagonal().mean() - signal).item(), error.item()


def rollout_gradient(s: Session, step: int) -> tuple[Tensor, float]:
    """(gradient [D] of the objective over a rollout, its mean reward); no weight moves."""
    c, key = s.config, (s.config.seed, step)
    rollout, cond = rolled_out(s, step, Clock(), Sums())
    if not rollout.weight.any():
        raise ValueError(f"no sample of rollout {step} has a verdict: see the scorers' warnings")
    for point in c.algorithm.points(rollout, cond[rollout.roots.prompt], c.optimiser.updates, key):
        if not point.weight.any():  # equal rewards, say, of which no pair is formed
            continue
        for part in bound_parts(s.policy, c.algorithm, point, rollout.version, s.plan.rows_per_forward, s.total):
            loss = c.algorithm.loss(part)
            (loss @ part.weight.to(loss.dtype) / point.weight.sum() / c.optimiser.updates).backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in s.policy.parameters])
    s.optimiser.zero_grad()
    return gradient, rollout.rewards.nanmean().item()


def table(result: dict[str, Any]) -> str:
    """The result as sentences."""
    pictures, (low, high) = result["pictures"], result["range"]
    if pictures is None:
        return f"no signal was measured in {result['pictures_measured']:,} pictures; raise --rollouts"
    top = f"{high:,.0f}" if high else "no bound"
    return (
        f"signal equals noise at {pictures:,.0f} pictures ({low:,.0f} to {top}, one standard error; "
        f"{result['pictures_measured']:,} measured, mean reward {result['reward']:.3f})"
    )
