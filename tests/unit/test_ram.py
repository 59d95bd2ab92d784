"""RAM: the paper's loss row by row, its fixed points in closed form, and the bridge of the exact form."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl import flow
from flowrl.algorithms.awm import AWM
from flowrl.algorithms.nft import NFT
from flowrl.algorithms.ram import RAM, bridge
from flowrl.forwards import forwards
from flowrl.types import Cond, Point
from tests.reference import ram as reference
from tests.unit.test_config import config
from tests.unit.test_points import SIZE, judged, rollout

T, S = 0.6, 0.25
EXACT = {"plain": False, "path cost": True}
COSTED = pytest.mark.parametrize("path_cost", EXACT.values(), ids=EXACT)


def velocities(base=(0.0, 1.0), acting=(0.4, 0.7)):
    """By slot, functions of x [B, *L], t [B]: the exact ones for data N(mean, variance)."""

    def exact(x, t, mean, variance):
        t = flow.like(t, x)
        total = (1 - t).square() * variance + t.square()
        return (t - (1 - t) * variance) / total * (x - (1 - t) * mean) - mean

    return {"ref": lambda x, t: exact(x, t, *base), "old": lambda x, t: exact(x, t, *acting)}


def bound(p, by_slot):
    """The point with velocities that are functions of its place; the current one is a leaf where there is none."""
    slots = {slot: v(p.x, p.t) for slot, v in by_slot.items()}
    slots.setdefault("current", slots["old"].clone().requires_grad_())
    return replace(p, read=slots.__getitem__, bind=lambda elsewhere: bound(elsewhere, by_slot))


def placed(x0, x_s, x_t, s, t, adv):
    """A point of the exact form, from where the way of each row leads through: x0, x_s, x_t [B, *L], s, t [B]."""
    a, tau = way_to(s, t)
    items = {"x0": x0, "eps": (x_t - flow.like(1 - t, x0) * x0) / flow.like(t, x0), "x_s": x_s, "s": s}
    items["z"] = (x_t - flow.like(a, x_s) * x_s) / flow.like(tau, x_s)
    rows = torch.arange(len(t))
    return Point(x_t, t, Cond({}, rows), rows, adv, torch.ones_like(t), items)


def way_to(s, t):
    """x_t = a x_s + tau z under the memoryless process."""
    a = (1 - t) / (1 - s)
    return a, (t**2 - (a * s) ** 2).sqrt()


def points(draws=2, elements=5, groups=range(4), **settings):
    """The rows of a rollout of groups of 6 samples."""
    r = judged(rollout(groups))
    r = replace(r, x0=torch.linspace(-1, 1, len(r.x0) * elements).view(-1, elements))
    return next(RAM(draws=draws, **settings).points(r, Cond({}, torch.arange(len(r.x0))), 1, (7, 3)))


def noised():
    """A point of the exact form, in float64."""
    p = points(path_cost=True)
    s, t, x0, x_s, z = (value.double() for value in (p.items["s"], p.t, *(p.items[k] for k in ("x0", "x_s", "z"))))
    a, tau = way_to(s, t)
    return placed(x0, x_s, a[:, None] * x_s + tau[:, None] * z, s, t, p.adv.double())


@COSTED
@pytest.mark.parametrize("scale", [0.5, 30.0])
def test_loss_and_gradient_are_the_papers(scale, path_cost):
    """The paper's loss has no 1 / M."""
    slots = velocities()
    p = noised()
    current = (slots["old"](p.x, p.t) + 0.1 * p.x.square()).requires_grad_()
    ours = RAM(scale=scale, path_cost=path_cost).loss(bound(p, {**slots, "current": lambda x, t: current}))
    theirs = []
    for i in range(len(p)):
        x, t, x0 = p.x[i], float(p.t[i]), p.items["x0"][i]
        here = [slots[slot](x[None], p.t[i : i + 1])[0].tolist() for slot in ("old", "ref")]
        extra = None
        if path_cost:
            x_s, s = p.items["x_s"][i], float(p.items["s"][i])
            there = [slots[slot](x_s[None], p.items["s"][i : i + 1])[0].tolist() for slot in ("old", "ref")]
            extra = reference.path_cost(x0.tolist(), x_s.tolist(), x.tolist(), s, t, there, here)
        theirs.append(reference.loss(x0, p.items["eps"][i], current[i], *here, p.adv[i], scale, extra))
    theirs = torch.stack(theirs) / scale
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    grads = [torch.autograd.grad(loss.mean(), current)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_loss_is_the_common_form():
    """|v - v_ref - M A (u - v_old)|^2 / M = M A^2 |e|^2 + 2 A <e, v - v_ref> + |v - v_ref|^2 / M, e = v_old - u."""
    p = bound(noised(), {**velocities(), "current": lambda x, t: x.sin()})
    m, e, off = 7.0, p.v_old - (p.items["eps"] - p.items["x0"]), p.v - p.v_ref
    expected = (m * p.adv[:, None].square() * e.square() + 2 * p.adv[:, None] * e * off + off.square() / m).mean(1)
    torch.testing.assert_close(RAM(scale=m).loss(p), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "algorithm",
    [NFT(), *(AWM(weight=w) for w in ("uniform", "t", "ghuber", "elbo")), RAM(), RAM(scale=2.0)],
    ids=["nft", "awm uniform", "awm t", "awm ghuber", "awm elbo", "ram", "ram 2"],
)
def test_all_have_one_direction_where_old_and_base_are_the_policy(algorithm):
    """d L / d v is a positive multiple of A (v - u) in each row: of 2 A (v - u) / D in RAM, whatever M is."""
    slots = velocities(acting=(0.0, 1.0))
    p = bound(noised(), slots)
    (grad,) = torch.autograd.grad(algorithm.loss(p).sum(), p.v)
    common = 2 * p.adv[:, None] * (p.v.detach() - (p.items["eps"] - p.items["x0"])) / p.x[0].numel()
    share = (grad * common).sum(1) / common.square().sum(1)
    torch.testing.assert_close(grad, share[:, None] * common, rtol=1e-10, atol=1e-12)
    assert (share > 0).all()
    if isinstance(algorithm, RAM):
        torch.testing.assert_close(share, torch.ones_like(share), rtol=1e-10, atol=0)


@COSTED
def test_zero_advantage_has_zero_gradient_at_the_base(path_cost):
    """So it costs nothing on the way to stay the base."""
    p = noised()
    p = bound(replace(p, adv=torch.zeros_like(p.adv)), velocities(acting=(0.0, 1.0)))
    (grad,) = torch.autograd.grad(RAM(path_cost=path_cost).loss(p).sum(), p.v)
    assert grad.abs().max() == 0


# --- fixed points: base N(m, q), the tilted law in its place, and the mean of the gradient at every x_t in closed form


def linear(x):
    return 0.5 * x


def quadratic(x):
    return -(x - 1).square() / 2


def tilted(reward, m, q, scale):
    """(mean, variance) of N(m, q) exp(scale reward)."""
    if reward is linear:
        return m + scale * q / 2, q
    precision = 1 / q + scale
    return (m / q + scale) / precision, 1 / precision


def gradient_by_place(algorithm, reward, base, acting):
    """[5] E[d L / d v | x_t] at v = v_old for five x_t: exact quadrature over s, x_s and x0 given x_t."""
    times, by_time = np.polynomial.legendre.leggauss(48)
    nodes, by_node = np.polynomial.hermite_e.hermegauss(4)
    places = torch.linspace(-1.5, 2.0, 5, dtype=torch.float64)
    grid = list(itertools.product(places.tolist(), range(48), range(4), range(4)))
    x_t, i, j, k = (torch.tensor(column) for column in zip(*grid, strict=True))
    x_t, t = x_t.double(), torch.full((len(grid),), T, dtype=torch.float64)
    times, by_time, nodes, by_node = map(
        torch.tensor, ((times + 1) / 2, by_time / 2, nodes, by_node / math.sqrt(2 * math.pi))
    )
    s, probability = T * times[i], by_time[i] * by_node[j] * by_node[k]

    mean, variance = acting
    a = (1 - t) / (1 - s)
    x_s = given((1 - s) * mean, (1 - s) ** 2 * variance + s**2, a, t**2 - (a * s) ** 2, x_t, nodes[j])
    x0 = given(torch.full_like(s, mean), torch.full_like(s, variance), 1 - s, s**2, x_s, nodes[k])
    x0, x_s, x_t = x0[:, None], x_s[:, None], x_t[:, None]
    p = bound(placed(x0, x_s, x_t, s, t, reward(x0.squeeze(1))), velocities(base, acting))
    (grad,) = torch.autograd.grad(algorithm.loss(p) @ probability, p.v)
    return grad.view(5, -1).sum(1)


def given(mean, variance, slope, noise, y, node):
    """x ~ N(mean, variance) given y = slope x + N(0, noise), at a node of the standard normal."""
    total = slope**2 * variance + noise
    return mean + variance * slope / total * (y - slope * mean) + (variance * noise / total).sqrt() * node


@pytest.mark.parametrize("scale", [0.5, 2.0])
@COSTED
def test_the_tilt_by_a_linear_reward_is_a_fixed_point(scale, path_cost):
    base = (0.2, 0.8)
    acting = tilted(linear, *base, scale)
    grad = gradient_by_place(RAM(scale=scale, path_cost=path_cost), linear, base, acting)
    assert grad.abs().max() < 1e-9


@pytest.mark.parametrize("scale", [0.25, 1.0, 2.0])
def test_the_tilt_by_a_quadratic_reward_is_one_with_the_path_cost_only(scale):
    base = (0.0, 1.0)
    acting = tilted(quadratic, *base, scale)
    exact, plain = (
        gradient_by_place(RAM(scale=scale, path_cost=cost), quadratic, base, acting).abs().max()
        for cost in (True, False)
    )
    assert exact < 1e-9
    assert plain > 0.01


# --- where it looks


@COSTED
def test_draws_of_a_sample_are_stratified(path_cost):
    p = points(path_cost=path_cost, draws=8)
    cells = (p.t.view(8, -1).square() * 8).long()  # p(t) = 2 t
    inside = slice(1, 7) if path_cost else slice(0, 8)  # the exact form keeps clear of 0 and 1
    assert cells[inside].equal(torch.arange(8)[:, None].expand_as(cells)[inside])
    assert not path_cost or (p.t.min() >= 0.03 and p.t.max() <= 0.97)


@pytest.fixture(scope="module")
def way():
    """Rows of 2000 elements, and their eps', found from x_s."""
    p = points(path_cost=True, draws=8, elements=2000)
    s = p.items["s"][:, None]
    return p, (p.items["x_s"] - (1 - s) * p.items["x0"]) / s


def test_x_t_has_its_law_given_x0(way):
    """x_t ~ N((1 - t) x0, t^2), element by element."""
    p, _ = way
    t = p.t[:, None]
    eps = ((p.x - (1 - t) * p.items["x0"]) / t).double()
    torch.testing.assert_close(eps, p.items["eps"].double(), rtol=1e-4, atol=1e-5)
    assert abs(eps.mean()) < 4 / eps.numel() ** 0.5
    assert abs(eps.var() - 1) < 4 * (2 / eps.numel()) ** 0.5
    assert abs((eps * p.items["x0"]).mean()) < 4 / eps.numel() ** 0.5


def test_x_s_lies_on_the_way_to_x_t(way):
    """x_t = a x_s + tau z of the memoryless process, and the noises correlate by r."""
    p, eps_s = way
    t, s = p.t.double()[:, None], p.items["s"].double()[:, None]
    a, tau = way_to(s, t)
    torch.testing.assert_close(p.x.double(), a * p.items["x_s"] + tau * p.items["z"], rtol=1e-4, atol=1e-5)
    r, rest = bridge(s.squeeze(1), t.squeeze(1))
    error = (eps_s * p.items["eps"]).mean(1) - r
    assert (error.abs() < 5 * ((1 + r.square()) / 2000).sqrt()).all()
    torch.testing.assert_close(rest, (tau / t).squeeze(1), rtol=1e-6, atol=0)


def test_s_is_uniform_below_t(way):
    p, _ = way
    share = p.items["s"] / p.t
    assert share.min() >= 0.009 and share.max() < 1
    assert abs(share.mean() - 0.5) < 4 * (1 / 12 / len(share)) ** 0.5
    assert abs(share.var() - 1 / 12) < 4 * (1 / 180 / len(share)) ** 0.5


def test_the_way_of_a_sample_is_its_own_in_any_company():
    whole, alone = (points(path_cost=True, draws=3, groups=groups) for groups in (range(4), [2]))
    mine = (whole.items["block"] // 3 == 2).nonzero().squeeze(1)
    for name in ("s", "z", "eps"):
        assert whole.items[name][mine].equal(alone.items[name])
    assert len(alone.items["s"].unique()) == 3 * SIZE


@COSTED
@pytest.mark.parametrize("rows", [1, 5, 48])
def test_micro_batches_do_not_change_the_loss(rows, path_cost):
    p, algorithm = noised(), RAM(path_cost=path_cost)
    whole = algorithm.loss(bound(p, velocities()))
    parts = torch.cat([algorithm.loss(bound(part, velocities())) for part in p.parts(rows)])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("path_cost", "others"), [(False, [0, 1]), (True, [1, 3])], ids=EXACT)
def test_forwards_without_gradient(path_cost, others):
    """Beside the one with gradient: the base at x_t and, on the way, the policy that acted and the base."""
    c = config(f"algorithm={{name: ram, path_cost: {path_cost}}}", "sampler={steps: 4}", "optimiser.updates=1")
    rows = 8 * c.data.prompts_per_step * c.data.group_size
    for step, times in enumerate(others):
        f = forwards(c, step)
        assert (f.current.rows, f.others.rows) == (rows, times * rows)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("scale", 0.0, "must be positive"), ("guidance", 4.5, "guide the rollout with model.guidance")],
)
def test_settings_that_make_no_sense_are_refused(key, value, said):
    with pytest.raises(ValueError, match=f"algorithm.{key} is {value}: .*{said}"):
        RAM(**{key: value})
