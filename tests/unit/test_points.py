"""Where objectives look: equal shares of every group, the same for any number of processes; draws keyed by sample."""

from dataclasses import replace

import pytest
import torch

from flowrl import flow
from flowrl.algorithms._points import ForwardProcess, ReverseProcess, replay, shares
from flowrl.algorithms._surrogates import PPO
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.nft import NFT
from flowrl.sample import Sampler, Window, sample
from flowrl.types import Cond, Roots

GROUPS, SIZE = 4, 6


def roots(groups):
    """The samples of some groups: prompt g has id 10 + g."""
    g = torch.tensor(groups).repeat_interleave(SIZE)
    member = torch.arange(SIZE).repeat(len(groups))
    return Roots(torch.arange(len(groups)).repeat_interleave(SIZE), 10 + g, member, g)


def rollout(groups=range(GROUPS), **sampler):
    """On the velocity v = x / 2 of points of 5 elements, judged by their sum."""
    who = roots(list(groups))
    noise = torch.stack([torch.full((5,), float(i % 3) - 1) for i in range(len(who))])
    settings = Sampler(steps=4, **sampler)
    cond, grid = Cond({}, torch.arange(len(who))), torch.linspace(1, 0, 5)
    return sample(lambda x, t, c: x / 2, noise, cond, who, grid, settings.plan(7, 3), settings, (7, 3))


def judged(r):
    edges = replace(r.edges, adv=torch.arange(len(r.edges.logp)).float(), weight=torch.ones(len(r.edges.logp)))
    n = len(r.x0)
    return replace(r, adv=torch.linspace(-1, 1, n), weight=torch.ones(n), edges=edges)


def names(r, share):
    return {(int(r.roots.group[i]), int(r.roots.index[i])) for i in share}


@pytest.mark.parametrize("updates", [1, 2, 3, 6])
def test_every_update_has_an_equal_share_of_every_group(updates):
    r = rollout()
    parts = list(shares(r, updates, (7, 3)))
    assert torch.cat(parts).sort().values.equal(torch.arange(GROUPS * SIZE))
    for part in parts:
        assert r.roots.group[part].bincount().tolist() == [SIZE // updates] * GROUPS


def test_shares_do_not_depend_on_the_processes():
    whole = [names(rollout(), part) for part in shares(rollout(), 3, (7, 3))]
    for ranks in ([[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        split = [[names(rollout(g), part) for part in shares(rollout(g), 3, (7, 3))] for g in ranks]
        assert [set().union(*update) for update in zip(*split, strict=True)] == whole


def test_shares_change_from_step_to_step():
    first, second = (next(shares(rollout(), 2, (7, step))) for step in (3, 4))
    assert not first.equal(second)


def test_noised_points_are_the_path_and_keyed():
    r = judged(rollout())
    cond = Cond({}, torch.arange(len(r.x0)))
    algorithm = ForwardProcess(draws=3, times="uniform")
    (p,) = algorithm.points(r, cond, 1, (7, 3))
    t = p.t[:, None]
    torch.testing.assert_close(p.x, (1 - t) * p.items["x0"] + t * p.items["eps"])
    assert p.item.equal(torch.arange(len(p)))
    assert p.adv.equal(r.adv.repeat(3))
    # the same sample has the same draws in any company
    (alone,) = algorithm.points(judged(rollout([2])), Cond({}, torch.arange(SIZE)), 1, (7, 3))
    mine = (r.roots.group.repeat(3) == 2).nonzero().squeeze(1)
    assert p.t[mine].equal(alone.t)
    assert p.items["eps"][mine].equal(alone.items["eps"])


def test_draws_of_a_sample_are_stratified():
    r = judged(rollout())
    (p,) = ForwardProcess(draws=4, times="uniform").points(r, Cond({}, torch.arange(len(r.x0))), 1, (7, 3))
    cells = (p.t.view(4, -1) * 4).long()
    assert cells.equal(torch.arange(4)[:, None].expand_as(cells))


def test_grid_times_are_the_rollouts_own():
    r = judged(rollout())
    (p,) = NFT(draws=4).points(r, Cond({}, torch.arange(len(r.x0))), 1, (7, 3))
    assert sorted(p.t.view(4, -1)[:, 0].tolist()) == r.grid[:-1].sort().values.tolist()


def test_rollout_points_replay_what_was_stored():
    r = judged(rollout(kernel="flow_sde", eta=0.7, window=Window(2, 1), branch=2))
    points = list(ReverseProcess().points(r, Cond({}, torch.arange(len(r.roots))), 2, (7, 3)))
    assert sum(len(p) for p in points) == len(r.states.t)
    assert sum(len(p.item) for p in points) == len(r.edges.logp)
    for p in points:
        assert replay(p, p.x / 2).equal(p.items["logp"])


@pytest.mark.parametrize("rows", [1, 3, 5, 100])
def test_rows_of_a_point_keep_their_items(rows):
    r = judged(rollout(kernel="flow_sde", eta=0.7, window=Window(2, 0), branch=3))
    (p,) = ReverseProcess().points(r, Cond({}, torch.arange(len(r.roots))), 1, (7, 3))
    parts = [p.rows(start, start + rows) for start in range(0, len(p), rows)]
    assert torch.cat([part.adv for part in parts]).equal(p.adv)
    leaving = torch.cat([part.x[part.item] for part in parts])
    assert leaving.equal(p.x[p.item])


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guard"])
def test_ratio_is_one_and_gradient_is_the_policy_gradient(guard):
    """At the old policy: d L / d v = A z c_v sqrt(-dt) / (s D), with z the stored noise; Guard's is A z c_v / D."""
    r = judged(rollout(kernel="flow_sde", eta=0.7))
    (p,) = ReverseProcess().points(r, Cond({}, torch.arange(len(r.roots))), 1, (7, 3))
    v = (p.x / 2).requires_grad_()
    p.read = {"current": v, "old": v.detach()}.__getitem__
    algorithm = FlowGRPO(surrogate=PPO(clip=1e-3), guard=guard)
    assert algorithm.log_ratio(p).exp().equal(torch.ones(len(p.item)))
    algorithm.loss(p).sum().backward()
    mean, std = (part[p.item] for part in flow.step(p.kernel, p.x, v.detach(), *p.how))
    z = (p.items["x_next"] - mean) / std[:, None]
    dt, t = p.step["t_next"] - p.t, p.t.clamp(max=p.cap)
    rate = p.t / (1 - t) * 0.49
    c_v = 1 + rate * (1 - p.t) / (2 * p.t)
    weight = c_v if guard else c_v * (-dt).sqrt() / rate.sqrt()
    torch.testing.assert_close(v.grad, (p.adv * weight)[:, None] * z / 5, rtol=1e-3, atol=1e-4)


def test_zero_advantage_has_zero_gradient_at_the_old_policy():
    r = judged(rollout())
    (p,) = NFT(draws=2).points(r, Cond({}, torch.arange(len(r.x0))), 1, (7, 3))
    v = torch.ones_like(p.x).requires_grad_()
    p.read = {"current": v, "old": v.detach()}.__getitem__
    p.adv = torch.zeros_like(p.adv)
    NFT().loss(p).sum().backward()
    assert v.grad.abs().max() < 1e-7
