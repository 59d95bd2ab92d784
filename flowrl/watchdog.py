"""How far what is not optimised has drifted from the base, and when that ends a run.

    d = (mean over the pictures of a step - mean of the base) / standard deviation of the base's pictures
    watch/<probe> = mean of d over the last `patience` watched steps

The velocity's norm has no spread in the base: its ratio to the base's is 1 there, and V_NORM is its unit. A reward of
weight 0 is a probe that may rise, and that alarms where it falls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import PositiveFloat, PositiveInt

Probe = Literal["sharpness", "colour_entropy", "saturation", "brightness", "diversity", "v_norm"]
PROMPTS = 32  # whose pictures the base is measured by
V_NORM = 0.05
FLAT = 1e-6  # of the mean: what rounding leaves of the standard deviation of equal values
REWARD = "reward/"


class Tripped(Exception):
    """The watch ended the run, as its config asks."""


@dataclass(frozen=True)
class Watch:
    """The block `watch:` of a run, null for none. Rewards of weight 0 are watched whatever `probes` says."""

    probes: Literal["default"] | tuple[Probe, ...] = "default"  # default: all
    action: Literal["warn", "stop", "rollback"] = "warn"
    bound: PositiveFloat = 2.0  # of |watch/<probe>|
    patience: PositiveInt = 5  # watched steps that a drift is the mean of
    every: PositiveInt = 1  # steps

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def objections(self, steps: int, pairs: str | None) -> Iterator[str]:
        """Why a run of so many steps, on `data.pairs` or not, cannot be watched."""
        if pairs and self != Watch():
            yield "watch is given, but with data.pairs no picture is made; remove the block"
        if self.every > steps:
            yield f"watch.every = {self.every}: a run of steps = {steps} is never watched; lower it, or take watch=null"

    def reference(self, steps: int, prompts_per_step: int) -> list[int]:
        """The steps of a run whose rollouts, made by the base, it is measured by: the first that are watched."""
        return [step for step in range(steps) if self.due(step)][: -(-PROMPTS // prompts_per_step)]


def base(measured: Mapping[str, float], watching: Iterable[str]) -> dict[str, Sequence[float]]:
    """{probe: (mean, standard deviation)} from the metrics of the base's rollouts; `watching`: rewards of weight 0."""
    found: dict[str, Sequence[float]] = {}
    for name in (*get_args(Probe), *(f"{REWARD}{reward}" for reward in watching)):
        stem = metric(name).removesuffix("/mean")
        if f"{stem}/std" in measured:
            found[name] = (measured[f"{stem}/mean"], measured[f"{stem}/std"])
    return {**found, "v_norm": (1.0, V_NORM)}


def metric(name: str) -> str:
    """The metric whose drift is watch/<name>."""
    if name == "v_norm":
        return "train/v_norm_ratio"
    return f"{name}/mean" if name.startswith(REWARD) else f"probe/{name}/mean"


class Watchdog:
    """What the watched steps of a run have shown: the drifts d of the `recent` ones, against its `base`.

    `flat` are the probes that are the same in all pictures of the base, so that their drift has no unit.
    """

    def __init__(self, watch: Watch, base: Mapping[str, Sequence[float]], recent: Iterable[dict[str, float]] = ()):
        self.watch, self.base = watch, base
        self.recent = deque(recent, maxlen=watch.patience)
        left_out = set() if watch.probes == "default" else {*get_args(Probe)} - {*watch.probes}
        self.flat = [name for name in base if name not in left_out and base[name][1] <= FLAT * abs(base[name][0])]
        self.watched = [name for name in base if name not in left_out and name not in self.flat]
        self._told: set[str] = set()

    @property
    def state(self) -> dict[str, Any]:
        """What a Watchdog that goes on from here is made of."""
        return {"base": self.base, "recent": list(self.recent)}

    def see(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """{watch/<probe>: drift} after a step with the metrics `row`; nothing where the step is not watched."""
        if not self.watch.due(step):
            return {}
        seen = {}
        for name in self.watched:
            if metric(name) in row:
                mean, std = self.base[name]
                seen[name] = (row[metric(name)] - mean) / std
        self.recent.append(seen)
        return {f"watch/{name}": value for name, value in self.drifts.items()}

    @property
    def drifts(self) -> dict[str, float]:
        """The means over the window of what its last step has."""
        last = self.recent[-1] if self.recent else {}
        windows = {name: [seen[name] for seen in self.recent if name in seen] for name in last}
        return {name: sum(values) / len(values) for name, values in windows.items()}

    @property
    def beyond(self) -> dict[str, float]:
        """The drifts that are beyond the bound, once a whole window is seen."""
        if len(self.recent) < self.watch.patience:
            return {}
        return {name: d for name, d in self.drifts.items() if harm(name, d) > self.watch.bound}

    @property
    def trips(self) -> bool:
        """Whether the run ends here."""
        return bool(self.beyond) and self.watch.action != "warn"

    @property
    def quiet(self) -> bool:
        """Whether all is within half the bound, in the window and in its last step: no drift has begun."""
        drifts = [*self.drifts.items(), *(self.recent[-1].items() if self.recent else ())]
        return all(harm(name, d) <= self.watch.bound / 2 for name, d in drifts)

    def news(self) -> list[str]:
        """A warning for each probe that is beyond the bound for the first time, where the run goes on."""
        new = {name: d for name, d in self.beyond.items() if name not in self._told and not self.trips}
        self._told.update(new)
        return [self._sentence(name, d) for name, d in new.items()]

    @property
    def verdict(self) -> str:
        """Why the run ends."""
        return "; ".join(self._sentence(name, d) for name, d in self.beyond.items())

    def _sentence(self, name: str, d: float) -> str:
        unit = f"times {V_NORM:g}" if name == "v_norm" else "standard deviations"
        side = "above" if d > 0 else "below"
        return (
            f"{name} is {abs(d):.1f} {unit} {side} the base's (watch.bound = {self.watch.bound:g}, "
            f"{self.watch.patience} steps): the reward may be hacked"
        )


def harm(name: str, drift: float) -> float:
    """What is held against the bound: a rise of an untrained reward is none."""
    return -drift if name.startswith(REWARD) else abs(drift)
