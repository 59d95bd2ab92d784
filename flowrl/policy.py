"""One network, four readings of its weights: current (trained), old (acts), ref (the base), average (evaluated).

A slot is a snapshot of the trainable tensors, swapped in by pointer. With LoRA the reference is the snapshot in which
B = 0, with full fine-tuning the base weights; either way it is the start. Every content of a slot has a version, and
slots of equal version are never evaluated twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.models.base import Adapter
from flowrl.types import Cond, Point

Slot = Literal["current", "old", "ref", "average"]


@dataclass(frozen=True)
class LoRA:
    """The block `model.lora`; `targets` null takes the adapter's."""

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ValueError(f"rank is {self.rank} and alpha {self.alpha}: both must be at least 1")


@dataclass(frozen=True)
class Decay:
    """What a slot keeps of itself when it moves towards the current weights: min(cap, rate (k - flat)), at least 0.

    k counts optimiser steps or, by `clock`, rollouts. Rate 0 keeps nothing: the slot is a copy of what acted.
    """

    rate: float = 0.0
    cap: float = 0.0
    flat: int = 0
    clock: Literal["update", "rollout"] = "update"

    def __post_init__(self) -> None:
        if self.rate < 0 or not 0 <= self.cap < 1 or bool(self.rate) != bool(self.cap):
            raise ValueError(
                f"rate is {self.rate:g} and cap {self.cap:g}: rate is at least 0, cap in [0, 1), and both are above 0 "
                "or neither is"
            )

    def kept(self, k: int) -> float:
        """The share of itself that the slot keeps at clock k."""
        return max(0.0, min(self.cap, self.rate * (k - self.flat)))


@dataclass(frozen=True)
class Averaging:
    """Average of the weights over updates, keeping min((1 + k) / (10 + k), decay) at update k."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay:g}: it must lie in [0, 1)")


@dataclass(frozen=True)
class Slots:
    """The block `policy:` of a run."""

    old: Decay = Decay()
    average: Averaging = Averaging()


class Policy:
    def __init__(
        self, adapter: Adapter, lora: LoRA | None, slots: Slots, seed: int, autocast: torch.dtype | None
    ) -> None:
        self.adapter, self.slots, self.autocast = adapter, slots, autocast
        adapter.network.requires_grad_(lora is None)
        if lora:
            self._add_lora(lora, seed)
        self.names, self.parameters = zip(*((n, p) for n, p in adapter.network.named_parameters() if p.requires_grad),
                                          strict=True)  # fmt: skip
        for p in self.parameters:
            p.data = p.data.float()  # masters are float32
        self.snapshots = {slot: [p.detach().clone() for p in self.parameters] for slot in ("old", "ref", "average")}
        self.versions: dict[str, int] = {"current": 0, "old": 0, "ref": 0, "average": 0}
        self.updates = self.rollouts = self._clock = 0
        self._in_place: Slot = "current"

    def _add_lora(self, lora: LoRA, seed: int) -> None:
        from peft import LoraConfig

        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, init_lora_weights="gaussian",
            target_modules=list(lora.targets or self.adapter.lora_targets),
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.adapter.network.add_adapter(config)

    @contextmanager
    def reading(self, slot: Slot) -> Iterator[None]:
        """The network under the weights of a slot; the current ones are back afterwards, whatever happens."""
        if self.versions[slot] == self.versions["current"]:
            yield
            return
        self._swap(slot)
        try:
            yield
        finally:
            self._swap(slot)

    def _swap(self, slot: Slot) -> None:
        mine = self.snapshots[slot]
        for i, p in enumerate(self.parameters):
            p.data, mine[i] = mine[i], p.data
        self._in_place = slot if self._in_place == "current" else "current"

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """[B, *L] under the weights in place, in the run's precision."""
        with torch.autocast(x.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return self.adapter.velocity(x, t, replace(cond, version=self.versions[self._in_place]))

    def bound(self, p: Point, acted: int) -> Point:
        """The point with its velocities: each version of the weights runs at most once on it, gradient or none.

        `acted` is the version that made the rollout, whose velocity a rollout point may bring along as step["v"].
        """
        seen: dict[int, Tensor] = {acted: p.step["v"]} if "v" in p.step else {}
        live: list[Tensor] = []

        def read(slot: Slot) -> Tensor:
            version = self.versions[slot]
            current = version == self.versions["current"]
            if slot != "current" and version in seen:
                return seen[version]
            if current and not live and torch.is_grad_enabled():
                live.append(self.velocity(p.x, p.t, p.cond))
            if current and live:
                return live[0] if slot == "current" else live[0].detach()
            if version not in seen:
                with torch.no_grad(), self.reading(slot):
                    seen[version] = self.velocity(p.x, p.t, p.cond)
            return seen[version]

        fresh = acted == self.versions["current"]
        return replace(p, read=read, fresh=fresh, bind=lambda elsewhere: self.bound(elsewhere, acted))

    def stepped(self) -> None:
        """The optimiser moved the current weights: a new version, and the average follows."""
        self.updates += 1
        self._new_version("current")
        decay = self.slots.average.decay
        self._towards_current("average", min((1 + self.updates) / (10 + self.updates), decay))

    def acted(self) -> None:
        """A rollout has been learnt from: the old policy follows the current one."""
        self.rollouts += 1
        old = self.slots.old
        self._towards_current("old", old.kept(self.updates if old.clock == "update" else self.rollouts))

    def _towards_current(self, slot: Slot, kept: float) -> None:
        if self.versions[slot] == self.versions["current"]:
            return
        live = [p.detach() for p in self.parameters]
        if kept:
            torch._foreach_lerp_(self.snapshots[slot], live, 1 - kept)
            self._new_version(slot)
        else:
            torch._foreach_copy_(self.snapshots[slot], live)
            self.versions[slot] = self.versions["current"]

    def _new_version(self, slot: Slot) -> None:
        self.versions[slot] = self._clock = self._clock + 1

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict]:
        """Tensors by slot and name, and the counters, for a checkpoint."""
        live = {"current": [p.detach() for p in self.parameters], **self.snapshots}
        tensors = {slot: dict(zip(self.names, values, strict=True)) for slot, values in live.items()}
        counters = {"versions": self.versions, "updates": self.updates, "rollouts": self.rollouts, "clock": self._clock}
        return tensors, counters

    def load_state(self, tensors: dict[str, dict[str, Tensor]], counters: dict) -> None:
        live = {"current": [p.data for p in self.parameters], **self.snapshots}
        for slot, values in live.items():
            if set(tensors[slot]) != set(self.names):
                odd = sorted(set(tensors[slot]) ^ set(self.names))
                raise ValueError(
                    f"the checkpoint's {slot} weights and the model differ in {len(odd)} tensors ({odd[0]})"
                )
            torch._foreach_copy_(values, [tensors[slot][name] for name in self.names])
        self.versions = dict(counters["versions"])
        self.updates, self.rollouts, self._clock = counters["updates"], counters["rollouts"], counters["clock"]
