"""The data that flows: prompts become conditions, conditions become rollouts, rollouts become points.

Shapes: N samples, S states, E edges, R reward columns, P prompts, B rows of a batch, *L one packed latent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LATER = torch.empty(0)  # a field that a later stage fills


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file. `id` is its row number, so two rows with equal text stay two prompts."""

    id: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""  # the file's own id of the row, "" where it gives none


@dataclass(frozen=True)
class LatentSpec:
    """Shape *L of one packed latent."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Cond:
    """What the network is conditioned on: `inputs` [P, ...] stored once per prompt, read through `rows` [B]."""

    inputs: Mapping[str, Tensor]
    rows: Tensor
    guidance: float = 1.0
    version: int | None = None  # of the weights that read it, None where they may change unnoticed

    def __getitem__(self, index: Tensor | slice) -> Cond:
        return replace(self, rows=self.rows[index])

    def __len__(self) -> int:
        return self.rows.shape[0]

    def gather(self, name: str) -> Tensor:
        """[B, ...], the rows of one input; an input of a single row (a negative prompt) is expanded."""
        value = self.inputs[name]
        return value.expand(len(self), *value.shape[1:]) if value.shape[0] == 1 else value[self.rows]


@dataclass(frozen=True)
class Roots:
    """Who the samples of a step are. A sample's key steers all of its noise."""

    prompt: Tensor  # [N] row of the step's prompt table
    prompt_id: Tensor  # [N]
    index: Tensor  # [N] which sample of its prompt
    group: Tensor  # [N] integer group id

    def __len__(self) -> int:
        return self.prompt.shape[0]

    def of(self, root: Tensor) -> list[tuple[int, int]]:
        """The key (prompt id, sample index) of each root [B]."""
        return list(zip(self.prompt_id[root].tolist(), self.index[root].tolist(), strict=True))


@dataclass(frozen=True)
class States:
    """Distinct states from which a stochastic step was taken; all edges that leave one share how they were drawn."""

    x: Tensor  # [S, *L], storage dtype
    t: Tensor  # [S]
    t_next: Tensor  # [S]
    eta: Tensor  # [S]
    spread: Tensor  # [S] what the kernel's std is multiplied by
    root: Tensor  # [S] the root sample a state grew from
    v: Tensor | None  # [S, *L], the velocity of the rollout, kept where the objective asks


@dataclass(frozen=True)
class Edges:
    """Stochastic transitions. A chain is a tree in which every state has one edge."""

    state: Tensor  # [E] the state an edge leaves
    parent: Tensor  # [E] the edge above, -1 at a root
    x_next: Tensor  # [E, *L], rounded to the storage dtype before its log-prob was taken
    logp: Tensor  # [E], mean over the latent's elements
    adv: Tensor = LATER  # [E]
    weight: Tensor = LATER  # [E]


@dataclass(frozen=True)
class Rollout:
    """What acting produced, one more field after each stage (judge: rewards; credit: adv and weight)."""

    roots: Roots
    x0: Tensor  # [N, *L]
    root: Tensor  # [N] the root sample a leaf grew from; arange(N) unless a tree branched
    leaf: Tensor  # [N] the edge a sample ends in, -1 where no step was stochastic
    grid: Tensor  # [T + 1] times, 1 -> 0
    kernel: str
    states: States
    edges: Edges
    version: int  # of the weights that acted
    rewards: Tensor = LATER  # [N, R], NaN = no verdict
    adv: Tensor = LATER  # [N]
    weight: Tensor = LATER  # [N], 0 = no verdict

    @property
    def prompt(self) -> Tensor:
        return self.roots.prompt[self.root]

    @property
    def group(self) -> Tensor:
        return self.roots.group[self.root]


@dataclass
class Point:
    """Where an objective looks: rows (x, t, cond), and the items it charges there.

    An item reads one row: forward points have one item a row, rollout points one an edge, so that a state's children
    share its forward. Once bound to a policy, a version of the weights runs once on it, and once more for a survey.
    """

    x: Tensor  # [B, *L]
    t: Tensor  # [B]
    cond: Cond
    item: Tensor  # [I] the row an item reads, ascending
    adv: Tensor  # [I]
    weight: Tensor  # [I], 0 where there was no verdict
    items: Mapping[str, Tensor]  # [I, ...] forward points: x0, eps, sample, block; rollout points: x_next, logp, block
    step: Mapping[str, Tensor] = field(default_factory=dict)  # [B, ...] rollout points: t_next, eta, spread (and v)
    kernel: str = "ode"
    cap: float = 1.0
    unit: int = 1  # rows that no micro-batch may part
    fresh: bool = False  # the current weights are those that made the rollout
    bind: Callable[[Point], Point] | None = None
    read: Callable[[str], Tensor] | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def v(self) -> Tensor:
        """[B, *L] the current velocity, with gradient."""
        return self._read("current")

    @property
    def v_old(self) -> Tensor:
        """[B, *L] the velocity under the weights of the behaviour policy."""
        return self._read("old")

    @property
    def v_ref(self) -> Tensor:
        """[B, *L] the velocity of the frozen base."""
        return self._read("ref")

    @property
    def how(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
        """(t, t_next, eta, cap, spread): how the rows of a rollout point were left, as `flow.step` takes it."""
        return self.t, self.step["t_next"], self.step["eta"], self.cap, self.step["spread"]

    def at(self, x: Tensor, t: Tensor, guidance: float | None = None) -> Point:
        """The same rows elsewhere: at x [B, *L], t [B], or under another guidance."""
        assert self.bind is not None, "a point is bound to a policy before its velocities are read"
        cond = self.cond if guidance is None else replace(self.cond, guidance=guidance)
        return self.bind(replace(self, x=x, t=t, cond=cond, step={}))

    def _read(self, slot: str) -> Tensor:
        assert self.read is not None, "a point is bound to a policy before its velocities are read"
        return self.read(slot)

    def row_weight(self) -> Tensor:
        """[B] the weight of a row in a regulariser: 1 if any of its items has a verdict, else 0."""
        return torch.zeros_like(self.t).scatter_reduce(0, self.item, (self.weight > 0).to(self.t.dtype), "amax")

    def at_once(self, rows: int) -> int:
        """Rows of whole units within `rows`; one unit at least."""
        return max(self.unit, rows - rows % self.unit)

    def parts(self, rows: int) -> list[Point]:
        """In micro-batches of at most `rows` rows."""
        step = self.at_once(rows)
        return [self.rows(n, min(n + step, len(self))) for n in range(0, len(self), step)]

    def rows(self, start: int, stop: int) -> Point:
        """The rows [start, stop) with their items."""
        first, last = torch.searchsorted(self.item, torch.tensor([start, stop], device=self.item.device)).tolist()
        items, rows = slice(first, last), slice(start, stop)
        return replace(
            self, x=self.x[rows], t=self.t[rows], cond=self.cond[rows], item=self.item[items] - start,
            adv=self.adv[items], weight=self.weight[items], items={k: x[items] for k, x in self.items.items()},
            step={k: x[rows] for k, x in self.step.items()},
        )  # fmt: skip
