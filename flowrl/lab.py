"""Objectives on a model whose every answer is known: one Gaussian, trained through the very loop of a run.

The prior is p = N(0, 1) and the reward r a parabola, so that the law an objective tempered by M should reach is normal:

    p*(x) ~ p(x) exp(M r(x)),    r = a x - k (x - c)^2 / 2:    N(M (a + k c) / (1 + M k), 1 / (1 + M k))

A case says which objective, with which settings, and what must come out; only the judging is the laboratory's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.config import Config, Data, Optimiser
from flowrl.credit import Credit
from flowrl.models.gaussian import Gaussian
from flowrl.online import act, credit
from flowrl.plan import plan
from flowrl.policy import Policy
from flowrl.registry import ALGORITHMS
from flowrl.sample import Sampler
from flowrl.scorers import RewardSpec
from flowrl.session import Session, ask, make_accelerator
from flowrl.tell import Sums
from flowrl.train import learn
from flowrl.types import Prompt


@dataclass(frozen=True)
class Normal:
    mean: float
    std: float

    def kl(self, other: Normal) -> float:
        """KL(self | other) in nats."""
        ratio = (self.std / other.std) ** 2
        return (ratio - 1 - math.log(ratio) + ((self.mean - other.mean) / other.std) ** 2) / 2

    def near(self, other: Normal, within: float) -> bool:
        return abs(self.mean - other.mean) <= within and abs(self.std - other.std) <= within


PRIOR = Normal(0.0, 1.0)


@dataclass(frozen=True)
class Parabola:
    """r(x) = a x - k (x - c)^2 / 2."""

    a: float = 0.0
    k: float = 0.0
    c: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.a * x - self.k / 2 * (x - self.c).square()

    def __str__(self) -> str:
        off = f"(x - {self.c:g})" if self.c else "x"
        return " ".join([f"{self.a:g} x"] * bool(self.a) + [f"- {self.k:g} {off}^2 / 2"] * bool(self.k))

    def tilt(self, m: float) -> Normal:
        """p* at temperature 1 / m."""
        precision = 1 + m * self.k
        return Normal(m * (self.a + self.k * self.c) / precision, precision**-0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective with the blocks of its run, and what must hold of the law it reaches.

    `m` is the M its settings stand for. It must come `within` of `reaches` in mean and std, which is p* where nothing
    else is derived for it, or, where no fixed point is claimed, close the share `closes` of the prior's KL to p*.
    """

    name: str
    algorithm: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: Parabola
    m: float
    reaches: Normal | None = None
    within: float = 0.02
    closes: float | None = None
    regularise: Mapping[str, float] = field(default_factory=dict)
    sampler: Sampler = Sampler(steps=48, solver="dpm2")
    groups: int = 1
    size: int = 256  # of a group
    shared_noise: float = 0.0
    steps: int = 200
    lr: float = 0.02

    @property
    def exact(self) -> Normal:
        return self.reward.tilt(self.m)

    def holds(self, reached: Normal) -> bool:
        if self.closes is None:
            return reached.near(self.reaches or self.exact, self.within)
        return reached.kl(self.exact) <= (1 - self.closes) * PRIOR.kl(self.exact)

    @property
    def claim(self) -> str:
        if self.closes is not None:
            return f"KL <= {(1 - self.closes) * PRIOR.kl(self.exact):.3f}"
        return f"{f'{r.mean:.3f}, {r.std:.3f} ' if (r := self.reaches) else ''}+- {self.within:g}"


@dataclass(frozen=True)
class Result:
    case: Case
    reached: Normal
    rows: int  # evaluations of the network
    seconds: float

    @property
    def holds(self) -> bool:
        return self.case.holds(self.reached)

    @property
    def kl(self) -> float:
        return self.reached.kl(self.case.exact)


def run(case: Case, seed: int = 0) -> Result:
    """Train by Adam, its rate falling over the second half; the law is the mean of those of the last tenth."""
    s, begun = start(case, seed), perf_counter()
    network, o, rows, late = s.adapter.network, s.config.optimiser, [], []
    network.register_forward_hook(lambda module, args, v: rows.append(len(v)))
    for step in range(case.steps):
        s.config = replace(s.config, optimiser=replace(o, lr=o.lr * min(1.0, 2 * (1 - step / case.steps))))
        train_step(s, case.reward, step)
        if step >= int(0.9 * case.steps):
            late.append((network.mean.item(), network.log_std.exp().item()))
    reached = Normal(*torch.tensor(late, dtype=torch.float64).mean(0).tolist())
    return Result(case, reached, sum(rows), perf_counter() - begun)


def start(case: Case, seed: int) -> Session:
    """The session of a run on the Gaussian; latents and velocities are in float64."""
    config = Config(
        run="lab", seed=seed, steps=case.steps, model_name="gaussian", model=Gaussian(),
        data=Data(
            prompts="lab", prompts_per_step=case.groups, group_size=case.size, shared_noise=case.shared_noise
        ),
        sampler=case.sampler, rewards=(RewardSpec(name="lab"),), credit=Credit("centre", None),
        algorithm_name=case.algorithm, algorithm=ALGORITHMS[case.algorithm](**case.settings),
        regularise=dict(case.regularise), optimiser=Optimiser(case.lr, weight_decay=0.0, max_grad_norm=math.inf),
    )  # fmt: skip
    accelerator = make_accelerator(config)
    adapter = config.model.load(accelerator.device, torch.float64)
    policy = Policy(adapter, None, config.policy, seed, None)
    optimiser = torch.optim.AdamW(policy.parameters, case.lr, weight_decay=0.0)
    prompts, at_once = [Prompt(i, "") for i in range(case.groups)], replace(plan(config), rows_per_forward=1 << 30)
    bank: Any = SimpleNamespace(weights=(1.0,))  # of the one column that `train_step` fills
    return Session(config, accelerator, prompts, at_once, bank, [], bank, adapter, policy, optimiser)


def train_step(s: Session, reward: Parabola, step: int) -> None:
    """`flowrl.train.train_step`, but x0 itself is judged."""
    prompts, roots = ask(s, step)
    cond, sums = s.adapter.encode(prompts), Sums()
    rollout = act(s, cond, roots, step)
    rollout = credit(s, replace(rollout, rewards=reward(rollout.x0).float().cpu()), sums)
    learn(s, rollout, cond, step, sums)
