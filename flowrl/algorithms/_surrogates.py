"""Surrogates of the policy gradient: what a stored decision with advantage A is charged at ratio rho.

each is a frozen dataclass, called with (log-ratio [I], A [I]) -> loss [I]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PPO:
    """max(-A rho, -A clip(rho, 1 - c, 1 + c)) (1707.06347); c is in the units of the log-ratio, so of the mean."""

    clip: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.clip < 1:
            raise ValueError(f"algorithm.surrogate.clip is {self.clip}: it must lie between 0 and 1")

    def __call__(self, log_ratio: Tensor, adv: Tensor) -> Tensor:
        rho = log_ratio.exp()
        return torch.maximum(-adv * rho, -adv * rho.clamp(1 - self.clip, 1 + self.clip))
