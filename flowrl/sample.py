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

    start: a step, or "random" (inside `within`, by a `law`: uniform as Flow-GRPO-Fast, geometric as TreeGRPO), or
    "sliding" (MixGRPO: `stride` steps on every `every` rollouts, back to the first after the last full window; with
    `fade` (l0, k) a window at l stays for ceil(every exp(-k max(0, l - l0))) rollouts).
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

    def starts(self, steps: int) -> range:
        """Where the window may begin on a grid of `steps` steps, whose last one is never stochastic."""
        if isinstance(self.start, int):
            return range(self.start, self.start + 1)
        first, end = self.within or (0, steps - 1)
        return range(first, end - self.size + 1, self.stride if self.start == "sliding" else 1)

    def odds(self, places: int) -> Tensor:
        """[places] of each start of a random window; geometric: Pr[i] = (1 - r) r^i / (1 - r^places), r = 1/2."""
        odds = torch.ones(places) if self.law == "uniform" else 0.5 ** torch.arange(places)
        return odds / odds.sum()

    def at(self, steps: int, seed: int, step: int) -> int:
        """The first stochastic step of rollout `step`."""
        starts = self.starts(steps)
        if self.start == "sliding":
            late, k = self.fade or (0, 0.0)
            stay = [math.ceil(self.every * math.exp(-k * max(0, start - late))) for start in starts]
            return starts[bisect.bisect_right(list(itertools.accumulate(stay)), step % sum(stay))]
        rng = draws.generator(seed, step, draws.WINDOW)
        return starts[int(self.odds(len(starts)).multinomial(1, generator=rng))]


@dataclass(frozen=True)
class Sampler:
    """The block `sampler:` of a run. Without a window, all steps but the last are stochastic where eta > 0.

    `branch` children are drawn at each step of a window (TreeGRPO), or {step: children} at some of the stochastic steps
    and one elsewhere (BranchGRPO). Where there is more than one, their noise is `branch_noise` times the kernel's.
    """

    steps: int = 8
    kernel: flow.KernelName = "ode"
    eta: float = 0.0
    window: Window | None = None
    branch: int | dict[int, int] = 1
    branch_noise: float = 1.0
    solver: Literal["euler", "dpm2"] = "euler"
    store: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        children = [1, *self.branch.values()] if isinstance(self.branch, dict) else [self.branch]
        for name, values, low in (("steps", [self.steps], 1), ("branch", children, 1), ("eta", [self.eta], 0)):
            if min(values) < low:
                raise ValueError(f"sampler.{name} is {vars(self)[name]}: it must be at least {low}")
        if (self.kernel == "ode") != (self.eta == 0):
            raise ValueError(
                f"sampler.kernel is {self.kernel} with sampler.eta {self.eta:g}: the ode has eta 0, and a stochastic "
                "kernel needs eta > 0 (flow_sde: 0.7, dance: 0.3, cps: 0.8, edm_churn: 0.0025)"
            )
        if self.branch_noise <= 0 or self.branch_noise != 1 and max(children) == 1:
            raise ValueError(
                f"sampler.branch_noise is {self.branch_noise:g}: it is a positive factor of the noise where a tree "
                "branches, which needs sampler.branch"
            )
        if isinstance(self.branch, int) and self.branch > 1 and not self.window:
            raise ValueError(f"sampler.branch is {self.branch}: a tree branches inside a window, so set sampler.window")
        if self.window:
            first, end = self.window.within or (0, self.steps - 1)
            start = self.window.start if isinstance(self.window.start, int) else first
            if self.eta == 0 or not 0 <= first <= start <= start + self.window.size <= end < self.steps:
                raise ValueError(
                    f"sampler.window covers {self.window.size} steps from {start}: it needs eta > 0 and steps inside "
                    f"[{first}, {min(end, self.steps - 1)}), since the last of {self.steps} steps is deterministic"
                )
        always = self._always_stochastic()
        for step in self.branch if isinstance(self.branch, dict) else ():
            if step not in always:
                raise ValueError(
                    f"sampler.branch is {self.branch}: tree branching at an ODE step, since step {step} is not "
                    f"stochastic in every rollout; branch at steps in [{always.start}, {always.stop})"
                )

    def _always_stochastic(self) -> range:
        """The steps that are stochastic in every rollout."""
        if self.window:
            starts = self.window.starts(self.steps)
            return range(starts[-1], starts[0] + self.window.size)
        return range(self.steps - 1 if self.eta else 0)

    @property
    def leaves(self) -> int:
        """How many samples grow from one root."""
        return math.prod(self.plan(0, 0)[1])

    def plan(self, seed: int, step: int) -> tuple[list[float], list[int]]:
        """(eta, branch) of each step of one rollout."""
        eta, branch = [0.0] * self.steps, [1] * self.steps
        start = self.window.at(self.steps, seed, step) if self.window else 0
        for k in range(start, start + self.window.size if self.window else self.steps - 1):
            eta[k], branch[k] = self.eta, self.branch.get(k, 1) if isinstance(self.branch, dict) else self.branch
        return eta, branch


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def sample(
    velocity: Velocity, noise: Tensor, cond: Cond, roots: Roots, grid: Tensor, plan: tuple[list[float], list[int]],
    sampler: Sampler, key: tuple[int, int], *, keep_v: bool = False, version: int = 0, vp: bool = False,
) -> Rollout:  # fmt: skip
    """Integrate noise [N, *L] along grid [T + 1] under a plan; `key` is (seed, step), cond has N rows.

    Edges are in depth order. A sample's draws depend on its key, the step of the grid and its place in the tree alone.
    With `vp` the noise and x0 are latents of a variance-preserving model, which states are once scaled.
    """
    dtype, device = DTYPES[sampler.store], noise.device
    first, end = flow.vp_scale(grid.double()[[0, -1]]).tolist() if vp else (1, 1)
    x, root = noise * first, torch.arange(len(roots), device=device)
    tip, place = torch.full_like(root, -1), torch.zeros_like(root)
    none, times = noise.new_empty(0), grid.tolist()
    cap = times[1] if times[0] == 1 else 1.0
    states = [States(x[:0].to(dtype), none, none, none, none, root[:0], x[:0].to(dtype) if keep_v else None)]
    edges = [Edges(root[:0], root[:0], x[:0].to(dtype), none)]
    size, count, last = 0, 0, None
    for k, (eta, branch) in enumerate(zip(*plan, strict=True)):
        x = x.to(dtype).float() if eta else x  # the network sees a state as it is stored
        how = times[k], times[k + 1], eta, sampler.branch_noise if branch > 1 else 1.0
        t, t_next, noisy, spread = (x.new_full((len(x),), value) for value in how)
        v = velocity(x, t, cond[root])
        if not eta:
            if sampler.solver == "dpm2":
                x, last = flow.dpm2_step(x, v, times[k], times[k + 1], last), (flow.clean(x, v, t), times[k])
            else:
                x = flow.step("ode", x, v, t, t_next, noisy, cap)[0]
            continue
        states.append(States(x.to(dtype), t, t_next, noisy, spread, root, v.to(dtype) if keep_v else None))
        child = torch.arange(len(x), device=device).repeat_interleave(branch)
        place = place[child] * branch + torch.arange(len(child), device=device) % branch
        root, parent = root[child], tip[child]
        keys = [(*key, draws.EDGE, *who, k, p) for who, p in zip(roots.of(root), place.tolist(), strict=True)]
        z = draws.normal(x.shape[1:], keys).to(device)
        x_next, logp = flow.draw(sampler.kernel, x, v, t, t_next, noisy, cap, spread, child, z, dtype)
        x, last = x_next.float(), None
        edges.append(Edges(size + child, parent, x_next, logp))
        tip = count + torch.arange(len(child), device=device)
        size, count = size + len(t), count + len(child)
    return Rollout(roots, x / end, root, tip, grid, sampler.kernel, _joined(states), _joined(edges), version)


def _joined(parts: list[Table]) -> Table:
    """One table from those of the stochastic steps."""
    columns = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
    joined: dict[str, Any] = {name: None if some[0] is None else torch.cat(some) for name, some in columns.items()}
    return type(parts[0])(**joined)
