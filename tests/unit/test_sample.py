"""The integrator, on data of one Gaussian, whose velocity and flow are known in closed form."""

import math

import numpy as np
import pytest
import torch

from flowrl import draws, flow, grids
from flowrl.sample import DTYPES, Sampler, Window, sample
from flowrl.types import Cond, Roots
from tests.given import log_prob

MEAN, STD, SHAPE, KEY = 0.7, 0.4, (2, 3), (5, 11)
KERNELS = ["flow_sde", "dance", "cps", "precise", "edm_churn"]


class Gaussian:
    """v at x_t = (1 - t) x0 + t eps for x0 ~ N(MEAN + the prompt's row, STD^2); counts the rows of each call."""

    def __init__(self):
        self.rows = []

    def __call__(self, x, t, cond):
        self.rows.append(len(x))
        t, mean = (value.to(x.dtype).view(-1, 1, 1) for value in (t, MEAN + cond.rows))
        off = (x - (1 - t) * mean) / ((1 - t) ** 2 * STD**2 + t**2)
        return (t - (1 - t) * STD**2) * off - mean


def who(n, prompts=2):
    row = torch.arange(n) % prompts
    return Roots(row, row + 10, torch.arange(n) // prompts, row)


def roll(sampler, n=4, rows=slice(None), step=KEY[1], grid=None, velocity=None, **more):
    """A rollout of some of n samples, with noise keyed as a run keys it."""
    roots = Roots(*(value[rows] for value in vars(who(n)).values()))
    noise = draws.normal(SHAPE, [(KEY[0], step, draws.ROOT, *k) for k in roots.of(torch.arange(len(roots)))])
    grid = grids.single_shift(sampler.steps, 1.0).float() if grid is None else grid
    cond, plan = Cond({}, roots.prompt), sampler.plan(KEY[0], step)
    return sample(velocity or Gaussian(), noise, cond, roots, grid, plan, sampler, (KEY[0], step), **more)


def same(one, other):
    """Bitwise, table by table."""
    for a, b in ((one.states, other.states), (one.edges, other.edges)):
        for name, value in vars(a).items():
            assert value is None and vars(b)[name] is None or torch.equal(value, vars(b)[name]), name
    for name in ("x0", "root", "leaf", "grid"):
        assert torch.equal(vars(one)[name], vars(other)[name]), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_chain_is_the_textbook_loop(kernel):
    sampler = Sampler(steps=5, kernel=kernel, eta=0.6)
    got, roots = roll(sampler), who(4)
    for i in range(4):
        prompt, index = int(roots.prompt_id[i]), int(roots.index[i])
        x = draws.normal(SHAPE, [(*KEY, draws.ROOT, prompt, index)])
        for k in range(5):
            t, t_next = got.grid[k : k + 1], got.grid[k + 1 : k + 2]
            v = Gaussian()(x, t, Cond({}, roots.prompt[i : i + 1]))
            noise = torch.full((1,), 0.6 if k < 4 else 0.0)
            mean, std = flow.step(kernel if k < 4 else "ode", x, v, t, t_next, noise, float(got.grid[1]))
            z = draws.normal(SHAPE, [(*KEY, draws.EDGE, prompt, index, k, 0)])
            if k < 4:
                assert torch.equal(got.states.x[4 * k + i], x[0])
            x = mean + std * z if k < 4 else mean
            if k < 4:
                assert torch.equal(got.edges.x_next[4 * k + i], x[0])
        assert torch.equal(got.x0[i], x[0])


def test_a_tree_of_branching_1_is_the_chain():
    same(
        roll(Sampler(steps=5, kernel="flow_sde", eta=0.7)),
        roll(Sampler(steps=5, kernel="flow_sde", eta=0.7, window=Window(size=4), branch=1)),
    )


def test_a_tree_runs_the_network_once_for_each_distinct_state():
    velocity = Gaussian()
    sampler = Sampler(steps=8, kernel="flow_sde", eta=0.7, window=Window(size=3, start=2), branch=3)
    got = roll(sampler, n=1, velocity=velocity)
    assert velocity.rows == [1, 1, 1, 3, 9, 27, 27, 27]
    assert sum(velocity.rows[2:5]) == 13 == len(got.states.t)
    assert len(got.edges.state) == 39 and len(got.x0) == 27
    assert got.edges.state.bincount().tolist() == [3] * 13
    assert torch.pdist(got.x0.flatten(1)).min() > 0


def test_a_trees_tables_point_up_to_the_root():
    sampler = Sampler(steps=5, kernel="flow_sde", eta=0.7, window=Window(size=2, start=1), branch=2)
    got = roll(sampler, n=3)
    states, edges = got.states, got.edges
    for leaf, root in zip(got.leaf.tolist(), got.root.tolist(), strict=True):
        climbed = []
        while leaf >= 0:
            state = int(edges.state[leaf])
            climbed.append(state)
            above = int(edges.parent[leaf])
            assert states.root[state] == root
            if above >= 0:
                assert torch.equal(states.x[state], edges.x_next[above])
            leaf = above
        assert [states.t[s] for s in climbed] == [got.grid[2], got.grid[1]]


@pytest.mark.parametrize("store", ["fp32", "bf16"])
@pytest.mark.parametrize("branch", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_replaying_a_stored_edge_gives_its_stored_logp(kernel, branch, store):
    window = Window(size=3, start=0)
    sampler = Sampler(steps=6, kernel=kernel, eta=0.6, window=window, branch=branch, store=store)
    got = roll(sampler, keep_v=True)
    states, edges = got.states, got.edges
    assert states.x.dtype == edges.x_next.dtype == DTYPES[store]
    x = states.x.float()
    v = Gaussian()(x, states.t, Cond({}, got.roots.prompt[states.root]))
    assert torch.equal(v.to(DTYPES[store]), states.v)
    how = states.t, states.t_next, states.eta, float(got.grid[1]), states.spread
    assert torch.equal(flow.replay(kernel, x, v, *how, edges.state, edges.x_next.float()), edges.logp)
    mean, std = flow.step(kernel, x, v, *how)
    expected = log_prob(kernel, edges.x_next.float(), mean[edges.state], std[edges.state])
    torch.testing.assert_close(edges.logp, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_without_noise_is_the_odes(kernel):
    x, t = torch.randn(4, *SHAPE), torch.tensor([1.0, 0.8, 0.5, 0.2])
    v, still = torch.randn_like(x), torch.zeros(4)
    mean, std = flow.step(kernel, x, v, t, t - 0.1, still, 0.9)
    assert torch.equal(mean, flow.step("ode", x, v, t, t - 0.1, still, 0.9)[0])
    assert not std.any()


def test_without_noise_all_kernels_walk_the_ode():
    ode, quiet = Sampler(steps=6), ([0.0] * 6, [1] * 6)
    roots, noise = who(4), draws.normal(SHAPE, [(i,) for i in range(4)])
    grid, cond = grids.single_shift(6, 1.0).float(), Cond({}, who(4).prompt)
    walks = [
        sample(Gaussian(), noise, cond, roots, grid, quiet, sampler, KEY).x0
        for sampler in (ode, *(Sampler(steps=6, kernel=kernel, eta=0.5) for kernel in KERNELS))
    ]
    assert all(torch.equal(walks[0], walk) for walk in walks[1:])


@pytest.mark.parametrize("branch", [1, 2], ids=["chain", "tree"])
def test_a_sample_does_not_depend_on_its_batch(branch):
    sampler = Sampler(steps=5, kernel="flow_sde", eta=0.7, window=Window(size=2), branch=branch)
    whole = roll(sampler, n=6)
    for rows in ([4, 1], [0], [5, 3, 2]):
        part = roll(sampler, n=6, rows=torch.tensor(rows))
        for place, row in enumerate(rows):
            assert torch.equal(part.x0[part.root == place], whole.x0[whole.root == row])


def test_samples_and_steps_draw_different_noise():
    sampler = Sampler(steps=5, kernel="flow_sde", eta=0.7)
    got, later = roll(sampler, n=8), roll(sampler, n=8, step=KEY[1] + 1)
    assert torch.pdist(got.x0.flatten(1)).min() > 0 and (got.x0 - later.x0).flatten(1).norm(dim=1).min() > 0
    states, edges = got.states, got.edges
    v = Gaussian()(states.x, states.t, Cond({}, got.roots.prompt[states.root]))
    mean, std = flow.step("flow_sde", states.x, v, states.t, states.t_next, states.eta, float(got.grid[1]))
    z = ((edges.x_next - mean) / std.view(-1, 1, 1)).flatten(1)
    assert torch.pdist(z).min() > 0.05  # 32 draws of 6 numbers


@pytest.mark.parametrize("solver, order", [("euler", 1), ("dpm2", 2)])
def test_a_solver_converges_with_its_order(solver, order):
    """On times between which log((1 - t) / t), the coordinate of dpm2, is bounded."""
    z = torch.linspace(-2, 2, 6, dtype=torch.float64).view(1, *SHAPE)

    def exact(t):  # the flow keeps the quantile
        return (1 - t) * MEAN + ((1 - t) ** 2 * STD**2 + t**2) ** 0.5 * z

    roots, cond = who(1), Cond({}, torch.zeros(1, dtype=torch.long))
    counts, errors = [32, 64, 128, 256], []
    for steps in counts:
        sampler, grid = Sampler(steps=steps, solver=solver), torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64)
        x = sample(Gaussian(), exact(0.95), cond, roots, grid, sampler.plan(0, 0), sampler, KEY).x0
        errors.append((x - exact(0.05)).abs().max().item())
    slope = -np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert abs(slope - order) < 0.2


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_the_sde_keeps_the_marginal(eta):
    sampler = Sampler(steps=100, kernel="flow_sde", eta=eta)
    x0 = roll(sampler, n=400).x0[::2].flatten()  # those of the first prompt
    n = len(x0)
    assert abs(x0.mean() - MEAN) < 4 * STD / n**0.5
    assert abs(x0.var() - STD**2) < 4 * STD**2 * (2 / n) ** 0.5 + 0.02 * STD**2  # the grid's own error


def starts(window, steps, rollouts):
    return np.bincount([window.at(steps, 3, i) for i in range(rollouts)], minlength=steps)


@pytest.mark.parametrize(
    "window, expected",
    [
        pytest.param(Window(2, "random"), [1, 1, 1, 1, 1, 1, 0, 0], id="uniform"),
        pytest.param(Window(2, "random", within=(2, 6)), [0, 0, 1, 1, 1, 0, 0, 0], id="uniform within"),
        pytest.param(Window(3, "random", "geometric"), [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 0, 0, 0], id="geometric"),
    ],
)
def test_random_windows_start_by_their_law(window, expected):
    counts, law = starts(window, 8, 2000), np.array(expected) / sum(expected)
    assert (counts[law == 0] == 0).all()
    assert (np.abs(counts - 2000 * law) <= 4 * np.sqrt(2000 * law * (1 - law))).all()


@pytest.mark.parametrize(
    "window, expected",
    [
        pytest.param(Window(2, "sliding"), [0, 1, 2, 3, 0, 1], id="one step a rollout"),
        pytest.param(Window(2, "sliding", every=2), [0, 0, 1, 1, 2, 2, 3, 3, 0], id="every second rollout"),
        pytest.param(Window(2, "sliding", within=(1, 5), stride=2), [1, 3, 1, 3], id="by two steps"),
        pytest.param(
            Window(1, "sliding", every=4, fade=(1, math.log(2))), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 0], id="fading"
        ),
    ],
)
def test_sliding_windows_move_on_and_come_back(window, expected):
    assert [window.at(6, 0, i) for i in range(len(expected))] == expected


def test_only_the_steps_of_the_window_are_stochastic():
    eta, branch = Sampler(steps=6, kernel="dance", eta=0.3, window=Window(2, 1), branch=4).plan(0, 0)
    assert eta == [0, 0.3, 0.3, 0, 0, 0] and branch == [1, 4, 4, 1, 1, 1]
    assert Sampler(steps=3, kernel="dance", eta=0.3).plan(0, 0) == ([0.3, 0.3, 0.0], [1, 1, 1])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "sampler.steps is 0: it must be at least 1"),
        ({"eta": 0.5}, "sampler.kernel is ode with sampler.eta 0.5"),
        ({"kernel": "dance"}, "sampler.kernel is dance with sampler.eta 0"),
        ({"kernel": "dance", "eta": 0.3, "branch": 2}, "set sampler.window"),
        ({"kernel": "dance", "eta": 0.3, "window": Window(8)}, "sampler.window covers 8 steps from 0"),
        ({"kernel": "dance", "eta": 0.3, "window": Window(2, 6)}, "sampler.window covers 2 steps from 6"),
    ],
    ids=["steps", "ode with noise", "sde without noise", "branch without window", "too long", "too late"],
)
def test_a_sampler_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**settings)
