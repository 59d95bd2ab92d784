"""Where the time of a training step goes: the network's share is timed in place, by hooks on the network itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from flowrl.clock import Clock, now
from flowrl.config import Config
from flowrl.session import Session, start
from flowrl.train import train_step


@dataclass
class Tally:
    """One stage: its seconds, those inside the network, and the network's calls."""

    wall_s: float = 0.0
    network_s: float = 0.0
    forwards: int = 0
    rows: int = 0
    backwards: int = 0


class Meter(Clock):
    """A clock that tallies the stages of a step; forwards count by hooks, backwards around the accelerator's."""

    def __init__(self, s: Session) -> None:
        super().__init__()
        self.s, self.tallies, self._begun = s, dict[str, Tally](), 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are in place inside, and gone afterwards."""
        network, accelerator = self.s.accelerator.unwrap_model(self.s.adapter.network), self.s.accelerator
        backward = accelerator.backward

        def timed(loss: Tensor, **options: Any) -> None:
            begun = now()
            backward(loss, **options)
            self.tally.network_s += now() - begun
            self.tally.backwards += 1

        hooks = network.register_forward_pre_hook(self._enter), network.register_forward_hook(self._leave)
        accelerator.backward = timed
        try:
            yield
        finally:
            accelerator.backward = backward
            for hook in hooks:
                hook.remove()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.tally = self.tallies.setdefault(stage, Tally())
        with super().__call__(stage):
            yield
        self.tally.wall_s = self.seconds[f"time/{stage}"]

    def _enter(self, *_: Any) -> None:
        self._begun = now()

    def _leave(self, network: Any, args: Any, output: Any) -> None:
        self.tally.network_s += now() - self._begun
        self.tally.forwards += 1
        self.tally.rows += len(output[0])


def staged_step(s: Session, step: int) -> dict[str, Tally]:
    """The stages of a training step, tallied one by one."""
    meter = Meter(s)
    with meter.attached():
        train_step(s, step, meter)
    return meter.tallies


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Medians over `steps` steps after one for warming up, at the config's own batch sizes; times in seconds.

        overhead = wall / network,    network of learn = forwards + backwards

    `step` is a whole step without decoding, rewards, evaluation and checkpoints.
    """
    if config.data.pairs:
        raise ValueError(f"data.pairs = {config.data.pairs}: the bench times sampling, too; give it data.prompts")
    s = start(config)
    seen = [staged_step(s, step) for step in range(steps + 1)][1:]
    act, learn = ([stages[name] for stages in seen] for name in ("act", "learn"))
    walls = [sum(tally.wall_s for name, tally in stages.items() if name != "judge") for stages in seen]
    networks = [stages["act"].network_s + stages["learn"].network_s for stages in seen]
    return {
        "act": _medians(act),
        "learn": {**_medians(learn), "backwards": median(tally.backwards for tally in learn)},
        "step": {
            "wall_s": median(walls),
            "overhead": median(wall / network for wall, network in zip(walls, networks, strict=True)),
        },
        "media_s": median(stages["judge"].wall_s for stages in seen),
    }


def _medians(tallies: list[Tally]) -> dict[str, float]:
    return {
        "wall_s": median(tally.wall_s for tally in tallies),
        "forwards": median(tally.forwards for tally in tallies),
        "network_s": median(tally.network_s for tally in tallies),
        "overhead": median(tally.wall_s / tally.network_s for tally in tallies),
    }


def table(result: dict[str, Any]) -> str:
    """A measurement to read, one line a stage."""
    lines = [f"{'':8}{'wall s':>10}{'network s':>12}{'overhead':>11}{'forwards':>11}{'backwards':>11}"]
    for name in ("act", "learn"):
        row = result[name]
        lines.append(
            f"{name:8}{row['wall_s']:10.3f}{row['network_s']:12.3f}{row['overhead']:11.3f}"
            f"{row['forwards']:11g}{row.get('backwards', 0):11g}"
        )
    lines.append(f"{'step':8}{result['step']['wall_s']:10.3f}{'':12}{result['step']['overhead']:11.3f}")
    lines.append(f"{'media':8}{result['media_s']:10.3f}   decoding and rewards, in no other line")
    return "\n".join(lines)
