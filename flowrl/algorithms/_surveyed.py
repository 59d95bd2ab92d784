"""Surrogates that survey all log-ratios of an update before its first backward: P3O, M2PO, LPO.

What is settled carries no gradient and is the same for any micro-batch and number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._objective import positive
from flowrl.algorithms._surrogates import Surrogate, clipped, outside
from flowrl.types import LATER, Point


@dataclass(frozen=True, kw_only=True)
class P3O(Surrogate):
    """-sg(min(rho, E)) A log rho + (1 - E) (rho log rho - rho + 1) (1905.01756).

    E = (sum rho)^2 / (n sum rho^2) is the effective share of the n samples. What it releases is an estimate of
    KL(pi | pi_old) that is unbiased under pi_old, as is its gradient rho log rho grad log pi.
    """

    name: Literal["p3o"] = "p3o"
    surveys: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        rho = log_ratio.exp()
        kl = rho * log_ratio - rho + 1
        return -rho.detach().minimum(settled) * adv * log_ratio + (1 - settled) * kl

    def settle(self, log_ratio: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        rho = log_ratio.double().exp()[p.weight > 0]
        first, second, n = total(torch.stack([rho.sum(), rho.square().sum(), torch.ones_like(rho).sum()]))
        return (first.square() / (n * second)).to(log_ratio.dtype).expand(len(log_ratio))

    def metrics(self, log_ratio: Tensor, settled: Tensor = LATER) -> dict[str, Tensor]:
        return {"ratio": log_ratio.exp(), "ess": settled}


@dataclass(frozen=True, kw_only=True)
class M2PO(Surrogate):
    """max(-A rho, -A clip(rho, min(e^-tau, 1 - floors_0), max(e^tau, 1 + floors_1))) (2510.01161).

    tau is the largest with mean min((log rho)^2, tau^2) <= m2 over the harmful items of an update: A > 0 and rho > 1,
    or A < 0 and rho < 1. Where they keep to m2 by themselves, none lies beyond tau.
    """

    name: Literal["m2po"] = "m2po"
    m2: float = 0.04
    floors: tuple[float, float] = (0.3, 0.5)  # how far the ratio may always go, down and up
    surveys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("algorithm.surrogate", m2=self.m2)
        if not (0 <= self.floors[0] <= 1 and self.floors[1] >= 0):
            raise ValueError(
                f"algorithm.surrogate.floors is {list(self.floors)}: the first must lie in [0, 1], the second be at "
                "least 0"
            )

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        return clipped(log_ratio.exp(), adv, *self.bounds(settled))

    def bounds(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        return (-tau).exp().clamp(max=1 - self.floors[0]), tau.exp().clamp(min=1 + self.floors[1])

    def settle(self, log_ratio: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Newton's steps from below: the mean is piecewise linear and concave in tau^2, so they end at the root."""
        square = log_ratio.double().square()[(p.weight > 0) & (p.adv * log_ratio > 0)]
        n, bound, higher = total(torch.ones_like(square).sum()), 0.0, self.m2
        while higher > bound:
            bound, over = higher, square > higher
            within, beyond = total(torch.stack([square[~over].sum(), over.double().sum()]))
            if beyond:
                higher = float((n * self.m2 - within) / beyond)
        return torch.full_like(log_ratio, bound**0.5)

    def metrics(self, log_ratio: Tensor, settled: Tensor = LATER) -> dict[str, Tensor]:
        return {**outside(log_ratio.exp(), *self.bounds(settled)), "tau": settled}


@dataclass(frozen=True, kw_only=True)
class LPO(Surrogate):
    """p - w - w log p, with p = n softmax(kappa log rho) and w = n softmax(A / tau) over the n items of a block.

    Its mean over a block is the cross-entropy of the two softmaxes less log n, its gradient in log rho kappa (p - w):
    bounded, and of sum 0 (2605.06139). A sample without a verdict is a block by itself, where p = w = 1.
    """

    name: Literal["lpo"] = "lpo"
    tau: float = 1.0
    kappa: float = 1.0
    surveys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("algorithm.surrogate", tau=self.tau, kappa=self.kappa)

    def __call__(self, log_ratio: Tensor, adv: Tensor, settled: Tensor = LATER) -> Tensor:
        w, level = settled.unbind(1)
        log_p = self.kappa * log_ratio - level
        return log_p.exp() - w - w * log_p

    def settle(self, log_ratio: Tensor, p: Point, total: Callable[[Tensor], Tensor]) -> Tensor:
        block = p.items["block"].where(p.weight > 0, -1 - torch.arange(len(p.adv), device=p.adv.device))
        wanted = p.adv / self.tau
        return torch.stack([(wanted - level(wanted, block)).exp(), level(self.kappa * log_ratio, block)], 1)


def level(values: Tensor, block: Tensor) -> Tensor:
    """[I] the log of the mean of exp(values) over the items of the same block; values, block [I]."""
    _, slot, n = block.unique(return_inverse=True, return_counts=True)
    top = values.new_full((len(n),), -torch.inf).scatter_reduce(0, slot, values, "amax")
    mean = torch.zeros_like(top).index_add(0, slot, (values - top[slot]).exp()) / n
    return (top + mean.log())[slot]
