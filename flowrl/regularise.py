"""What an update pays for leaving the base: functions of a point with one value a row, [B].

They read the velocities that the objective has already read, so a regulariser costs at most the reference's forward.
"""

from __future__ import annotations

from torch import Tensor

from flowrl import flow
from flowrl.types import Point


def velocity_kl(p: Point) -> Tensor:
    """mean_D (v - v_ref)^2, the default anchor of NFT (2509.16117), AWM and DGPO."""
    return flow.mean_sq(p.v - p.v_ref)


def norm_hinge(p: Point) -> Tensor:
    """relu(|v| / |v_ref| - 1)^2, free of scale: what NormGuard (2606.27771) charges a velocity longer than the base's.

    Objectives that push away from bad samples lengthen the velocity, which shows as over-saturation. Shorter is free.
    """
    return (norm_ratio(p) - 1).relu().square()


def norm_ratio(p: Point) -> Tensor:
    """[B] |v| / |v_ref|."""
    return p.v.flatten(1).norm(dim=1) / p.v_ref.flatten(1).norm(dim=1)


def path_kl(p: Point) -> Tensor:
    """mean_D (mean - mean_ref)^2 / (2 std^2), the KL of one stochastic step, in nats per element."""
    gap, std = _mean_gap(p)
    return flow.mean_sq(gap) / (2 * std.square())


def step_kl(p: Point) -> Tensor:
    """mean_D (mean - mean_ref)^2 / (2 s^2) with std = s sqrt(-dt): Flow-GRPO's line (2505.05470), path_kl times -dt."""
    return path_kl(p) * (p.t - p.step["t_next"])


def _mean_gap(p: Point) -> tuple[Tensor, Tensor]:
    (mean, std), (mean_ref, _) = (flow.step(p.kernel, p.x, v, *p.how) for v in (p.v, p.v_ref))
    return mean - mean_ref, std
