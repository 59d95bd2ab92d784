"""Flow-GRPO (2505.05470): policy gradient over the stochastic steps of the sampler, with a clipped ratio.

    rho = exp(s (log p(x' | x) - log p_old(x' | x))),    L = max(-A rho, -A clip(rho, 1 - c, 1 + c))

Log-probs are means over the latent's elements, and so is c; s is `logp_scale`, which gives nats where it is the number
of elements. L is the default of the surrogates in _surrogates.py and _surveyed.py. Flow-GRPO-Fast, MixGRPO, DanceGRPO,
Flow-CPS and trees are settings of the sampler. GRPO-Guard (2510.22319) centres the log-ratio and evens out the steps:

    rho = exp(b (log p - log p_old + mean_D (m - m_old)^2 / 2 b^2)),    L / |dt|,    b = std of the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl import flow
from flowrl.algorithms._points import ReverseProcess, replay
from flowrl.algorithms._surrogates import PPO, Chosen
from flowrl.algorithms._surveyed import LPO
from flowrl.types import LATER, Point


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(ReverseProcess):
    surrogate: Chosen = field(default_factory=PPO)
    logp_scale: float = 1.0
    guard: bool = False

    @property
    def keep_v(self) -> bool:  # type: ignore[override]
        return self.guard

    @property
    def surveys(self) -> bool:  # type: ignore[override]
        return self.surrogate.surveys

    def survey(self, p: Point) -> Tensor:
        return torch.zeros_like(p.adv) if p.fresh else self.log_ratio(p)

    def settle(self, found: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        return self.surrogate.settle(found, p, total)

    def loss(self, p: Point) -> Tensor:
        charged = self.surrogate(self.log_ratio(p), p.adv, p.items.get("settled", LATER))
        return charged / (p.t - p.step["t_next"])[p.item] if self.guard else charged

    def log_ratio(self, p: Point) -> Tensor:
        """[I] the scaled log-ratio of the stored edges; exactly 0 before the first update."""
        moved = replay(p, p.v) - p.items["logp"]
        if not self.guard:
            return self.logp_scale * moved
        (mean, std), (mean_old, _) = (flow.step(p.kernel, p.x, v, *p.how) for v in (p.v, p.v_old))
        drift = flow.mean_sq(mean - mean_old) / (2 * std.square())
        return self.logp_scale * std[p.item] * (moved + drift[p.item])

    def objections(self, config: Any) -> Iterator[str]:
        yield from super().objections(config)
        if self.guard and config.sampler.kernel != "flow_sde":
            yield (
                f"algorithm.guard = true with sampler.kernel = {config.sampler.kernel}: the guard is worked out for "
                "flow_sde; take sampler.kernel=flow_sde sampler.eta=0.7 or algorithm.guard=false"
            )
        updates, lonely = config.optimiser.updates, 1 < config.data.group_size == config.optimiser.updates
        if isinstance(self.surrogate, LPO) and lonely and config.sampler.branch == 1:
            yield (
                f"optimiser.updates = {updates} with algorithm.surrogate.name = lpo: it compares the "
                "samples of a group within an update, which has one of each; take optimiser.updates=1"
            )

    def metrics(self, p: Point) -> dict[str, Tensor]:
        return self.surrogate.metrics(self.log_ratio(p), p.items.get("settled", LATER))
