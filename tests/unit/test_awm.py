"""AWM: the paper's loss row by row, ratios, the lower bound in closed form, and rows that keep to themselves."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl import flow
from flowrl.algorithms.awm import AWM
from flowrl.types import Cond, Point
from tests.given import bound
from tests.reference import awm as reference

WEIGHTS = ["uniform", "t", "t2", "huber", "ghuber", "elbo"]
RATIOS = ["one", "draw", "sample"]
ROWS, SIZE, SAMPLES = 6, 5, 3


def point(dtype=torch.float64):
    """Two draws of each of three samples; their velocities are found by row, the current one off the old by a tenth."""
    g = torch.Generator().manual_seed(0)
    x0, eps, v_old = torch.randn(3, ROWS, SIZE, generator=g, dtype=dtype)
    v = (v_old + 0.1 * torch.randn(ROWS, SIZE, generator=g, dtype=dtype)).requires_grad_()
    t, rows = torch.rand(ROWS, generator=g, dtype=dtype), torch.arange(ROWS)
    items = {"x0": x0, "eps": eps, "sample": rows % SAMPLES, "block": rows // SAMPLES, "row": rows}
    adv = torch.tensor([4.0, -2.0, 1.0], dtype=dtype).repeat(2)
    p = Point(flow.interpolate(x0, eps, t), t, Cond({}, rows), rows, adv, torch.ones(ROWS, dtype=dtype), items)
    return p, v, v_old


def parts(algorithm, p, v, v_old, rows=ROWS):
    return bound(algorithm, p, rows, current=lambda p: v[p.items["row"]], old=lambda p: v_old[p.items["row"]])


def losses(algorithm, p, v, v_old, rows=ROWS):
    return torch.cat([algorithm.loss(part) for part in parts(algorithm, p, v, v_old, rows)])


def at_old(dtype=torch.float64):
    """The same where the current velocity is the old one, and a leaf."""
    p, _, v_old = point(dtype)
    return p, v_old.clone().requires_grad_(), v_old


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_loss_and_gradient_are_the_papers(weight, ratio):
    p, v, v_old = point()
    algorithm = AWM(weight=weight, ratio=ratio, power=0.3, adv_max=2, old_kl=0.7, clip=0.05)
    settings = {"weight": weight, "ratio": ratio, "power": 0.3, "clip": 0.05, "adv_max": 2, "old_kl": 0.7}
    rows = (p.items["x0"], p.items["eps"], p.t, v, v_old, p.adv, p.items["sample"].tolist())
    ours, theirs = losses(algorithm, p, v, v_old), torch.stack(reference.losses(*rows, **settings))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    grads = [torch.autograd.grad(loss.mean(), v)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratio_is_exactly_one_at_the_old_policy(ratio):
    algorithm = AWM(ratio=ratio)
    (p,) = parts(algorithm, *at_old(torch.float32))
    assert algorithm.log_ratio(p).equal(torch.zeros(ROWS, dtype=torch.float64))


@pytest.mark.parametrize("ratio", RATIOS)
def test_at_the_old_policy_all_ratios_have_the_policy_gradient(ratio):
    """d L / d v = 2 a (v_old - u) / D with the uniform weight; the anchor is at rest."""
    p, v, v_old = at_old()
    (grad,) = torch.autograd.grad(losses(AWM(weight="uniform", ratio=ratio, adv_max=2), p, v, v_old).sum(), v)
    e = v_old - (p.items["eps"] - p.items["x0"])
    torch.testing.assert_close(grad, 2 / 5 * p.adv[:, None] * 2 * e / SIZE, rtol=1e-10, atol=0)


def test_log_ratio_is_the_common_form():
    """l - l_old = 2 <e, d> + |d|^2 with e = v_old - u, d = v - v_old: what NFT, RAM and AWM share."""
    algorithm, (p, v, v_old) = AWM(weight="uniform", ratio="draw"), point()
    (p,) = parts(algorithm, p, v, v_old)
    e, d = v_old - (p.items["eps"] - p.items["x0"]), v - v_old
    torch.testing.assert_close(algorithm.log_ratio(p), -(2 * e * d + d.square()).mean(1), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_zero_advantage_has_zero_gradient_at_the_old_policy(weight, ratio):
    p, v, v_old = at_old()
    p.adv = torch.zeros_like(p.adv)
    (grad,) = torch.autograd.grad(losses(AWM(weight=weight, ratio=ratio), p, v, v_old).sum(), v)
    assert grad.abs().max() == 0


@pytest.mark.parametrize(
    ("weight", "scale", "within"), [("elbo", 1 / 0.5**2, 1e-10), ("uniform", 3.1416, 2e-5)], ids=["elbo", "uniform"]
)
@pytest.mark.parametrize("x0", [-0.4, 1.3])
def test_the_elbo_weight_is_the_score_function(weight, scale, within, x0):
    """Data N(m, s^2), s = 1/2, exact velocity: -d E[W] / dm = (x0 - m) / s^2; the uniform W has another scale."""
    m = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    times, by_time = np.polynomial.legendre.leggauss(60)
    noises, by_noise = np.polynomial.hermite_e.hermegauss(3)
    t, eps = map(torch.tensor, zip(*itertools.product((times + 1) / 2, noises), strict=True))
    probability = torch.tensor([a * b for a, b in itertools.product(by_time / 2, by_noise / math.sqrt(2 * math.pi))])
    rows = torch.arange(len(t))
    eps, clean = eps.double()[:, None], torch.full((len(t), 1), x0, dtype=torch.float64)
    x = flow.interpolate(clean, eps, t)
    v = (t - (1 - t) / 4)[:, None] / ((1 - t).square() / 4 + t.square())[:, None] * (x - (1 - t)[:, None] * m) - m
    p = Point(x, t, Cond({}, rows), rows, torch.full_like(t, 5.0), probability, {"x0": clean, "eps": eps})
    p.read = {"current": v}.__getitem__
    (grad,) = torch.autograd.grad(AWM(weight=weight, old_kl=0).loss(p) @ probability, m)
    assert float(-grad) / (x0 - 0.7) == pytest.approx(scale, rel=within)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("ratio", RATIOS)
def test_micro_batches_do_not_change_the_gradient(ratio, rows):
    """Also where the draws of a sample lie in different ones."""
    p, v, v_old = point()
    algorithm = AWM(ratio=ratio, clip=0.05)
    whole, split = (torch.autograd.grad(losses(algorithm, p, v, v_old, n).sum(), v)[0] for n in (ROWS, rows))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_may_come_in_any_order(ratio):
    p, v, v_old = point()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    items = {name: value[order] for name, value in p.items.items()}
    turned = replace(p, x=p.x[order], t=p.t[order], adv=p.adv[order], items=items)
    here, there = (losses(AWM(ratio=ratio), q, v, v_old) for q in (p, turned))
    torch.testing.assert_close(there, here[order], rtol=1e-14, atol=0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_sample_never_touches_another(ratio):
    p, v, v_old = point()
    rest = p.items["sample"] != 1
    here, there = (losses(AWM(ratio=ratio), p, now, v_old) for now in (v, v + 3 * ~rest[:, None]))
    assert here[rest].equal(there[rest])
    assert not here[~rest].isclose(there[~rest]).any()


def test_without_ratio_and_anchor_the_old_policy_is_never_read():
    p, v, _ = point()
    (p,) = bound(AWM(ratio="one", old_kl=0), p, current=lambda p: v)
    assert AWM(ratio="one", old_kl=0).loss(p).isfinite().all()


@pytest.mark.parametrize(("key", "value"), [("power", 0), ("adv_max", -1), ("old_kl", -0.1)])
def test_settings_out_of_range_are_refused(key, value):
    with pytest.raises(ValueError, match=f"algorithm.{key} is {value}: it must be"):
        AWM(**{key: value})
