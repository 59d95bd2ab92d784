"""What shared text saves in a whole training step, against the stock processors, in one run.

    stock      text padded, repeated for each sample and projected there, as the stock pipeline does
    trimmed    the same without the positions that are padding in every prompt of a step
    shared     trimmed, stored and projected once a prompt

The variants take turns, step by step. `ceiling` is the ratio of the FLOP of their matrix products: what a network that
did nothing else would gain. Norms and copies of repeated text are not in it, so a time may beat it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from flowrl.bench.step import Tally, staged_step
from flowrl.clock import Clock
from flowrl.config import Config, resolve
from flowrl.session import Session, start
from flowrl.train import train_step

VARIANTS = {"stock": (False, False), "trimmed": (False, True), "shared": (True, True)}
STAGES = ("act", "learn")
aten = torch.ops.aten


def attention_flop(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def attention_backward_flop(g: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_backward_flop_count(g, q, k, v)


UNCOUNTED = {  # that torch's counter does not know
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flop,
}


class FlopClock(Clock):
    """FLOP of each stage in the place of its seconds."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter, self.flop = counter, dict[str, int]()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before = self.counter.get_total_flops()
        with super().__call__(stage):
            yield
        self.flop[stage] = self.flop.get(stage, 0) + self.counter.get_total_flops() - before


def flop(s: Session, step: int) -> dict[str, int]:
    """FLOP of the matrix products of one training step, by stage."""
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        clock = FlopClock(counter)
        train_step(s, step, clock)
    return {stage: clock.flop[stage] for stage in STAGES}


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Median seconds and FLOP of each variant's stages, and their ratios to the stock one's."""
    sessions = {name: start(variant(config, *how)) for name, how in VARIANTS.items()}
    counted = {name: flop(s, 0) for name, s in sessions.items()}  # which warms up, too
    seen: dict[str, list[dict[str, Tally]]] = {name: [] for name in sessions}
    for step in range(1, steps + 1):
        for name, s in sessions.items():
            seen[name].append(staged_step(s, step))
    results = {}
    for name in sessions:
        seconds = {stage: median(tallies[stage].wall_s for tallies in seen[name]) for stage in STAGES}
        results[name] = {
            **{stage: {"wall_s": seconds[stage], "flop": counted[name][stage]} for stage in STAGES},
            "step": {"wall_s": sum(seconds.values()), "flop": sum(counted[name].values())},
        }
    for row in results.values():
        for stage, value in row.items():
            value["speedup"] = results["stock"][stage]["wall_s"] / value["wall_s"]
            value["ceiling"] = results["stock"][stage]["flop"] / value["flop"]
    return results


def variant(config: Config, share: bool, trim: bool) -> Config:
    raw = config.dump()
    return resolve({**raw, "model": {**raw["model"], "share_context": share, "trim_padding": trim}})


def table(results: dict[str, Any]) -> str:
    """A measurement to read, one line a variant and stage."""
    lines = [f"{'':9}{'':7}{'wall s':>9}{'speedup':>9}{'GFLOP':>9}{'ceiling':>9}"]
    for name, stages in results.items():
        for stage, row in stages.items():
            lines.append(
                f"{name:9}{stage:7}{row['wall_s']:9.3f}{row['speedup']:8.2f}x{row['flop'] / 1e9:9.0f}"
                f"{row['ceiling']:8.2f}x"
            )
    return "\n".join(lines)
