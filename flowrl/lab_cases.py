"""What the laboratory runs: every objective, held to the base, and where it must lead; docs/lab.md has the derivations.

On a linear reward all forward-process methods push v along dv / dmean = -t / V, V = (1 - t)^2 + t^2: at v = v_old their
gradient in v is 2 w A (v_old - u), with some w(t), and `velocity_kl` k answers by 2 k (v - v_ref). They come to rest at

    mean = a M,    M = E[w t^2 / V^2] / (k E[t^2 / V^2])

with the std of the base. The w of AWM and of CRD is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.optimize import root_scalar
from torch import Tensor

from flowrl.lab import Case, Normal, Parabola
from flowrl.sample import Sampler, Window

SLOPE, KL, BETA = 0.5, 2.0, 4.0
LINE = Parabola(a=SLOPE)
CENTRED, ASIDE = Parabola(k=1.0), Parabola(k=1.0, c=1.0)
MEMORYLESS = Sampler(steps=24, kernel="flow_sde", eta=math.sqrt(2))  # the first noise tells nothing of x0
TREE = Sampler(steps=8, kernel="flow_sde", eta=0.7, window=Window(3, "random"), branch=3)
CHURN = Sampler(steps=24, kernel="edm_churn", eta=0.0025)


def over_t(f: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The mean of f(t, V) over t ~ U(0, 1)."""
    t = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    return float(f(t, (1 - t).square() + t.square()).mean())


HELD = KL * over_t(lambda t, var: (t / var).square())


def nft_m() -> float:
    """w = t / |v_old - u|, so of v_old - u, which is normal with std V^-1/2 at x_t, only the sign is left."""
    return math.sqrt(2 / math.pi) * over_t(lambda t, var: t**3 / var**1.5) / HELD


def dgpo_m() -> float:
    """w = sigmoid(S), S = -2 b a mean t^2 / V^2: the better the policy already tells the group apart, the weaker."""

    def excess(m: float) -> float:
        s = -2 * BETA * SLOPE**2 * m
        return over_t(lambda t, var: (t / var).square() * torch.sigmoid(s * (t / var).square())) - m * HELD

    return root_scalar(excess, bracket=(0, 1 / KL)).root


def dpo_m() -> float:
    """Two that are d apart have margin m = b d mean t^2 / V^2, and push the mean by sigmoid(-m) b d t^2 / V^2 / 2."""
    quantile = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    d = math.sqrt(2) * torch.special.ndtri((1 + quantile) / 2)

    def excess(mean: float) -> float:
        def pull(t: Tensor, var: Tensor) -> Tensor:
            margin = BETA * (t / var).square()[:, None] * d
            return (torch.sigmoid(-mean * margin) * margin).mean(1) / 2

        return over_t(pull) - mean * HELD

    return root_scalar(excess, bracket=(0, 10)).root / SLOPE


def paired_m() -> float:
    """dR g = a whatever the pair: v is pushed by a alike at all times of the grid, the last of which is no edge."""
    t = torch.linspace(1, 0, CHURN.steps + 1, dtype=torch.float64)[:-2]
    along = t / ((1 - t).square() + t.square())
    return float(along.mean() / along.square().mean()) / KL


def forward(
    name: str, algorithm: str, reward: Parabola, m: float, settings: dict[str, Any], kl: float = 0.0, **case: Any
) -> Case:
    """A case of a forward-process method that is held by `velocity_kl`."""
    settings = {"draws": 4, **settings}
    return Case(name=name, algorithm=algorithm, reward=reward, m=m, settings=settings,
                regularise={"velocity_kl": kl} if kl else {}, **case)  # fmt: skip


def steps(name: str, reward: Parabola, **case: Any) -> Case:
    """A case of Flow-GRPO that is held by `path_kl` 1."""
    return Case(name=name, algorithm="flow_grpo", reward=reward, m=1.0, regularise={"path_kl": 1.0}, **case)


NFT = {"times": "uniform", "adv_max": 100.0}
AWM = {"times": "uniform", "weight": "uniform", "adv_max": 5.0}
RAM, EXACT_RAM = {"scale": 1.0}, {"scale": 1.0, "path_cost": True}
DPO = {"times": "uniform", "beta": BETA}
DGPO = {"times": "uniform", "beta": BETA, "clip": None, "draws": 8}
CRD = {"times": "uniform", "adaptive": False, "adv_max": 100.0, "kl": KL, "kl_by_reward": False,
       "teacher_guidance": 1.0, "draws": 8}  # fmt: skip

CASES = (
    forward("nft", "nft", LINE, nft_m(), NFT, KL),
    forward("nft aside", "nft", ASIDE, 1 / KL, NFT, KL, closes=0.5),
    forward("awm", "awm", LINE, 1 / KL, AWM, KL),
    forward("ram", "ram", LINE, 0.5, {"scale": 0.5}),
    forward("ram centred", "ram", CENTRED, 1.0, RAM, reaches=Normal(0.0, 0.758)),
    forward("ram exact centred", "ram", CENTRED, 1.0, EXACT_RAM),
    forward("ram aside", "ram", ASIDE, 1.0, RAM, reaches=Normal(0.390, 0.760)),
    forward("ram exact aside", "ram", ASIDE, 1.0, EXACT_RAM),
    forward("dpo", "dpo", LINE, dpo_m(), DPO, KL, groups=128, size=2),
    forward("dgpo", "dgpo", LINE, dgpo_m(), DGPO, KL, groups=4, size=64),
    forward("crd", "crd", LINE, 1 / KL, CRD, groups=4, size=64),
    steps("flow_grpo", LINE, sampler=MEMORYLESS),
    steps("flow_grpo aside", ASIDE, sampler=MEMORYLESS, closes=0.8),
    steps("flow_grpo tree", LINE, sampler=TREE, size=27, closes=0.2),
    Case(name="paired", algorithm="paired", reward=LINE, m=paired_m(), regularise={"velocity_kl": KL}, sampler=CHURN,
         shared_noise=0.9975, size=64),
)  # fmt: skip


def select(only: str | None) -> tuple[Case, ...]:
    """The cases of a name or of an algorithm, or all. ValueError: there is none."""
    chosen = tuple(case for case in CASES if only in (None, case.name, case.algorithm))
    if not chosen:
        raise ValueError(f"no case of the laboratory is named {only!r}; take one of {', '.join(c.name for c in CASES)}")
    return chosen
