"""Seconds by stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by stage, as time/<stage>; a stage may be entered several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begun = now()
        yield
        self.seconds[f"time/{stage}"] = self.seconds.get(f"time/{stage}", 0.0) + now() - begun


def now() -> float:
    """Seconds, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
