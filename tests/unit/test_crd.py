"""CRD: the paper's loss, what centring cancels, the guided teacher, whole groups, any micro-batch."""

import math
import re

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.crd import CRD
from tests.given import D, bound, drift, fixed, gradient, normal, points, reordered
from tests.reference import crd as paper

ADV = torch.tensor([[0.3, -1.2, 0.9, 0.0], [-0.5, 0.1, 0.2, 2.7], [1.0, -2.0, 0.4, -0.4]])
WEIGHT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]])
TEMPERATURES = pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.3], ids=["uniform", "hard", "softmax"])


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["all verdicts", "some"])
@pytest.mark.parametrize("adaptive, by_reward", [(True, True), (False, False)], ids=["adaptive", "plain"])
@pytest.mark.parametrize("match", ["mse", "bce"])
@TEMPERATURES
def test_loss_and_gradient_are_those_of_the_paper(temperature, match, adaptive, by_reward, weight):
    settings = {
        "beta": 1.7,
        "adv_max": 2.0,
        "match": match,
        "adaptive": adaptive,
        "temperature": temperature,
        "kl": 0.2,
    }
    algorithm = CRD(**settings, kl_by_reward=by_reward, teacher_guidance=1.0, draws=2)
    (p,) = points(algorithm, ADV, weight)
    v, old, ref = normal(3, len(p), D, seed=20)
    p = fixed(algorithm, p, current=v.requires_grad_(), old=old, ref=ref)
    sides = (p.items["x0"], p.items["eps"].double(), v, old, ref)
    judged = [x.tolist() for x in (p.adv, p.weight, p.items["block"])]
    theirs = torch.stack(paper.losses(*sides, *judged, **settings, by_reward=by_reward))
    ours, seen = algorithm.loss(p), p.weight > 0
    assert_close(ours[seen], theirs[seen], rtol=1e-10, atol=1e-14)
    grads = [torch.autograd.grad(loss @ p.weight / p.weight.sum(), v)[0] for loss in (ours, theirs)]
    assert_close(*grads, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "plain"])
def test_at_the_old_policy_the_gradient_is_the_centred_rewards(adaptive):
    """d L / d v = 4 c R^c (v - u) / (w D) for each sample: better than its group's mean is pulled."""
    algorithm = CRD(adv_max=4.0, kl=0.0, adaptive=adaptive)
    (p,) = points(algorithm, ADV)
    v = normal(len(p), D, seed=1).requires_grad_()
    p = fixed(algorithm, p, current=v, old=v.detach())
    assert algorithm.metrics(p)["implied_reward"].eq(0).all()
    (grad,) = torch.autograd.grad(algorithm.loss(p).sum(), v)
    off = (v - p.items["eps"] + p.items["x0"]).detach()
    centred = ((ADV - ADV.mean(1, keepdim=True)) / 8).double().view(-1, 1)
    assert_close(grad, 16 * centred * off / D / (off.abs().mean(1, keepdim=True) if adaptive else 1))


@TEMPERATURES
def test_no_advantage_no_gradient_at_the_old_policy(temperature):
    algorithm = CRD(kl=0.0, temperature=temperature)
    (p,) = points(algorithm, torch.zeros(2, 4))
    v = normal(len(p), D, seed=1).requires_grad_()
    p = fixed(algorithm, p, current=v, old=v.detach())
    assert torch.autograd.grad(algorithm.loss(p).sum(), v)[0].abs().max() < 1e-14


@pytest.mark.parametrize("match", ["mse", "bce"])
@TEMPERATURES
def test_a_groups_own_constants_cancel(temperature, match):
    """Neither one more point of reward for all of a group nor the partition function in log p_old is seen."""
    algorithm = CRD(kl=0.0, adaptive=False, temperature=temperature, match=match)
    v, off = normal(2, 12, D, seed=1)
    found = []
    for shift, more in ((0.0, 0.0), (0.8, 1.5)):
        (p,) = points(algorithm, ADV.double() + shift * torch.arange(3)[:, None])
        u = p.items["eps"] - p.items["x0"]
        square = off.square().mean(1, keepdim=True)
        old = u + off * (1 + more * (p.items["block"] + 1)[:, None] / square).sqrt()
        found.append(algorithm.loss(fixed(algorithm, p, current=v, old=old)))
    assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_a_hot_softmax_is_uniform():
    v, old = normal(2, 12, D, seed=1)
    losses = []
    for temperature in (-1.0, 1e9):
        algorithm = CRD(kl=0.0, temperature=temperature)
        (p,) = points(algorithm, ADV)
        losses.append(algorithm.loss(fixed(algorithm, p, current=v, old=old)))
    assert_close(*losses, rtol=1e-7, atol=1e-9)


E, ROOT = math.e, math.sqrt(math.e)
HARD = ((E + 0.5 * ROOT) / (E + ROOT) + 0.375) / 2


@pytest.mark.parametrize(
    "temperature, centre", [(-1.0, 0.375), (0.01, 0.5), (0.0, HARD)], ids=["uniform", "cold", "hard"]
)
def test_what_a_temperature_centres_on(temperature, centre):
    """Of rewards 1, 0, 0.5, 0: the mean; between largest and least; between the soft mean above 0 and the mean."""
    algorithm = CRD(temperature=temperature, adv_max=1.0, kl=0.0)
    (p,) = points(algorithm, torch.tensor([[1.0, -1, 0, -3]]))
    v = normal(4, D, seed=1)
    level = fixed(algorithm, p, current=v, old=v).items["settled"][:, 1].mean(1)
    assert_close(level, torch.full_like(level, centre))


def test_the_teacher_is_the_guided_base_and_good_samples_stay_near_it():
    v, ref, old = normal(3, 12, D, seed=1)
    seen = []

    def base(p):
        assert not torch.is_grad_enabled()
        seen.append(p.cond.guidance)
        return ref * p.cond.guidance

    def loss(algorithm):
        (p,) = points(algorithm, ADV)
        (p,) = bound(algorithm, p, current=lambda p: v, old=lambda p: old, ref=base)
        return algorithm.loss(p), p.adv

    guided, adv = loss(CRD(kl=0.3, teacher_guidance=2.5))
    free, _ = loss(CRD(kl=0.0))
    assert seen == [2.5]
    reward = 0.5 + adv / 10
    strength = 1e-4 + (0.3 - 1e-4) * reward
    assert_close(guided - free, strength * (v - 2.5 * ref).square().mean(1), rtol=1e-10, atol=1e-12)


def test_a_group_shares_its_draws_and_the_policy_that_acts_is_not_the_one_that_is_compared_with():
    assert CRD.acts_with == "current"
    (p,) = points(CRD(draws=2), ADV)
    for value in (p.t, p.items["eps"], p.items["block"]):
        groups = value.view(2 * len(ADV), ADV.shape[1], -1)
        assert groups.eq(groups[:, :1]).all()


@TEMPERATURES
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_micro_batch_does_not_change_the_gradient(rows, updates, temperature):
    algorithm = CRD(draws=2, temperature=temperature)
    (current, w), (old, _), (ref, _) = (drift(seed) for seed in (1, 2, 3))
    for p in points(algorithm, ADV, WEIGHT, updates):
        whole, split = (gradient(algorithm, p, n, w, current=current, old=old, ref=ref) for n in (10**6, rows))
        assert whole.abs().max() > 0
        assert_close(split, whole, rtol=1e-12, atol=1e-14)


def test_groups_never_influence_each_other():
    algorithm = CRD(teacher_guidance=1.0)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), D, seed=1)
    before = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    v[5] += 1
    after = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    assert (before == after).view(3, 4).all(1).tolist() == [True, False, True]
    assert (before != after)[4:8].all(), "its own group feels it"


@TEMPERATURES
def test_rows_in_another_order_have_their_losses(temperature):
    algorithm = CRD(temperature=temperature, teacher_guidance=1.0)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), D, seed=1)
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(0))
    straight = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    moved = fixed(algorithm, reordered(p, order), current=v[order], old=old[order], ref=ref[order])
    assert_close(algorithm.loss(moved), straight[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"adv_max": -1.0}, {"kl": -0.1}, {"temperature": 0.005}], ids=str)
def test_wrong_numbers_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"algorithm.{name} is {value}")):
        CRD(**wrong)
