"""FDFO: the paper's loss state by state, where its gradient points, pairs that stay whole, and correlated noise."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flowrl import draws
from flowrl.algorithms._objective import shares
from flowrl.algorithms._surrogates import SPO
from flowrl.algorithms.paired import Paired, partner
from flowrl.credit import edge_advantages, group_advantages
from flowrl.sample import Sampler, sample
from flowrl.session import first_noise
from flowrl.types import Cond, Roots
from tests.given import bound, fixed, normal
from tests.reference import paired as reference

D, STEPS, KEY = 5, 4, (7, 3)


def roots(groups, size):
    group = torch.tensor(groups).repeat_interleave(size)
    return Roots(group - groups[0], 10 + group, torch.arange(size).repeat(len(groups)), group)


def velocity(x, t, cond):
    return torch.tanh(x) + t[:, None]


def rollout(rewards, groups=None):
    """Judged by rewards [G, n], the raw ones up to their group's mean; every first noise is a sample's own."""
    groups = groups or list(range(len(rewards)))
    who = roots(groups, rewards.shape[1])
    noise = draws.normal((D,), who.of(torch.arange(len(who)))).double()
    sampler = Sampler(steps=STEPS, kernel="edm_churn", eta=0.1)
    cond, grid = Cond({}, who.prompt), torch.linspace(1, 0, STEPS + 1)
    r = sample(velocity, noise, cond, who, grid, sampler.plan(*KEY), sampler, KEY, keep_v=True)
    return judged(replace(r, x0=r.x0.double()), rewards.flatten())


def judged(r, rewards):
    adv, weight = group_advantages(rewards[:, None], r.group, torch.ones(1), "centre", None)
    edge_adv, edge_weight = edge_advantages(adv, weight, r.leaf, r.edges, r.states.root[r.edges.state])
    return replace(r, adv=adv, weight=weight, edges=replace(r.edges, adv=edge_adv, weight=edge_weight))


def points(algorithm, r, updates=1):
    return list(algorithm.points(r, Cond({}, r.roots.prompt), updates, KEY))


def point(rewards, **more):
    """(point in float64, its rollout's velocity)."""
    (p,) = points(Paired(), rollout(rewards, **more))
    return p, p.step["v"].double()


REWARDS = normal(2, 4, seed=0)


def test_loss_and_gradient_are_the_papers():
    rewards = REWARDS.clone()
    rewards[1, 2] = torch.nan
    r = rollout(rewards)
    (p,) = points(Paired(), r)
    v_roll = p.step["v"].double()
    v = (v_roll + 0.1 * normal(len(p), D, seed=1)).requires_grad_()
    algorithm = Paired(surrogate=SPO(clip=0.05))
    ours = algorithm.loss(fixed(algorithm, p, current=v, old=v_roll))
    rows = [(p.items["root"] == n).nonzero().squeeze(1) for n in range(8)]
    given = [None if raw != raw else raw for raw in rewards.flatten().tolist()]
    theirs = reference.losses(r.x0, given, [v[k] for k in rows], [v_roll[k] for k in rows], 0.05)
    assert len(theirs) == 6 * (STEPS - 1) and p.weight.sum() == len(theirs)
    for (n, s), want in theirs.items():
        torch.testing.assert_close(ours[rows[n][s]], want, rtol=1e-10, atol=0)
    grads = [torch.autograd.grad(loss, v)[0] for loss in (ours @ p.weight, sum(theirs.values()))]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)
    assert not grads[0][p.items["root"] >= 6].any(), "a pair of one verdict learned"


def test_gradient_at_the_rollouts_velocity_moves_the_data_towards_the_better():
    """d L / d v = 2 dR g / D, so that descent moves x_t - t v along dR g, the same for both of a pair."""
    p, v_roll = point(REWARDS)
    v = v_roll.clone().requires_grad_()
    part = fixed(Paired(), p, current=v, old=v_roll)
    assert Paired().log_ratio(part).equal(torch.zeros(len(p.item), dtype=torch.float64))
    (grad,) = torch.autograd.grad(Paired().loss(part).sum(), v)
    torch.testing.assert_close(grad, 2 * p.adv[:, None] * p.items["g"] / D)
    push = p.adv[:, None] * p.items["g"]
    assert push[p.items["root"] == 0][0].equal(push[p.items["root"] == 1][0])


def test_a_pair_has_half_the_difference_of_its_raw_rewards():
    p, _ = point(REWARDS)
    half = (REWARDS[:, 0::2] - REWARDS[:, 1::2]).flatten() / 2
    want = torch.stack([half, -half], 1).flatten()
    torch.testing.assert_close(p.adv, want[p.items["root"]])


def test_the_ratio_is_that_of_the_two_distances():
    p, v_roll = point(REWARDS)
    v, g = v_roll + 0.1 * normal(len(p), D, seed=1), p.items["g"].double()
    part = fixed(Paired(), p, current=v, old=v_roll)
    want = g.square().mean(1) - (v - (v_roll - g)).square().mean(1)
    torch.testing.assert_close(Paired().log_ratio(part), want, rtol=1e-6, atol=1e-9)


def test_nothing_is_learned_from_equal_rewards_and_a_constant_changes_nothing():
    p, v_roll = point(torch.full((2, 4), 0.3, dtype=torch.float64))
    v = (v_roll + 0.1).requires_grad_()
    loss = Paired().loss(fixed(Paired(), p, current=v, old=v_roll))
    assert not loss.any() and not torch.autograd.grad(loss.sum(), v)[0].any()
    torch.testing.assert_close(point(REWARDS)[0].adv, point(REWARDS + 5)[0].adv)


def test_groups_never_influence_each_other():
    moved = REWARDS.clone()
    moved[0] += torch.arange(4)
    (p, _), (q, _) = point(REWARDS), point(moved)
    second = p.items["root"] >= 4
    assert p.adv[second].equal(q.adv[second]) and not p.adv[~second].equal(q.adv[~second])
    alone, _ = point(REWARDS[1:], groups=[1])
    assert alone.items["g"].equal(p.items["g"][second])
    torch.testing.assert_close(alone.adv, p.adv[second])


@pytest.mark.parametrize("rows", [1, 5, 8, 100])
def test_micro_batches_do_not_change_a_gradient(rows):
    p, _ = point(REWARDS)
    w = (0.1 * normal(D, D, seed=2)).requires_grad_()
    total = torch.zeros_like(w)
    for part in bound(
        Paired(), p, rows, current=lambda p: p.step["v"] + p.x.double() @ w, old=lambda p: p.step["v"].double()
    ):
        total += torch.autograd.grad(Paired().loss(part) @ part.weight, w)[0]
    whole = fixed(Paired(), p, current=p.step["v"] + p.x.double() @ w, old=p.step["v"].double())
    torch.testing.assert_close(total, torch.autograd.grad(Paired().loss(whole) @ p.weight, w)[0])


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_updates_share_out_whole_pairs_the_same_for_any_number_of_processes(updates):
    rewards, at = normal(4, 8, seed=3), {}
    for groups in ([0, 1, 2, 3], [0, 1], [2, 3]):
        r = rollout(rewards[groups], groups=groups)
        for u, p in enumerate(points(Paired(), r, updates)):
            members = [(int(r.roots.group[n]), int(r.roots.index[n])) for n in p.items["root"].unique()]
            assert {(g, i ^ 1) for g, i in members} == set(members)
            assert len(members) == len(groups) * 8 // updates
            for one in members:
                assert at.setdefault(one, u) == u
    assert len(at) == 32


def test_shares_of_single_samples_are_as_without_pairs():
    r = rollout(normal(2, 8, seed=3))
    for one, other in zip(shares(r, 4, KEY), shares(r, 4, KEY, together=1), strict=True):
        assert one.equal(other)
    assert any(one.tolist() != (one ^ 1).sort().values.tolist() for one in shares(r, 4, KEY))


def test_partners_are_neighbours_of_a_group_wherever_its_rows_are():
    group = torch.tensor([3, 1, 3, 1, 3, 3])
    assert partner(group).tolist() == [2, 3, 0, 1, 5, 4]
    assert partner(group)[partner(group)].tolist() == list(range(6))


def test_metrics_tell_the_ratio_and_the_share_of_judged_pairs_that_differ():
    rewards = REWARDS.clone()
    rewards[1, 2], rewards[0, 1] = torch.nan, rewards[0, 0]
    p, v_roll = point(rewards)
    metrics = Paired().metrics(fixed(Paired(), p, current=v_roll, old=v_roll))
    assert metrics["pairs"] @ p.weight / p.weight.sum() == pytest.approx(2 / 3)
    assert metrics["ratio"].equal(torch.ones_like(p.adv))


def test_pairs_estimate_the_gradient_of_a_linear_reward():
    """Isotropic pairs, reward a . x0, D = 64: the mean of dR g is along a, and of its length."""
    pairs, size = 4000, 64
    a = normal(size, seed=4)
    x0 = torch.empty(2 * pairs, size, dtype=torch.float64)
    x0[0::2], x0[1::2] = (0.05 * normal(pairs, size, seed=seed) for seed in (5, 6))
    group = torch.arange(pairs).repeat_interleave(2)
    adv, weight = group_advantages((x0 @ a)[:, None], group, torch.ones(1), "centre", None)
    dr, dx = ((value - value[partner(group)]) / 2 for value in (adv, x0))
    push = (dr[:, None] * dx / (dx.square().mean(1, keepdim=True) + 1e-6)).mean(0)
    assert torch.cosine_similarity(push, a, dim=0) > 0.98 and weight.all()
    assert push.norm() / a.norm() == pytest.approx(1, abs=0.05)


def test_descent_raises_the_reward_of_new_samples():
    """One step on the velocity x -> x (a constant shift), reward a . x0: the shift goes against a, so x0 along it."""
    a, who = torch.tensor([1.0, 2.0, -1.0, 0.5, -2.0]), roots(list(range(200)), 2)
    base = draws.normal((D,), [(int(g),) for g in who.group])
    noise = 0.9975 * base + (1 - 0.9975**2) ** 0.5 * draws.normal((D,), who.of(torch.arange(len(who))))
    sampler, grid, cond = (
        Sampler(steps=8, kernel="edm_churn", eta=0.0025),
        torch.linspace(1, 0, 9),
        Cond({}, who.prompt),
    )

    def gaussian(x, t, cond):  # of N(0, 1/4)
        t = t[:, None]
        return (t - (1 - t) / 4) / ((1 - t) ** 2 / 4 + t**2) * x

    r = sample(gaussian, noise, cond, who, grid, sampler.plan(*KEY), sampler, KEY, keep_v=True)
    (p,) = Paired().points(judged(r, r.x0 @ a), cond, 1, KEY)
    shift = torch.zeros(D, requires_grad=True)
    part = fixed(Paired(), p, current=p.step["v"] + shift, old=p.step["v"])
    (grad,) = torch.autograd.grad(Paired().loss(part).mean(), shift)
    assert torch.cosine_similarity(grad, a, dim=0) > 0.9


def session(shared, paired=False, size=4):
    data = SimpleNamespace(shared_noise=shared, group_size=size)
    config = SimpleNamespace(seed=3, data=data, algorithm=SimpleNamespace(paired=paired))
    return SimpleNamespace(config=config, adapter=SimpleNamespace(noise=lambda keys: draws.normal((2000,), keys)))


@pytest.mark.parametrize("shared", [0.0, 0.6, 0.9975, 1.0])
@pytest.mark.parametrize("paired", [False, True], ids=["group", "pairs"])
def test_shared_noise_is_a_correlation_with_what_is_common(shared, paired):
    """Members of a group, or the two of a pair, correlate by c^2; everybody else by 0; all are standard normal."""
    who = roots([0, 1], 4)
    noise = first_noise(session(shared, paired), who, 0)
    together = who.group * 2 + (who.index // 2 if paired else 0)
    want = torch.where(together[:, None] == together, shared**2, 0.0).fill_diagonal_(1)
    got = noise @ noise.T / noise.shape[1]
    assert (got - want).abs().max() < 5 / 2000**0.5
    if shared == 1:
        assert noise[together == 0].equal(noise[:1].expand(int((together == 0).sum()), -1))


def test_a_first_noise_does_not_depend_on_who_else_is_drawn():
    who = roots([0, 1], 4)
    whole = first_noise(session(0.9, True), who, 0)
    for rows in (torch.tensor([5]), torch.tensor([6, 0])):
        assert first_noise(session(0.9, True), Roots(*(v[rows] for v in vars(who).values())), 0).equal(whole[rows])
    assert not first_noise(session(0.9, True), who, 1).equal(whole)
