"""Online Diffusion-DPO against the numbers of the authors' code."""

import pytest
import torch

from flowrl.algorithms.dpo import DPO
from tests.golden.points import noised


@pytest.mark.parametrize("k", [0, 1])
def test_dpo(golden, assert_golden, k):
    """Their rows are winners, then losers; the loss depends on t through the velocities alone."""
    d = golden("f_online_dpo.npz")
    v, row = d["v_theta"].requires_grad_(), torch.arange(6).view(2, 3).T.flatten()
    velocities = {"current": v[row], "ref": d["v_ref"][row]}
    p = noised(d, velocities, torch.zeros(6), torch.full((6,), 0.5), x0=d["x0"][row], eps=d["eps"][row])
    algorithm = DPO(beta=float(d["betas"][k]))
    assert_golden(algorithm.margin(p).detach(), d[f"b{k}_inside"], 1e-9)
    loss = algorithm.loss(p).mean()
    (grad,) = torch.autograd.grad(loss, v)
    assert_golden(loss.detach(), d[f"b{k}_loss"], 1e-9)
    assert_golden(grad, d[f"b{k}_grad_v"], 1e-9)
