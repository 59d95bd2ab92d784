"""Diffusion-DPO: the paper's loss, which pairs are formed, what they share, and to which updates they go."""

import math
import re

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.dpo import DPO
from flowrl.config_file import ConfigError
from flowrl.plan import plan
from tests import given
from tests.given import D, drift, fixed, normal, points, reordered
from tests.reference.dpo import pair_loss
from tests.unit.test_config import config

ADV = torch.tensor([[0.3, -1.2, 0.9, 0.0], [-0.5, 0.1, 0.2, 1.7], [1.0, -1.0, 0.4, -0.4]])


@pytest.mark.parametrize("reference", ["ref", "old"])
@pytest.mark.parametrize("pairs, draws, beta", [(1, 1, 2.0), (2, 3, 0.7)], ids=["one pair", "two pairs, three draws"])
def test_loss_and_gradient_are_those_of_the_paper(reference, pairs, draws, beta):
    algorithm = DPO(pairs=pairs, draws=draws, beta=beta, reference=reference)
    (p,) = points(algorithm, ADV)
    v, anchor = normal(2, len(p), D, seed=20)
    p = fixed(algorithm, p, **{"current": v.requires_grad_(), reference: anchor})
    sides = list(zip(p.items["x0"], p.items["eps"].double(), v, anchor, strict=True))
    paper = torch.stack([pair_loss(*sides[i : i + 2], beta) for i in range(0, len(sides), 2)])
    losses = algorithm.loss(p)
    assert len(losses) == 2 * len(paper) == 2 * len(ADV) * pairs * draws
    assert_close(losses.view(-1, 2), paper[:, None].expand(-1, 2), rtol=1e-10, atol=0)
    ours, theirs = (torch.autograd.grad(loss.mean(), v)[0] for loss in (losses, paper))
    assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_at_the_reference_the_loss_is_log_2_and_pulls_winners_as_hard_as_it_pushes_losers():
    algorithm = DPO(beta=6.0)
    (p,) = points(algorithm, ADV)
    v = normal(len(p), D, seed=0).requires_grad_()
    p = fixed(algorithm, p, current=v, ref=v.detach())
    losses = algorithm.loss(p)
    assert_close(losses, torch.full_like(losses, math.log(2)))
    assert algorithm.metrics(p)["accuracy"].eq(0.5).all() and algorithm.metrics(p)["margin"].eq(0).all()
    (grad,) = torch.autograd.grad(losses.sum() / 2, v)
    side = torch.tensor([1.0, -1.0]).repeat(len(p) // 2)[:, None]
    assert_close(grad, 6 / 2 * side * (v - p.items["eps"] + p.items["x0"]).detach() / D)


def test_the_other_way_round_the_margin_is_negative():
    algorithm = DPO(beta=2.0)
    (p,) = points(algorithm, ADV)
    swap = torch.arange(len(p)).view(-1, 2).flip(1).flatten()
    v, ref = normal(2, len(p), D, seed=1)
    one, other = (
        fixed(algorithm, p, current=v, ref=ref),
        fixed(algorithm, reordered(p, swap), current=v[swap], ref=ref[swap]),
    )
    assert_close(algorithm.margin(other), -algorithm.margin(one))
    assert_close(algorithm.loss(other) - algorithm.loss(one), algorithm.margin(one).repeat_interleave(2))
    metrics = algorithm.metrics(one)
    assert_close(metrics["accuracy"], (metrics["margin"] > 0).double())


PAIRS = {
    "two each": (ADV, None, 2, [[2, 1], [0, 3], [7, 4], [6, 5], [8, 9], [10, 11]], [1] * 6),
    "all equal": (torch.tensor([[2.0, 2, 2], [1, 3, 2]]), None, 1, [[0, 0], [4, 3]], [0, 1]),
    "second of three": (torch.tensor([[1.0, 3, 2, 0]]), torch.tensor([[1, 1, 1, 0]]), 2, [[1, 0], [0, 0]], [1, 0]),
    "no verdict": (torch.tensor([[0.0, 9, -9, 1]]), torch.tensor([[1, 0, 0, 1]]), 1, [[3, 0]], [1]),
    "one verdict": (torch.tensor([[5.0, 1]]), torch.tensor([[1, 0]]), 1, [[0, 0]], [0]),
    "none at all": (torch.zeros(2, 4), torch.zeros(2, 4), 2, [[0, 0], [0, 0], [4, 4], [4, 4]], [0] * 4),
}


@pytest.mark.parametrize("adv, weight, pairs, rows, formed", PAIRS.values(), ids=PAIRS)
def test_the_rows_are_the_same_in_number_and_a_pair_that_is_not_formed_weighs_nothing(adv, weight, pairs, rows, formed):
    (p,) = points(DPO(pairs=pairs), adv, weight)
    assert p.items["sample"].view(-1, 2).tolist() == rows
    assert p.weight.view(-1, 2).tolist() == [[w, w] for w in formed]
    assert p.unit == 2 and p.item.tolist() == list(range(2 * len(rows)))
    assert_close(p.x, (1 - p.t[:, None]) * p.items["x0"] + p.t[:, None] * p.items["eps"])


def test_a_constant_added_to_the_rewards_changes_no_pair():
    (p,), (q,) = (points(DPO(pairs=2), ADV + shift) for shift in (0, 3))
    assert p.items["sample"].equal(q.items["sample"]) and p.x.equal(q.x)


def test_a_pair_shares_its_draws_and_no_two_pairs_do():
    (p,) = points(DPO(pairs=2, draws=2), ADV)
    for name, value in {"t": p.t, "eps": p.items["eps"], "block": p.items["block"]}.items():
        pairs = value.view(len(p) // 2, 2, -1)
        assert pairs[:, 0].equal(pairs[:, 1]), name
        assert len(pairs[:, 0].unique(dim=0)) == len(p) // 2, name


def test_the_draws_of_a_pair_depend_on_its_group_alone():
    (whole,), (alone,) = points(DPO(pairs=2), ADV), points(DPO(pairs=2), ADV[1:2], first=1)
    mine = torch.isin(whole.items["sample"], torch.arange(4, 8))
    assert whole.t[mine].equal(alone.t) and whole.items["eps"][mine].equal(alone.items["eps"])
    (better,) = points(DPO(pairs=2), ADV.flip(1))  # others win, the noise stays
    assert whole.items["eps"].equal(better.items["eps"]) and not whole.items["sample"].equal(better.items["sample"])


@pytest.mark.parametrize("groups, pairs, updates", [(4, 1, 2), (3, 2, 2), (6, 2, 3), (1, 2, 1)])
def test_every_update_has_an_equal_share_of_the_pairs(groups, pairs, updates):
    found = points(DPO(pairs=pairs), normal(groups, 4, seed=0), updates=updates)
    assert [len(p) for p in found] == [2 * groups * pairs // updates] * updates
    for u, p in enumerate(found):
        group, k = p.items["block"][::2] // pairs, p.items["block"][::2] % pairs
        assert ((group + k) % updates == u).all()
    assert sorted(torch.cat([p.items["block"][::2] for p in found]).tolist()) == list(range(groups * pairs))


def test_offline_pairs_are_trained_on_as_they_are():
    """Groups of two with the advantages of a chosen and a rejected picture, in either order."""
    (p,) = points(DPO(), torch.tensor([[1.0, -1], [-1, 1], [1, -1]]))
    assert p.items["sample"].tolist() == [0, 1, 3, 2, 4, 5]
    assert p.weight.eq(1).all() and p.adv.tolist() == [1, -1] * 3


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_the_micro_batch_does_not_change_the_gradient(rows):
    algorithm = DPO(pairs=2, draws=2, beta=3.0)
    weight = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]])
    (p,) = points(algorithm, ADV, weight)
    (current, w), (ref, _) = drift(1), drift(2)
    whole, split = (given.gradient(algorithm, p, n, w, current=current, ref=ref) for n in (10**6, rows))
    assert whole.abs().max() > 0
    assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert all(len(part) % 2 == 0 for part in p.parts(rows))


def test_pairs_never_influence_each_other():
    algorithm = DPO(beta=2.0)
    (p,) = points(algorithm, ADV)
    v, ref = normal(2, len(p), D, seed=1)
    before = algorithm.loss(fixed(algorithm, p, current=v, ref=ref))
    v[2:4] += 1
    after = algorithm.loss(fixed(algorithm, p, current=v, ref=ref))
    assert (before == after).tolist() == [True, True, False, False, True, True]


def test_pairs_in_another_order_have_their_losses():
    algorithm = DPO(beta=2.0)
    (p,) = points(algorithm, ADV)
    v, ref = normal(2, len(p), D, seed=1)
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    straight = algorithm.loss(fixed(algorithm, p, current=v, ref=ref))
    turned = algorithm.loss(fixed(algorithm, reordered(p, order), current=v[order], ref=ref[order]))
    assert turned.equal(straight[order])


ONLINE = ("algorithm={name: dpo}", "sampler={steps: 8}")
REFUSED = {
    "too many pairs": (
        ("algorithm.pairs=3", "data.group_size=4", "optimiser.updates=1"),
        "algorithm.pairs = 3 with data.group_size = 4: .* take data.group_size=6 or fewer pairs",
    ),
    "uneven updates": (
        ("data.prompts_per_step=3", "data.group_size=4", "optimiser.updates=2"),
        "optimiser.updates = 2 does not divide algorithm.pairs = 1 or data.prompts_per_step / processes = 3: .* 1 or 3",
    ),
    "an old policy that nobody reads": (
        ("policy.old={rate: 0.1, cap: 0.9}",),
        "policy.old.rate = 0.1 with algorithm.reference = ref: .* take algorithm.reference=old or remove",
    ),
}


@pytest.mark.parametrize("changes, said", REFUSED.values(), ids=REFUSED)
def test_settings_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        plan(config(*ONLINE, *changes))


@pytest.mark.parametrize(
    "changes",
    [
        ("algorithm.pairs=2", "data.prompts_per_step=3", "data.group_size=4", "optimiser.updates=2"),
        ("algorithm.pairs=3", "data.prompts_per_step=4", "data.group_size=8", "optimiser.updates=4"),
        ("algorithm.reference=old", "policy.old={rate: 0.1, cap: 0.9}"),
    ],
    ids=["updates divide the pairs", "updates divide the prompts", "a lagging reference"],
)
def test_settings_that_make_sense_are_planned(changes):
    planned = plan(config(*ONLINE, *changes))
    c = planned.config
    assert planned.rows_per_update == 2 * c.algorithm.pairs * c.data.prompts_per_step // c.optimiser.updates


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"beta": 0.0}], ids=str)
def test_wrong_numbers_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"algorithm.{name} is {value}")):
        DPO(**wrong)
