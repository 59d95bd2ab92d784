"""The one integrator: chains, windows and trees are two vectors over the steps, eta (noise) and branch (children).

A step with eta = 0 follows the ODE. A step with eta > 0 is an edge of the rollout: each live state is kept, its
`branch` children are drawn from the kernel, stored, and scored as stored. The network runs once for each live state.
Shape letters: N root samples, M live states, T steps, *L one packed latent.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from flowrl import draws, flow
from flowrl.types import Cond, Edges, Rollout, Roots, States

Velocity = Callable[[Tensor, Tensor, Cond], Tensor]
Table = TypeVar("Table", States, Edges)


@dataclass(frozen=True)
class Window:
    """The steps that are stochastic: `size` of them from a start that moves from rollout to rollout.

    start: a step, or "random" (inside `within`; law "uniform" as Flow-GRPO-Fast, "geometric" with Pr[i] ~ 2^-i as
    TreeGRPO), or "sliding" (MixGRPO: `stride` steps on every `every` rollouts, back to the first after the last full
    window; with `fade` (l0, k) a window at l stays for
    ceil(every exp(-k max(0, l - l0))) rollouts).
    """

    size: int
    start: int | Literal["random", "sliding"] = 0
    law: Literal["uniform", "geometric"] = "uniform"
    within: tuple[int, int] | None = None  # the steps a window may cover, [first, end)
    every: int = 1
    stride: int = 1
    fade: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        for name in ("size", "every", "stride"):
            if vars(self)[name] < 1:
                raise ValueError(
                    f"sampler.window.{name} is {vars(self)[name]}: it must be at least 1; for all steps but the last "
                    "leave the window out"
                )

    def at(self, steps: int, seed: int, step: int) -> int:
        """The first stochastic step of rollout `step` on a grid of `steps` steps whose last one is never stochastic."""
        first, end = self.within or (0, steps - 1)
        places = end - first - self.size + 1
        if isinstance(self.start, int):
            return self.start
        if self.start == "sliding":
            late, k = self.fade or (0, 0.0)
            starts = range(first, first + places, self.stride)
            stay = [math.ceil(self.every * math.exp(-k * max(0, start - late))) for start in starts]
            return starts[bisect.bisect_right(list(itertools.accumulate(stay)), step % sum(stay))]
        odds = torch.ones(places) if self.law == "uniform" else 0.5 ** torch.arange(places)
        return first + int(odds.multinomial(1, generator=draws.generator(seed, step, draws.WINDOW)))


@dataclass(frozen=True)
class Sampler:
    """The block `sampler:` of a run. Without a window, all steps but the last are stochastic where eta > 0."""

    steps: int = 8
    kernel: flow.KernelName = "ode"
    eta: float = 0.0
    window: Window | None = None
    branch: int = 1
    solver: Literal["euler", "dpm2"] = "euler"
    store: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("branch", 1), ("eta", 0)):
            if vars(self)[name] < low:
                raise ValueError(f"sampler.{name} is {vars(self)[name]}: it must be at least {low}")
        if (self.kernel == "ode") != (self.eta == 0):
            raise ValueError(
                f"sampler.kernel is {self.kernel} with sampler.eta {self.eta:g}: the ode has eta 0, and a stochastic "
                "kernel needs eta > 0 (flow_sde: 0.7, dance: 0.3, cps: 0.8)"
            )
        if self.branch > 1 and not self.window:
            raise ValueError(f"sampler.branch is {self.branch}: a tree branches inside a window, so set sampler.window")
        if self.window:
            first, end = self.window.within or (0, self.steps - 1)
            start = self.window.start if isinstance(self.window.start, int) else first
            if self.eta == 0 or not 0 <= first <= start <= start + self.window.size <= end < self.steps:
                raise ValueError(
                    f"sampler.window covers {self.window.size} steps from {start}: it needs eta > 0 and steps inside "
                    f"[{first}, {min(end, self.steps - 1)}), since the last of {self.steps} steps is deterministic"
                )

    def plan(self, seed: int, step: int) -> tuple[list[float], list[int]]:
        """(eta, branch) of each step of one rollout."""
        eta, branch = [0.0] * self.steps, [1] * self.steps
        start = self.window.at(self.steps, seed, step) if self.window else 0
        for k in range(start, start + self.window.size if self.window else self.steps - 1):
            eta[k], branch[k] = self.eta, self.branch
        return eta, branch


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dpm2_step(x: Tensor, v: Tensor, t: float, t_next: float, last: tuple[Tensor, float] | None) -> Tensor:
    """DPM-Solver++(2M) (2211.01095, algorithm 2) on the rectified path; first order at t = 1 and at the last step.

        x' = (t'/t) x + (1 - t') (1 - e^-h) D,    D = x0_hat + (x0_hat - last x0_hat) h / (2 h_last)

    with h the step of log((1 - t) / t).

    `last` is (x0_hat, t) of the step before. At first order this is the Euler step of the flow.
    """
    if last is None or t_next == 0 or last[1] >= 1:
        return x + (t_next - t) * v
    now, past, ahead = (math.log((1 - s) / s) for s in (t, last[1], t_next))
    x0 = x - t * v
    estimate = x0 + (x0 - last[0]) * ((ahead - now) / (now - past) / 2)
    return (t_next / t) * x - (1 - t_next) * math.expm1(now - ahead) * estimate


@torch.no_grad()
def sample(
    velocity: Velocity, noise: Tensor, cond: Cond, roots: Roots, grid: Tensor, plan: tuple[list[float], list[int]],
    sampler: Sampler, key: tuple[int, int], *, keep_v: bool = False, version: int = 0,
) -> Rollout:  # fmt: skip
    """Integrate noise [N, *L] along grid [T + 1] under a plan; `key` is (seed, step), cond has N rows.

    Edges are in depth order. A sample's draws depend on its key, the step of the grid and its place in the tree alone.
    """
    dtype, device = DTYPES[sampler.store], noise.device
    x, root = noise, torch.arange(len(roots), device=device)
    tip, place = torch.full_like(root, -1), torch.zeros_like(root)
    none, times = noise.new_empty(0), grid.tolist()
    cap = times[1] if times[0] == 1 else 1.0
    states = [States(x[:0].to(dtype), none, none, none, root[:0], x[:0].to(dtype) if keep_v else None)]
    edges = [Edges(root[:0], root[:0], x[:0].to(dtype), none)]
    size, count, last = 0, 0, None
    for k, (eta, branch) in enumerate(zip(*plan, strict=True)):
        x = x.to(dtype).float() if eta else x  # the network sees a state as it is stored
        t, t_next, noisy = (x.new_full((len(x),), value) for value in (times[k], times[k + 1], eta))
        v = velocity(x, t, cond[root])
        if not eta:
            if sampler.solver == "dpm2":
                x, last = dpm2_step(x, v, times[k], times[k + 1], last), (flow.clean(x, v, t), times[k])
            else:
                x = flow.step("ode", x, v, t, t_next, noisy, cap)[0]
            continue
        mean, std = flow.step(sampler.kernel, x, v, t, t_next, noisy, cap)
        states.append(States(x.to(dtype), t, t_next, noisy, root, v.to(dtype) if keep_v else None))
        child = torch.arange(len(x), device=device).repeat_interleave(branch)
        place = place[child] * branch + torch.arange(len(child), device=device) % branch
        root, parent, mean, std = root[child], tip[child], mean[child], std[child]
        keys = [(*key, draws.EDGE, *who, k, p) for who, p in zip(roots.of(root), place.tolist(), strict=True)]
        z = draws.normal(x.shape[1:], keys).to(device)
        x_next = (mean + flow.like(std, mean) * z).to(dtype)
        x, last = x_next.float(), None
        edges.append(Edges(size + child, parent, x_next, flow.log_prob(sampler.kernel, x, mean, std)))
        tip = count + torch.arange(len(child), device=device)
        size, count = size + len(t), count + len(child)
    return Rollout(roots, x, root, tip, grid, sampler.kernel, _joined(states), _joined(edges), version)


def _joined(parts: list[Table]) -> Table:
    """One table from those of the stochastic steps."""
    columns = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
    joined: dict[str, Any] = {name: None if some[0] is None else torch.cat(some) for name, some in columns.items()}
    return type(parts[0])(**joined)
