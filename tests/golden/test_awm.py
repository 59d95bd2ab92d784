"""AWM against every number of the authors' code: weights, ratios, losses and gradients."""

import pytest
import torch

from flowrl import flow, regularise
from flowrl.algorithms.awm import AWM
from tests.given import bound
from tests.golden.points import noised

WEIGHTS = {"uniform": "uniform", "sigma": "t", "sigma2": "t2", "huber": "huber", "ghuber": "ghuber"}
CASES = ["uniform_off", "ghuber_off", *(f"{name}_on" for name in WEIGHTS), "ghuber_on_avgq"]


@pytest.mark.parametrize("case", CASES)
def test_awm(golden, assert_golden, case):
    """The authors have a policy that acted (q_old, where it is used) and a slow one (for the anchor); ours are one."""
    d = golden("e_awm.npz")
    name, how = case.split("_", 1)
    clip, v, anchor = float(d["adv_clip"]), d["v_theta"].requires_grad_(), d["ema_beta"]
    old = d["v_ema"] if how == "off" else d["v_old"]
    p = noised(d, {}, d["A"].clamp(-clip, clip).repeat(2), d["sigma"], sample=torch.arange(3).repeat(2))
    algorithm = AWM(
        weight=WEIGHTS[name], power=float(d["p"]), clip=float(d["clip"]),
        ratio={"off": "one", "on": "draw", "on_avgq": "sample"}[how],
        adv_max=float(d["advantage_max"]), old_kl=float(anchor) if how == "off" else 0,
    )  # fmt: skip
    (p,) = bound(algorithm, p, current=lambda p: v, old=lambda p: old, ref=lambda p: d["v_ref"])

    q = algorithm.q(p, v).detach()
    assert_golden(q, d[f"{case}_q"], 1e-9)
    assert_golden(q if how == "off" else algorithm.q(p, d["v_old"]), d[f"{case}_q_old"], 1e-9)
    ratio = algorithm.log_ratio(p).exp().detach()
    assert_golden(ratio[: 3 if how == "on_avgq" else 6], d[f"{case}_ratio"], 1e-9)

    kl, moved = regularise.velocity_kl(p).mean(), flow.mean_sq(v - d["v_ema"]).mean()
    assert_golden(kl.detach(), d["kl_ref"], 1e-9)
    assert_golden(moved.detach(), d["kl_ema"], 1e-9)
    ours = algorithm.loss(p).mean()
    policy, own = (ours - anchor * moved, ours) if how == "off" else (ours, ours + anchor * moved)
    loss = own + d["beta"] * kl
    assert_golden(policy.detach(), d[f"{case}_policy"], 1e-9)
    assert_golden(loss.detach(), d[f"{case}_loss"], 1e-9)
    (grad,) = torch.autograd.grad(loss, v)
    assert_golden(grad, d[f"{case}_grad_v"], 1e-9)
