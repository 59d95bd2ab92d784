"""The exact velocity of a mixture, against integrals and scores; samplers that use it find the mixture again."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from flowrl import draws
from flowrl.grids import flow_match_euler
from flowrl.models.gaussian import Gaussian
from flowrl.sample import Sampler, sample
from flowrl.types import Cond, Prompt, Roots

CPU, TWO = torch.device("cpu"), Gaussian(means=((-1.0,), (1.5,)), stds=(0.4, 0.8), weights=(1.0, 3.0))
SPACE = Gaussian(means=((0.0, 1.0, -1.0), (2.0, 0.5, 0.0)), stds=(0.5, 1.5), weights=(0.7, 0.3))
ONE = Gaussian(means=((0.7,) * 400,), stds=(0.5,))  # of independent elements


def rows(config, n, dtype=torch.float64):
    """(adapter, x [n, D], t [n])"""
    adapter, rng = config.load(CPU, dtype), torch.Generator().manual_seed(0)
    x = 2 * torch.randn(n, len(config.means[0]), generator=rng, dtype=dtype)
    return adapter, x, torch.linspace(0.02, 0.98, n, dtype=dtype)


def marginal(config, t):
    """The law of x_t at one t, by torch.distributions."""
    means, stds, weights = (torch.tensor(v, dtype=torch.float64) for v in (config.means, config.stds, config.weights))
    std = ((1 - t) ** 2 * stds.square() + t**2).sqrt()
    parts = Independent(Normal((1 - t) * means, std[:, None].expand_as(means)), 1)
    return MixtureSameFamily(Categorical(weights), parts)


def rolled(config, sampler, noise, grid=None):
    """x0 [N, D] from noise [N, D]."""
    adapter, row = config.load(CPU, torch.float64), torch.arange(len(noise))
    roots, cond = Roots(row, row, row, row), Cond({}, row)
    grid, plan = adapter.grid(sampler.steps) if grid is None else grid, sampler.plan(0, 0)
    return sample(adapter.velocity, noise, cond, roots, grid, plan, sampler, (0, 0)).x0.double()


@pytest.mark.parametrize("t", [0.05, 0.4, 0.95])
def test_velocity_is_the_mean_of_noise_minus_data(t):
    """v = E[(x_t - x0) / t | x_t], by the trapezium rule over x0."""
    adapter, x, _ = rows(TWO, 7)
    x0 = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    density = marginal(TWO, 0.0).log_prob(x0[:, None]) + Normal((1 - t) * x0, t).log_prob(x)  # [7, x0]
    mass = (density - density.amax(1, keepdim=True)).exp()
    wanted = (mass * (x - x0) / t).sum(1) / mass.sum(1)
    got = adapter.velocity(x, torch.full((7,), t), Cond({}, torch.arange(7)))
    torch.testing.assert_close(got[:, 0], wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("config", [TWO, SPACE], ids=["2 in 1-d", "2 in 3-d"])
def test_velocity_is_that_of_the_score(config):
    """v = -(x + t score) / (1 - t), the score by autograd of the marginal."""
    adapter, x, t = rows(config, 9)
    x.requires_grad_()
    log_p = torch.stack([marginal(config, float(s)).log_prob(row) for row, s in zip(x, t, strict=True)])
    (score,) = torch.autograd.grad(log_p.sum(), x)
    wanted = -(x + t[:, None] * score) / (1 - t[:, None])
    torch.testing.assert_close(adapter.velocity(x, t, Cond({}, torch.arange(9))), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_everything_is_in_the_dtype_of_the_rows(dtype):
    adapter, x, t = rows(SPACE, 5, dtype)
    cond = adapter.encode([Prompt(i, "") for i in range(5)])
    assert len(cond) == 5
    assert adapter.velocity(x, t.float(), cond).dtype == dtype
    noise = adapter.noise([(0, 1), (0, 2)])
    assert noise.dtype == adapter.grid(4).dtype == dtype
    assert noise.float().equal(draws.normal((3,), [(0, 1), (0, 2)]))


def test_means_and_stds_are_what_is_trained():
    network = TWO.load(CPU, torch.float64).network
    assert {name: p.tolist() for name, p in network.named_parameters()} == {
        "mean": [[-1.0], [1.5]],
        "log_std": pytest.approx([math.log(0.4), math.log(0.8)]),
    }


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_solvers_converge_on_a_mixture_with_their_order(solver, order):
    """Errors fall as n^-order; the truth is a far finer grid."""
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    steps = (128, 256, 512)
    truth = rolled(TWO, Sampler(steps=4096, solver="dpm2"), noise)
    errors = [(rolled(TWO, Sampler(steps=n, solver=solver), noise) - truth).abs().mean() for n in steps]
    slopes = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert slopes == pytest.approx([order] * 2, abs=0.2)


@pytest.mark.parametrize(
    ("kernel", "eta", "std"),
    [
        ("ode", 0.0, 0.494), ("flow_sde", 0.7, 0.496), ("flow_sde", math.sqrt(2), 0.499), ("dance", 0.3, 0.494),
        ("precise", 0.7, 0.491), ("cps", 0.8, 0.394),
    ],
    ids=["ode", "flow", "memoryless", "dance", "precise", "cps, which narrows"],
)  # fmt: skip
def test_marginals_of_kernels(kernel, eta, std):
    """x0 ~ N(.7, .5^2) on 200 steps of the grid of SD3, within 3 standard errors and half a unit of the last digit."""
    noise = torch.randn(100, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0, n = rolled(ONE, Sampler(steps=200, kernel=kernel, eta=eta), noise, flow_match_euler(200, 3.0)), noise.numel()
    assert float(x0.mean()) == pytest.approx(0.7, abs=3 * std / math.sqrt(n))
    assert float(x0.std()) == pytest.approx(std, abs=3 * std / math.sqrt(2 * n) + 5e-4)


@pytest.mark.parametrize("sampler", [Sampler(steps=64, solver="dpm2"), Sampler(steps=80, kernel="flow_sde", eta=1.0)],
                         ids=["ode", "flow_sde"])  # fmt: skip
def test_both_modes_are_found_in_their_shares(sampler, monkeypatch):
    n, rng = 10_000, torch.Generator().manual_seed(1)
    monkeypatch.setattr(draws, "normal", lambda shape, keys: torch.randn(len(keys), *shape, generator=rng))  # fast
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0 = rolled(TWO, sampler, noise)
    wanted = 1 / 4 * Normal(0.0, 1.0).cdf(torch.tensor(-1.0 / 0.4)) + 3 / 4 * Normal(0.0, 1.0).cdf(
        torch.tensor(1.5 / 0.8)
    )
    assert float((x0 > 0).double().mean()) == pytest.approx(float(wanted), abs=4 * math.sqrt(0.2 / n))


def test_guidance_is_refused():
    adapter, x, t = rows(ONE, 2)
    with pytest.raises(ValueError, match="guidance is 4.5"):
        adapter.velocity(x, t, Cond({}, torch.arange(2), guidance=4.5))


def test_it_has_no_pictures():
    with pytest.raises(ValueError, match="no pictures to judge"):
        ONE.load(CPU, torch.float64).decode(torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"means": ()}, "model.means"),
        ({"means": ((0.0,), (0.0, 1.0)), "stds": (1.0, 1.0), "weights": (1.0, 1.0)}, "the same D"),
        ({"stds": (1.0, 1.0)}, r"model.stds is \(1.0, 1.0\)"),
        ({"stds": (0.0,)}, "model.stds"),
        ({"weights": (-1.0,)}, "model.weights"),
    ],
    ids=["no component", "ragged", "too many stds", "a point", "a negative weight"],
)
def test_a_mixture_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Gaussian(**settings)
