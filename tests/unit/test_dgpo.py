"""DGPO: the paper's loss, what it has in common with DPO, whole groups at one (t, eps), any micro-batch."""

import re

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.dgpo import DGPO
from flowrl.algorithms.dpo import DPO
from flowrl.config_file import ConfigError
from flowrl.plan import plan
from tests.given import D, drift, fixed, gradient, normal, points, reordered
from tests.reference import dgpo as paper
from tests.unit.test_config import config

ADV = torch.tensor([[0.3, -1.2, 0.9, 0.0], [-0.5, 0.1, 0.2, 1.7], [1.0, -1.0, 0.4, -0.4]])
WEIGHT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]])


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("reference", ["ref", "old"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["all verdicts", "some"])
def test_loss_and_gradient_are_those_of_the_paper(reference, clip, weight):
    algorithm = DGPO(beta=1.5, reference=reference, clip=clip, draws=2)
    (p,) = points(algorithm, ADV, weight)
    v, old, ref = normal(3, len(p), D, seed=20)
    p = fixed(algorithm, p, current=v.requires_grad_(), old=old, ref=ref)
    anchor = ref if reference == "ref" else old
    judged = [x.tolist() for x in (p.adv, p.weight, p.items["block"])]
    sides = (p.items["x0"], p.items["eps"].double(), v, anchor, old)
    theirs = torch.stack(list(map(torch.as_tensor, paper.losses(*sides, *judged, beta=1.5, clip=clip))))
    ours = algorithm.loss(p)
    assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    grads = [torch.autograd.grad(loss @ p.weight / p.weight.sum(), v)[0] for loss in (ours, theirs)]
    assert_close(*grads, rtol=1e-10, atol=1e-14)
    if clip is not None:
        held = algorithm.metrics(p)["clip_frac"].bool()
        assert held.any() and not held.all()
        assert grads[0][held].eq(0).all() and grads[0][~held & (p.adv != 0) & (p.weight > 0)].ne(0).all()


def test_groups_of_a_winner_and_a_loser_have_the_gradient_of_dpo():
    """d DPO = b / G d DGPO at A = +-1, G = 2."""
    dpo, dgpo = DPO(beta=3.0), DGPO(beta=3.0, clip=None)
    (pairs,) = points(dpo, torch.tensor([[1.0, -1], [-1, 1], [1, -1]]))
    v, ref = normal(2, len(pairs), D, seed=1)
    p = fixed(dgpo, pairs, current=v.requires_grad_(), ref=ref)
    ours, theirs = (torch.autograd.grad(loss, v)[0] for loss in (dgpo.loss(p).sum(), dpo.loss(p).sum() / 2))
    assert_close(3.0 / 2 * ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reference", ["ref", "old"])
def test_at_the_reference_every_group_pulls_by_a_half(reference):
    algorithm = DGPO(reference=reference)
    (p,) = points(algorithm, ADV)
    v = normal(len(p), D, seed=1).requires_grad_()
    p = fixed(algorithm, p, current=v, old=v.detach(), ref=v.detach())
    assert algorithm.metrics(p)["pull"].eq(0.5).all() and algorithm.metrics(p)["clip_frac"].eq(0).all()
    (grad,) = torch.autograd.grad(algorithm.loss(p).sum(), v)
    u = p.items["eps"] - p.items["x0"]
    assert_close(grad, p.adv[:, None] * (v - u).detach() / D)


def test_a_group_that_got_worse_pulls_harder():
    algorithm = DGPO(beta=2.0, clip=None)
    (p,) = points(algorithm, ADV)
    u = p.items["eps"] - p.items["x0"]
    ref = u + normal(len(p), D, seed=1)
    pulls = []
    for side in (-1, 1):  # better samples are matched better than by the base, then worse
        v = u + (ref - u) * (1 + 0.3 * side * p.adv.sign())[:, None]
        pulls.append(algorithm.metrics(fixed(algorithm, p, current=v, ref=ref))["pull"])
    assert (pulls[0] < 0.5).all() and (pulls[1] > 0.5).all()


def test_no_advantage_no_gradient():
    algorithm = DGPO()
    (p,) = points(algorithm, torch.zeros(2, 4))
    v, old, ref = normal(3, len(p), D, seed=1)
    p = fixed(algorithm, p, current=v.requires_grad_(), old=old, ref=ref)
    assert torch.autograd.grad(algorithm.loss(p).sum(), v)[0].eq(0).all()


def test_a_group_shares_its_draws():
    (p,) = points(DGPO(draws=2), ADV)
    for name, value in {"t": p.t, "eps": p.items["eps"], "block": p.items["block"]}.items():
        groups = value.view(2 * len(ADV), ADV.shape[1], -1)
        assert groups.eq(groups[:, :1]).all(), name
        assert len(groups[:, 0].unique(dim=0)) == len(groups) or name == "t"


@pytest.mark.parametrize("noisiest", [1, 3, None])
def test_times_are_the_noisiest_of_the_grid(noisiest):
    (p,) = points(DGPO(draws=8, noisiest=noisiest), normal(6, 4, seed=0))
    grid = torch.linspace(1, 0, 9)[:-1][:noisiest]
    assert sorted(set(p.t.tolist())) == sorted(grid.tolist())


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_the_micro_batch_does_not_change_the_gradient(rows, updates):
    algorithm = DGPO(beta=3.0, draws=2, clip=0.2)
    (current, w), (old, _), (ref, _) = (drift(seed) for seed in (1, 2, 3))
    for p in points(algorithm, ADV, WEIGHT, updates):
        whole, split = (gradient(algorithm, p, n, w, current=current, old=old, ref=ref) for n in (10**6, rows))
        assert whole.abs().max() > 0
        assert_close(split, whole, rtol=1e-12, atol=1e-14)


def test_groups_never_influence_each_other():
    algorithm = DGPO(beta=2.0)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), D, seed=1)
    before = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    v[5] += 0.1
    after = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    assert (before == after).view(3, 4).all(1).tolist() == [True, False, True]
    assert (before != after)[4:8].all(), "its own group feels it"


def test_rows_in_another_order_have_their_losses():
    algorithm = DGPO(beta=2.0)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), D, seed=1)
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(0))
    straight = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    moved = fixed(algorithm, reordered(p, order), current=v[order], old=old[order], ref=ref[order])
    assert_close(algorithm.loss(moved), straight[order], rtol=1e-12, atol=1e-14)


ONLINE = ("algorithm={name: dgpo}", "sampler={steps: 8}")
REFUSED = {
    "broken groups": (
        ("data.prompts_per_step=3", "optimiser.updates=2"),
        "optimiser.updates = 2 does not divide the groups of a process = 3: .* take 1 or 3 updates",
    ),
    "more times than there are": (
        ("algorithm.noisiest=9",),
        "algorithm.noisiest = 9 with algorithm.times = grid and sampler.steps = 8: .* at most 8, or null",
    ),
    "times that are no grid": (
        ("algorithm.noisiest=4", "algorithm.times=uniform"),
        "algorithm.noisiest = 4 with algorithm.times = uniform .* take algorithm.times=grid",
    ),
}


@pytest.mark.parametrize("changes, said", REFUSED.values(), ids=REFUSED)
def test_settings_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        plan(config(*ONLINE, *changes))


@pytest.mark.parametrize("wrong", [{"beta": -1.0}, {"clip": 0.0}, {"clip": 1.0}, {"noisiest": 0}], ids=str)
def test_wrong_numbers_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"algorithm.{name} is {value}")):
        DGPO(**wrong)
