"""Path identities, kernels on data whose velocity is known in closed form, and log-probs."""

import math

import numpy as np
import pytest
import torch

from flowrl.flow import (
    KERNELS,
    LOG_PROBS,
    clean,
    interpolate,
    like,
    mean_sq,
    noise,
    replay,
    step,
)
from flowrl.grids import flow_match_euler, single_shift
from tests.given import log_prob

M, S = 0.7, 0.5  # the data of the closed forms: N(M, S^2)
NOISY = ["flow_sde", "dance", "cps", "precise", "edm_churn"]


def velocity(x, t):
    """E[eps - x0 | x_t = x] of Gaussian data."""
    variance = (1 - t) ** 2 * S**2 + t**2
    return (t - (1 - t) * S**2) / variance * (x - (1 - t) * M) - M


def take(kernel, x, v, t, t_next, eta, cap=1.0):
    """One step of every row of x [B, *L] at the same times."""
    return step(kernel, x, v, *(torch.full((len(x),), value, dtype=torch.float64) for value in (t, t_next, eta)), cap)


def affine(kernel, field, t, t_next, eta, cap=1.0):
    """(slope, offset, std) of a step along a velocity field that is affine in x."""
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    mean, std = take(kernel, x, field(x, t), t, t_next, eta, cap)
    return (mean[1] - mean[0]).item(), mean[0].item(), std[0].item()


def final_law(kernel, grid, eta):
    """Exact mean and std of the samples a chain of steps makes from N(0, 1), for Gaussian data."""
    mean, variance = 0.0, 1.0
    for t, t_next in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        slope, offset, std = affine(kernel, velocity, t, t_next, eta, grid[1].item())
        mean, variance = slope * mean + offset, slope**2 * variance + std**2
    return mean, math.sqrt(variance)


@pytest.fixture
def batch():
    """x, v [5, 3, 4, 2] in float64 with rows at the ends of the grid and inside it."""
    rng = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, 5, 3, 4, 2, generator=rng, dtype=torch.float64)
    t = torch.tensor([1.0, 0.96, 0.7, 0.3, 0.01], dtype=torch.float64)
    return x, v, t, torch.tensor([0.96, 0.9, 0.5, 0.01, 0.0], dtype=torch.float64)


def test_clean_and_noise_invert_interpolation(batch):
    x0, eps, t, _ = batch
    x = interpolate(x0, eps, t)
    torch.testing.assert_close(x[3], 0.7 * x0[3] + 0.3 * eps[3])
    torch.testing.assert_close(clean(x, eps - x0, t), x0)
    torch.testing.assert_close(noise(x, eps - x0, t), eps)


def test_mean_sq_is_per_row(batch):
    x = batch[0]
    torch.testing.assert_close(mean_sq(x), torch.stack([(row**2).sum() / 24 for row in x]))


@pytest.mark.parametrize(
    ("stored", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=["bf16", "fp32", "fp64"],
)
@pytest.mark.parametrize("kernel", NOISY)
def test_elements_are_computed_in_float32_at_least(batch, kernel, stored, computed):
    x, v, t, t_next = batch
    x, v, eta = x.to(stored), v.to(stored), torch.full_like(t, 0.7)
    mean, std = step(kernel, x, v, t, t_next, eta, 0.96)
    exact, _ = step(kernel, x.double(), v.double(), t, t_next, eta, 0.96)
    assert {mean.dtype, std.dtype, interpolate(x, v, t).dtype, mean_sq(x).dtype, like(t, x).dtype} == {computed}
    torch.testing.assert_close(mean.double(), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("kernel", NOISY)
def test_eta_zero_is_the_ode_bitwise(batch, kernel, dtype):
    x, v, t, t_next = batch
    times = (t, t_next, torch.zeros_like(t), 0.96)
    mean, std = step(kernel, x.to(dtype), v.to(dtype), *times)
    assert torch.equal(mean, step("ode", x.to(dtype), v.to(dtype), *times)[0])
    assert not std.any()


def test_each_row_has_its_own_times(batch):
    x, v, t, t_next = batch
    eta = torch.tensor([0.0, 0.2, 0.7, 1.0, 0.5], dtype=torch.float64)
    for kernel in KERNELS:
        mean, std = step(kernel, x, v, t, t_next, eta, 0.96)
        for b in range(5):
            one = slice(b, b + 1)
            alone = step(kernel, x[one], v[one], t[one], t_next[one], eta[one], 0.96)
            assert torch.equal(alone[0], mean[one]) and torch.equal(alone[1], std[one])


def test_euler_has_order_one():
    """The flow map of Gaussian data is x0 = M + S x1."""
    counts, errors = np.array([20, 40, 80, 160, 320]), []
    for steps in counts:
        x = torch.tensor([[1.3]], dtype=torch.float64)
        for t, t_next in torch.linspace(1, 0, steps + 1, dtype=torch.float64).unfold(0, 2, 1).tolist():
            x, _ = take("ode", x, velocity(x, t), t, t_next, 0.0)
        errors.append(abs(x.item() - (M + S * 1.3)))
    assert np.polyfit(np.log(counts), np.log(errors), 1)[0] == pytest.approx(-1, abs=0.1)


MARGINALS = [
    pytest.param("ode", 0.0, 0.494, id="ode"),
    pytest.param("flow_sde", 0.7, 0.496, id="flow_sde-0.7"),
    pytest.param("flow_sde", math.sqrt(2), 0.499, id="flow_sde-memoryless"),
    pytest.param("dance", 0.3, 0.494, id="dance-0.3"),
    pytest.param("precise", 0.7, 0.491, id="precise-0.7"),
    pytest.param("cps", 0.8, 0.394, id="cps-0.8-narrows"),
]


@pytest.mark.parametrize(("kernel", "eta", "std"), MARGINALS)
def test_marginals_of_gaussian_data(kernel, eta, std):
    got_mean, got_std = final_law(kernel, flow_match_euler(200, 3.0), eta)
    assert got_mean == pytest.approx(M, abs=2e-3)
    assert got_std == pytest.approx(std, abs=2e-3)


@pytest.mark.parametrize(("kernel", "eta", "std"), MARGINALS)
def test_samples_have_the_law_of_the_chain(kernel, eta, std):
    """400 000 float32 samples, within 4 standard errors of the exact law."""
    grid, rng, n = flow_match_euler(200, 3.0), torch.Generator().manual_seed(0), 400_000
    x, z = torch.randn(2, 1, n, generator=rng)
    for t, t_next in grid.unfold(0, 2, 1).tolist():
        mean, noise_std = take(kernel, x, velocity(x, t), t, t_next, eta, grid[1].item())
        x = mean + noise_std[:, None] * z.normal_(generator=rng) if noise_std > 0 else mean
    want_mean, want_std = final_law(kernel, grid, eta)
    assert x.mean().item() == pytest.approx(want_mean, abs=4 * want_std / math.sqrt(n))
    assert x.std().item() == pytest.approx(want_std, abs=4 * want_std / math.sqrt(2 * n))


@pytest.mark.parametrize(("kernel", "eta"), [("flow_sde", 0.7), ("flow_sde", 1.2), ("dance", 0.3), ("precise", 0.7)])
def test_marginals_are_kept_as_the_grid_is_refined(kernel, eta):
    errors = [abs(final_law(kernel, single_shift(steps, 3.0), eta)[1] - S) for steps in (100, 200, 400)]
    assert errors[0] > 1.7 * errors[1] > 1.7**2 * errors[2]


def test_cps_is_biased_on_every_grid():
    assert final_law("cps", single_shift(400, 3.0), 1.0)[1] == pytest.approx(0.343, abs=5e-3)


@pytest.mark.parametrize(
    ("kernel", "std"),
    [("flow_sde", 0.7197), ("cps", 0.6), ("precise", 0.6), ("edm_churn", 0.6), ("ode", 0.6)],
    ids=["flow_sde-excess", "cps", "precise", "edm_churn", "ode"],
)
def test_one_step_on_data_of_one_point(kernel, std):
    """.8 -> .6 at eta = .7: the noise in x' has std .6 where coefficients are preserved."""
    slope, offset, fresh = affine(kernel, lambda x, t: (x - M) / t, 0.8, 0.6, 0.7)
    assert math.hypot(0.8 * slope, fresh) == pytest.approx(std, abs=5e-5)
    assert slope * 0.2 * M + offset == pytest.approx(0.4 * M, abs=1e-12)


def test_constants_of_flow_sde():
    """Coefficient of v over dt, of x, and std along the 10-step grid, at eta = .7."""
    grid = flow_match_euler(10, 3.0).tolist()
    stds = [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063]
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for k, (t, t_next) in enumerate(zip(grid[:-1], grid[1:], strict=True)):
        of_v, std = take("flow_sde", zero, one, t, t_next, 0.7, grid[1])
        assert std.item() == pytest.approx(stds[k], abs=6e-4)
        assert of_v.item() / (t_next - t) == pytest.approx(1.245 if k else 1.0, abs=1e-12)
    of_x, std = take("flow_sde", one, zero, grid[0], grid[1], 0.7, grid[1])
    assert of_x.item() == pytest.approx(0.755, abs=1e-12) and std.item() == pytest.approx(0.7, abs=1e-12)


def test_flow_sde_at_sqrt_two_is_memoryless(batch):
    """drift = x / (1 - t) + 2 v, variance 2 t / (1 - t) per unit of time."""
    x, v = batch[:2]
    mean, std = take("flow_sde", x, v, 0.6, 0.5, math.sqrt(2))
    torch.testing.assert_close(mean, x - 0.1 * (x / 0.4 + 2 * v))
    torch.testing.assert_close(std, torch.full((5,), math.sqrt(0.1 * 2 * 0.6 / 0.4), dtype=torch.float64))


def test_cps_at_one_renoises_the_predicted_data(batch):
    x, v, t, t_next = batch
    mean, std = step("cps", x, v, t, t_next, torch.ones_like(t), 0.96)
    torch.testing.assert_close(mean, like(1 - t_next, x) * clean(x, v, t))
    torch.testing.assert_close(std, t_next)


def test_precise_against_its_definition(batch):
    x, v, t, t_next = batch
    mean, std = step("precise", x, v, t, t_next, torch.full_like(t, 0.7), 0.96)
    capped = torch.tensor([0.96, 0.96, 0.7, 0.3, 0.01], dtype=torch.float64)
    rho = (t_next * (1 - capped) / (t * (1 - t_next))) ** (0.49 / 2)
    want = like(1 - t_next, x) * clean(x, v, t) + like(t_next * rho, x) * noise(x, v, t)
    torch.testing.assert_close(mean, want)
    torch.testing.assert_close(std, t_next * (1 - rho**2).sqrt())
    assert std[-1] == 0 and torch.equal(mean[-1], step("ode", x, v, t, t_next, t, 0.96)[0][-1])


@pytest.mark.parametrize("eta", [0.0025, 0.3])
def test_edm_churn_against_its_definition(batch, eta):
    """The ODE down to r, then noise that raises its share by 1 + eta, then the scale at which x0 has 1 - t' again."""
    x, v, t, t_next = batch
    mean, std = step("edm_churn", x, v, t, t_next, torch.full_like(t, eta), 0.96)
    r = t_next / (1 + eta - eta * t_next)
    torch.testing.assert_close(mean, (x + like(r - t, x) * v) / like(1 + eta * r, x))
    torch.testing.assert_close(std, r * math.sqrt((eta + 1) ** 2 - 1) / (1 + eta * r))


def test_edm_churn_is_cps_of_the_angle_whose_cosine_is_the_noise_kept(batch):
    x, v, t, t_next = batch
    eta = torch.full_like(t, 0.0025)
    angle = torch.acos(1 / (1 + eta)) * (2 / math.pi)
    for got, want in zip(
        step("edm_churn", x, v, t, t_next, eta, 1), step("cps", x, v, t, t_next, angle, 1), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", NOISY)
def test_spread_scales_the_noise_and_leaves_the_mean(batch, kernel):
    x, v, t, t_next = batch
    eta, spread = torch.full_like(t, 0.5), torch.tensor([1.0, 4.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    (mean, std), (same, wide) = (step(kernel, x, v, t, t_next, eta, 0.96, c) for c in (1.0, spread))
    assert torch.equal(mean, same) and torch.equal(wide, spread * std)


def test_gaussian_logp_is_the_mean_log_density(batch):
    mean, x_next = batch[:2]
    std = torch.tensor([0.7, 0.1, 1.0, 2.5, 0.006], dtype=torch.float64)
    density = torch.distributions.Normal(mean, like(std, mean))
    torch.testing.assert_close(log_prob("flow_sde", x_next, mean, std), density.log_prob(x_next).flatten(1).mean(1))


@pytest.mark.parametrize("kernel", LOG_PROBS)
def test_replay_moves_the_mean_and_never_the_sample(batch, kernel):
    """Along d mean / d v, by (x_next - mean) / std^2 per element of a density; CPS has 2 in the place of 1 / std^2."""
    x, v, t, t_next = (some[:4] for some in batch)  # the fifth has no noise in all kernels
    eta, row, x_next = torch.full_like(t, 0.5), torch.arange(len(t)), (x + v).requires_grad_()
    v = v.clone().requires_grad_()
    replay(kernel, x, v, t, t_next, eta, 0.96, 1.0, row, x_next).sum().backward()
    (mean, std), ahead = (step(kernel, x, some, t, t_next, eta, 0.96) for some in (v.detach(), v.detach() + 1))
    pull = like(torch.full_like(std, 2.0) if kernel == "cps" else std**-2, mean)
    torch.testing.assert_close(v.grad, (ahead[0] - mean) * pull * (x_next.detach() - mean) / 24)
    assert x_next.grad is None


def test_every_kernel_with_noise_has_a_log_prob():
    assert set(KERNELS) - set(LOG_PROBS) == {"ode"}
