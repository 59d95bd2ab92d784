"""Base against tuned on the same prompts and noise, with intervals over prompts.

Shape letters: P prompts, K seeds, R reward columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl import draws, watch
from flowrl.bank import RewardBank
from flowrl.policy import Slot
from flowrl.rewards import Media
from flowrl.sample import Sampler, sample
from flowrl.session import Session
from flowrl.types import Cond, Prompt, Roots

EVALUATION_SEED = 20_001  # the noise of evaluations, apart from that of any run
GUIDANCE = (1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Scores:
    """values [P, K] by reward column and by probe (diversity: [P, 1]); images [P, K, 3, H, W] uint8."""

    rewards: dict[str, Tensor]
    probes: dict[str, Tensor]
    images: Tensor


def generate(s: Session, slot: Slot, prompts: Sequence[Prompt], cond: Cond, seeds: int) -> Tensor:
    """[P, K, 3, H, W] uint8: pictures of a slot without noise in the steps, from (prompt, seed); cond has P rows."""
    c, device = s.config, s.accelerator.device
    steps = c.evaluate.steps or c.sampler.steps
    row = torch.arange(len(prompts), device=device).repeat_interleave(seeds)
    index = torch.arange(seeds, device=device).repeat(len(prompts))
    roots = Roots(row, torch.tensor([p.id for p in prompts], device=device)[row], index, row)
    noise = s.adapter.noise([(EVALUATION_SEED, draws.ROOT, *who) for who in roots.of(torch.arange(len(roots)))])
    solver = Sampler(steps=steps, solver=c.sampler.solver)
    with s.policy.reading(slot):
        grid, plan = s.adapter.grid(steps), solver.plan(0, 0)
        rollout = sample(s.velocity, noise, cond[row], roots, grid, plan, solver, (0, 0), vp=s.adapter.vp)
    return s.adapter.decode(rollout.x0).unflatten(0, (len(prompts), seeds))


def score(bank: RewardBank, prompts: Sequence[Prompt], images: Tensor) -> Scores:
    """All rewards and probes of pictures [P, K, 3, H, W]."""
    seeds, flat = images.shape[1], images.flatten(0, 1)
    rows = [p for p in prompts for _ in range(seeds)]
    verdicts = bank(Media(flat), rows, torch.arange(len(prompts)).repeat_interleave(seeds))
    rewards = {name: column.view(-1, seeds) for name, column in zip(bank.columns, verdicts.scores.T, strict=True)}
    probes = {name: probe(flat).view(-1, seeds) for name, probe in watch.PROBES.items()}
    if seeds > 1:
        probes["diversity"] = watch.diversity(images)[:, None]
    return Scores(rewards, probes, images)


def interval(values: np.ndarray, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of values [P], resampling prompts."""
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def compare(base: Tensor, tuned: Tensor) -> dict[str, Any]:
    """Means, paired difference and its interval over prompts; values [P, K], NaN = no verdict on the pair."""
    both = tuned - base
    base, tuned = (values.masked_fill(both.isnan(), math.nan) for values in (base, tuned))
    paired = both.nanmean(1)
    paired = paired[~paired.isnan()].double().numpy()
    low, high = interval(paired)
    return {
        "base": base.nanmean().item(), "tuned": tuned.nanmean().item(), "diff": float(paired.mean()),
        "ci95": [low, high], "n": len(paired),
    }  # fmt: skip


def evaluate(s: Session, prompts: Sequence[Prompt], bank: RewardBank, seeds: int, guided: bool = True):
    """(report, base scores, tuned scores): the tuned slot is the average of the weights."""
    cond = s.adapter.encode(prompts)
    base = score(bank, prompts, generate(s, "ref", prompts, cond, seeds))
    tuned = score(bank, prompts, generate(s, "average", prompts, cond, seeds))
    report: dict[str, Any] = {"rewards": {}, "probes": {}, "guided_base": {}, "prompts": len(prompts), "seeds": seeds}
    best = ceiling(s, prompts, bank)
    for name in bank.columns:
        row = compare(base.rewards[name], tuned.rewards[name])
        row["ceiling"] = best.get(name)
        if row["ceiling"] is not None and row["ceiling"] > row["base"]:
            gap = row["ceiling"] - row["base"]
            row["closed"] = {"share": row["diff"] / gap, "ci95": [value / gap for value in row["ci95"]]}
        report["rewards"][name] = row
    for name, values in base.probes.items():
        report["probes"][name] = compare(values, tuned.probes[name])
    if guided:
        for scale in GUIDANCE:
            scores = score(bank, prompts, generate(s, "ref", prompts, replace(cond, guidance=scale), seeds))
            report["guided_base"][f"{scale:g}"] = {n: v.nanmean().item() for n, v in scores.rewards.items()}
    return report, base, tuned


def ceiling(s: Session, prompts: Sequence[Prompt], bank: RewardBank) -> dict[str, float]:
    """The scores of true scenes through the autoencoder, by the rewards that judge a scene; else nothing."""
    specs = [spec for spec, scorer in bank.scorers if "scene" in scorer.needs]
    if not specs or not all("scene" in p.metadata for p in prompts):
        return {}
    from flowrl.zoo import shapes

    rng = np.random.default_rng(EVALUATION_SEED)
    truth = np.stack([shapes.picture(p.metadata["scene"], rng) for p in prompts for _ in range(8)])
    images = s.adapter.reconstruct(torch.from_numpy(truth).permute(0, 3, 1, 2))
    scores = score(RewardBank(specs), prompts, images.unflatten(0, (len(prompts), 8)))
    return {name: values.nanmean().item() for name, values in scores.rewards.items()}
