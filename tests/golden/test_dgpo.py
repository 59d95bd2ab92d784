"""DGPO against the numbers of the authors' code."""

import pytest
import torch

from flowrl import regularise
from flowrl.algorithms.dgpo import DGPO
from tests.given import fixed
from tests.golden.points import noised

CASES = {  # the authors' variants: (clip, reference, velocity KL) of ours
    "noclip": (False, "ref", False),
    "clip": (True, "ref", True),
    "emaref": (True, "old", True),
}


@pytest.mark.parametrize("case", CASES)
def test_dgpo(golden, assert_golden, case):
    d = golden("f_dgpo.npz")
    clips, reference, charges = CASES[case]
    clip, bound = float(d["clip"]), float(d["adv_clip"])
    algorithm = DGPO(beta=float(d["beta_dpo"]), reference=reference, clip=clip if clips else None)
    v, adv = d["v_theta"].requires_grad_(), d["A"].clamp(-bound, bound)
    p = noised(d, {}, adv, torch.full((6,), 0.5), block=d["group"])
    p = fixed(algorithm, p, current=v, old=d["v_old"], ref=d["v_ref"])
    policy = algorithm.loss(p).mean()
    loss = policy + d["lam"] * regularise.velocity_kl(p).mean() if charges else policy
    (grad,) = torch.autograd.grad(loss, v)
    assert_golden(policy.detach(), d[f"{case}_dgpo"], 1e-9)
    assert_golden(loss.detach(), d[f"{case}_loss"], 1e-9)
    assert_golden(grad, d[f"{case}_grad_v"], 1e-9)
    if clips:
        assert algorithm.clipped(p).equal(d[f"{case}_clipped"])
