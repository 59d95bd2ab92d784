"""Trees as settings of the sampler and of credit: one forward a state, every edge its advantage, GRPO's gradient."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl import draws
from flowrl.algorithms._surrogates import PPO
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.credit import column_advantages, edge_advantages, group_advantages
from flowrl.sample import Sampler, Window, sample
from flowrl.types import Cond, Edges, Roots
from tests.given import fixed
from tests.reference import tree as reference

D, MEAN, STD = 4, 0.7, 0.4
DIRECTION = torch.tensor([1.0, 2.0, -1.0, 0.5])  # of the reward, a . x0
BRANCHES = {0: 2, 3: 2, 6: 2, 9: 2}


def velocity(x, t, cond):
    """E[eps - x0 | x_t = x] for x0 ~ N(MEAN, STD^2)."""
    t = t.view(-1, 1)
    off = (x - (1 - t) * MEAN) / ((1 - t) ** 2 * STD**2 + t**2)
    return (t - (1 - t) * STD**2) * off - MEAN


def roll(size, prompts=1, shared=False, run=velocity, **settings):
    """A rollout of `size` roots for each prompt."""
    group = torch.arange(prompts).repeat_interleave(size)
    roots = Roots(group, group, torch.arange(size).repeat(prompts), group)
    noise = draws.normal((D,), [(p, 0 if shared else i) for p, i in roots.of(torch.arange(len(group)))])
    sampler = Sampler(**{"steps": 4, "kernel": "flow_sde", "eta": 0.7, **settings})
    grid = torch.linspace(1, 0, sampler.steps + 1)
    return sample(run, noise, Cond({}, group), roots, grid, sampler.plan(0, 0), sampler, (0, 0))


def credited(r, adv, how="uniform"):
    """The rollout with the advantages of its leaves and of its edges."""
    weight, tree = torch.ones_like(adv), r.states.root[r.edges.state]
    edge_adv, edge_weight = edge_advantages(adv, weight, r.leaf, r.edges, tree, how)
    return replace(r, adv=adv, weight=weight, edges=replace(r.edges, adv=edge_adv, weight=edge_weight))


def centred(r):
    adv, _ = column_advantages((r.x0 @ DIRECTION)[:, None], r.group, "centre")
    return adv[:, 0].float()


def point(r):
    (p,) = FlowGRPO().points(r, Cond({}, r.roots.prompt), 1, (0, 0))
    return p


def charged(r, moved=0.0, clip=1e-3):
    """(point, losses [I], gradient in v [B, D]) where the velocity is off the rollout's by `moved`."""
    p = point(r)
    v = (velocity(p.x, p.t, None) + moved * p.x).requires_grad_()
    losses = FlowGRPO(surrogate=PPO(clip=clip)).loss(fixed(FlowGRPO(), p, current=v))
    return p, losses.detach(), torch.autograd.grad(losses.sum(), v)[0]


@pytest.mark.parametrize(
    ("k", "d", "leaves", "forwards"), [(3, 3, 27, 13), (2, 3, 8, 7), (2, 4, 16, 15), (4, 3, 64, 21)]
)
def test_the_network_sees_each_state_of_a_window_once(k, d, leaves, forwards):
    """Forward in the rollout and backward in the update, as the paper counts."""
    rows = []

    def counted(x, t, cond):
        rows.append(len(x))
        return velocity(x, t, cond)

    r = roll(1, run=counted, steps=10, window=Window(d, 1), branch=k)
    p, losses, grad = charged(credited(r, centred(r)))
    assert sum(rows[1 : 1 + d]) == len(p) == len(grad) == forwards
    assert len(r.x0) == leaves and len(losses) == sum(k**j for j in range(1, d + 1))


def test_branches_may_be_some_of_the_stochastic_steps():
    """BranchGRPO's four splits of 20 steps: 16 leaves of one forward each step."""
    sampler = Sampler(steps=20, kernel="dance", eta=0.3, branch=BRANCHES)
    eta, branch = sampler.plan(0, 0)
    assert eta == [0.3] * 19 + [0.0] and branch == [BRANCHES.get(k, 1) for k in range(20)]
    rows = []
    r = roll(1, run=lambda x, t, c: rows.append(len(x)) or velocity(x, t, c), **vars(sampler))
    assert rows == [1, *[2] * 3, *[4] * 3, *[8] * 3, *[16] * 10] and len(r.x0) == sampler.leaves == 16
    assert torch.pdist(r.x0).min() > 0
    assert r.edges.state.bincount().tolist() == [2 if int(k) in BRANCHES else 1 for k in (1 - r.states.t) * 20 + 0.5]


def test_a_branching_step_has_its_own_noise_in_the_sample_and_in_its_density():
    r = roll(500, steps=6, kernel="dance", eta=0.3, branch={0: 2, 2: 2}, branch_noise=4.0)
    p = point(credited(r, torch.zeros(len(r.x0))))
    v = velocity(p.x, p.t, None)
    mean = p.x + (p.step["t_next"] - p.t)[:, None] * (
        v + 0.3**2 / (2 * p.t[:, None]) * (p.x + (1 - p.t[:, None]) * v)
    )  # the pull is that of the unscaled eta
    split = torch.isin((1 - p.t).mul(6).round(), torch.tensor([0.0, 2.0]))
    assert p.step["spread"].equal(torch.where(split, 4.0, 1.0))
    std = p.step["spread"] * 0.3 * (p.t - p.step["t_next"]).sqrt()
    z = (p.items["x_next"] - mean[p.item]) / std[p.item, None]
    for branching in (True, False):
        some = z[split[p.item] == branching]
        assert abs(some.std() - 1) < 4 / (2 * some.numel()) ** 0.5
    density = torch.distributions.Normal(mean[p.item], std[p.item, None]).log_prob(p.items["x_next"]).mean(1)
    torch.testing.assert_close(density, p.items["logp"], rtol=1e-5, atol=1e-5)
    assert FlowGRPO().log_ratio(fixed(FlowGRPO(), p, current=v)).equal(torch.zeros(len(p.item)))


REFUSED = {
    "last step": ({"branch": {7: 2}}, r"branch is \{7: 2\}: tree branching at an ODE step, .* steps in \[0, 7\)"),
    "ode": ({"kernel": "ode", "eta": 0.0, "branch": {0: 2}}, "tree branching at an ODE step"),
    "beside the window": ({"window": Window(3, 2), "branch": {2: 2, 5: 2}}, r"step 5 is not .* in \[2, 5\)"),
    "in some windows": ({"window": Window(5, "random"), "branch": {1: 2}}, r"step 1 is not .* in \[2, 5\)"),
    "no child": ({"branch": {0: 0}}, r"sampler.branch is \{0: 0\}: it must be at least 1"),
    "noise of no branch": ({"branch_noise": 4.0}, "sampler.branch_noise is 4: .* needs sampler.branch"),
    "no noise": ({"branch": {0: 2}, "branch_noise": 0.0}, "sampler.branch_noise is 0: .* positive"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_a_tree_that_cannot_grow_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**{"steps": 8, "kernel": "dance", "eta": 0.3, **settings})


def test_branching_where_all_windows_overlap_makes_trees_of_one_shape():
    sampler = Sampler(steps=8, kernel="dance", eta=0.3, window=Window(5, "random"), branch={2: 3, 4: 2})
    assert {math.prod(sampler.plan(0, step)[1]) for step in range(20)} == {6}


@pytest.mark.parametrize(("steps", "size"), [(10, 3), (8, 3), (6, 1)])
def test_the_geometric_law_is_the_papers(steps, size):
    window = Window(size, "random", "geometric")
    places = window.starts(steps)
    assert list(places) == list(range(steps - size))
    want = torch.tensor(reference.window_odds(steps, size, 0.5))
    torch.testing.assert_close(window.odds(len(places)), want)


def test_a_tree_of_one_step_is_grpo_fast_from_one_noise(monkeypatch):
    """w = 1 and k = G: the step's same noise gives the same pictures, losses and, on one row, the same gradient."""
    normal = draws.normal

    def by_child(shape, keys):  # child p of sample i is known as sample i + p
        return normal(shape, [(*key[:4], key[4] + key[6], key[5], 0) if len(key) == 7 else key for key in keys])

    monkeypatch.setattr(draws, "normal", by_child)
    fast = roll(6, shared=True, window=Window(1, 1))
    tree = roll(1, window=Window(1, 1), branch=6)
    assert tree.x0.equal(fast.x0) and tree.edges.logp.equal(fast.edges.logp)
    assert centred(tree).equal(centred(fast))
    (p, losses, grad), (q, wanted, many) = (charged(credited(r, centred(r)), moved=1e-3) for r in (tree, fast))
    assert (len(p), len(q)) == (1, 6)
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, many.sum(0, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["uniform", "mean_logp", "siblings"])
def test_trees_of_one_child_are_trajectory_grpo(how):
    """k = 1: each stochastic step is charged with the advantage of its own sample."""
    r = roll(6, prompts=2, steps=6, window=Window(3, 1))
    adv = centred(r)
    p, losses, _ = charged(credited(r, adv, how), moved=1e-2)
    sample_of = p.items["root"].tolist()
    assert p.adv.equal(adv[sample_of]) and sorted(sample_of) == sorted(list(range(12)) * 3)
    ratio = FlowGRPO().log_ratio(fixed(FlowGRPO(), p, current=velocity(p.x, p.t, None) + 1e-2 * p.x)).exp()
    want = reference.loss([adv[i].item() for i in sample_of], ratio.tolist(), 1e-3)
    assert losses.sum().item() == pytest.approx(want, rel=1e-4)


def test_advantages_are_those_of_a_prompts_leaves_and_root_edges_have_their_subtrees_means():
    """Three trees a prompt: normalised over all their leaves, so that the root edges of the prompt add up to 0."""
    r = roll(3, prompts=2, window=Window(2), branch=3)
    rewards = torch.randn(len(r.x0), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    adv, _ = group_advantages(rewards, r.group, torch.ones(1), clip=None)
    assert r.group.bincount().tolist() == [27, 27]
    for mine in (adv[:27], adv[27:]):
        assert abs(mine.mean()) < 1e-12 and mine.std(correction=0).item() == pytest.approx(1, abs=2e-4)
    edges = credited(r, adv).edges
    roots = edges.adv[edges.parent < 0]
    assert roots.view(2, 9).sum(1).abs().max() < 1e-12
    torch.testing.assert_close(roots, adv.view(18, 3).mean(1))


def forest(seed=0):
    """Four trees that branch at two of their four steps, and advantages with some missing, all below one edge of it."""
    r = roll(4, steps=5, kernel="dance", eta=0.3, branch={0: 2, 2: 3})
    adv = torch.randn(len(r.x0), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = torch.ones(len(adv), dtype=torch.float64)
    weight[[0, 1, 2, 7, 12, 13, 23]] = 0
    edges = replace(r.edges, logp=r.edges.logp.double() + torch.rand(len(r.edges.logp)))
    return adv, weight, r.leaf, edges, r.states.root[r.edges.state]


@pytest.mark.parametrize("how", ["uniform", "mean_logp", "siblings", "depth"])
def test_edges_have_the_advantages_of_the_papers(how):
    adv, weight, leaf, edges, tree = forest()
    got, judged = edge_advantages(adv, weight, leaf, edges, tree, how)
    parent, state = edges.parent.tolist(), edges.state.tolist()
    known = {e: a if w else None for e, a, w in zip(leaf.tolist(), adv.tolist(), weight.tolist(), strict=True)}
    want = reference.values(parent, known, edges.logp.tolist(), "mean_logp" if how == "mean_logp" else "uniform")
    if how == "siblings":
        want = reference.siblings(parent, state, want)
    if how == "depth":
        want = reference.depth(parent, tree.tolist(), want)
    assert judged.tolist() == [float(a is not None) for a in want] and 0 in judged
    torch.testing.assert_close(got, torch.tensor([a or 0.0 for a in want], dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", ["siblings", "depth"])
def test_a_constant_added_to_a_prompts_leaves_is_nothing_to_edges_that_are_compared(how):
    adv, weight, *rest = forest()
    one, other = (edge_advantages(a, torch.ones_like(weight), *rest, how)[0] for a in (adv, adv + 3))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["siblings", "depth"])
def test_trees_never_influence_each_other(how):
    adv, weight, leaf, edges, tree = forest()
    moved = adv.clone()
    moved[:6] += torch.arange(6.0)  # the first tree
    one, other = (edge_advantages(a, weight, leaf, edges, tree, how)[0] for a in (adv, moved))
    assert one[tree > 0].equal(other[tree > 0]) and not one[tree == 0].equal(other[tree == 0])


def test_steps_between_two_branchings_share_one_advantage():
    adv, weight, leaf, edges, tree = forest()
    got, _ = edge_advantages(adv, torch.ones_like(weight), leaf, edges, tree, "siblings")
    only = edges.state.bincount()[edges.state] == 1
    assert only.sum() == 4 * (2 + 6)
    torch.testing.assert_close(got[only], got[edges.parent[only]])
    for state in edges.state.unique():
        mine = edges.state == state
        assert only[mine].all() or abs(got[mine].sum()) < 1e-12


def test_depths_have_unit_variance_where_their_nodes_differ():
    """The first tree's leaves are all alike; before its first branching a tree is one node."""
    parent = torch.tensor([-1, -1, 0, 0, 1, 1])
    edges = Edges(torch.tensor([0, 1, 2, 2, 3, 3]), parent, torch.zeros(6, 1), torch.zeros(6))
    adv, tree = torch.tensor([1.5, 1.5, 0.0, 4.0]), torch.tensor([0, 1, 0, 0, 1, 1])
    got, weight = edge_advantages(adv, torch.ones(4), torch.tensor([2, 3, 4, 5]), edges, tree, "depth")
    assert got.tolist() == [0, 0, 0, 0, -1, 1] and weight.tolist() == [1] * 6


def test_a_rollout_without_a_stochastic_step_has_no_edges_to_credit():
    none = torch.empty(0, dtype=torch.long)
    edges = Edges(none, none, torch.empty(0, 1), torch.empty(0))
    for how in ("uniform", "siblings", "depth"):
        adv, weight = edge_advantages(torch.ones(2), torch.ones(2), torch.tensor([-1, -1]), edges, none, how)
        assert adv.shape == weight.shape == (0,)


def gradients(prompts, size, branch, how="uniform"):
    """[prompts, 3, D] the policy gradient in v at each depth, a mean over its edges, and one without bias.

    The mean that centres n edges has a share 1/n of the edge itself: it takes that share off the gradient.
    """
    r = roll(size, prompts, window=Window(3), branch=branch)
    p, _, grad = charged(credited(r, centred(r), how))
    depth = torch.searchsorted(-r.grid, -p.t)
    group = p.items["block"].new_zeros(len(p)).scatter(0, p.item, r.roots.group[p.items["root"]])
    total = torch.zeros(prompts, 3, D).index_put((group, depth), grad, accumulate=True)
    edges = size * branch ** torch.arange(1, 4)
    compared = torch.full((3,), branch) if how == "siblings" else edges
    return total / (edges * (1 - 1 / compared)).view(1, 3, 1)


@pytest.mark.parametrize("how", ["uniform", "siblings"])
def test_a_tree_has_the_gradient_of_grpo_with_less_variance(how):
    """Reward a . x0 on Gaussian data; one tree and ten chains both take 40 forwards."""
    n = 1000
    chains, trees = gradients(n, 10, 1), gradients(n, 1, 3, how)
    error = ((chains.var(0) + trees.var(0)) / n).sqrt()
    assert ((chains.mean(0) - trees.mean(0)).abs() < 4 * error).all()
    along = torch.cosine_similarity(trees.mean(0), DIRECTION[None], dim=1)
    assert (along > 0.99).all()
    spread, theirs = (g.var(0).sum(1) for g in (trees, chains))
    assert spread.sum() < 0.6 * theirs.sum() and (spread[1:] < 0.9 * theirs[1:]).all()
    assert spread[0] < 1.25 * theirs[0]  # three edges of nine leaves each, against ten samples
