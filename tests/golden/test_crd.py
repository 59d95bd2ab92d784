"""CRD against the numbers of the public port, which centres over all rows: here they are one group."""

import re

import pytest
import torch

from flowrl.algorithms.crd import CRD
from tests.given import fixed
from tests.golden.points import noised

CASES = [
    *(f"{w}_T0_{rest}" for w in ("ad", "w1") for rest in ("mse_rkl", "mse_kl", "bce_rkl")),
    *(f"{w}_T{t}_{match}_rkl" for w in ("ad", "w1") for t in (1, 2) for match in ("mse", "bce")),
]


@pytest.mark.parametrize("case", CASES)
def test_crd(golden, assert_golden, case):
    d = golden("f_crd.npz")
    weight, temperature, match, charge = re.fullmatch(r"(ad|w1)_T(\d)_(mse|bce)_(r?kl)", case).groups()
    shared = {
        "beta": float(d["beta_c"]), "adv_max": float(d["adv_clip"]), "match": match, "adaptive": weight == "ad",
        "temperature": float(d["temps"][int(temperature)]),
    }  # fmt: skip
    v = d["v_theta"].requires_grad_()
    whole = CRD(**shared, kl=float(d["kl_beta"]), kl_by_reward=charge == "rkl", teacher_guidance=1.0)
    p = fixed(whole, noised(d, {}, d["A"], torch.full((6,), 0.5)), current=v, old=d["v_old"], ref=d["v_ref"])
    assert_golden(whole.reward(p), d["R"], 1e-9)
    assert_golden(whole.implied(p).detach(), d[f"{weight}_r_theta"], 1e-9)
    assert_golden(CRD(**shared, kl=0.0).loss(p).mean().detach(), d[f"{case}_policy"], 1e-9)
    loss = whole.loss(p).mean()
    assert_golden(loss.detach(), d[f"{case}_loss"], 1e-9)
    if f"{case}_grad_v" in d:
        (grad,) = torch.autograd.grad(loss, v)
        assert_golden(grad, d[f"{case}_grad_v"], 1e-9 if weight == "ad" else 1e-6)  # theirs is float32 without w
