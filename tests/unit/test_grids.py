"""Time grids and the laws of t."""

import pytest
import torch

from flowrl.grids import LAWS, flow_match_euler, from_grid, shift, single_shift


def test_shift_composes_and_keeps_the_ends():
    s = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(shift(shift(s, 3.0), 2.0), shift(s, 6.0))
    assert torch.equal(shift(s, 1.0), s)
    assert shift(0.0, 3.0) == 0 and shift(1.0, 3.0) == 1


def test_ten_steps_of_the_euler_grid():
    listed = [1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0]
    torch.testing.assert_close(flow_match_euler(10, 3.0), torch.tensor(listed, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("grid", [flow_match_euler, single_shift])
@pytest.mark.parametrize("k", [0.5, 1.0, 3.0])
def test_grids_fall_from_noise_to_data(grid, k):
    t = grid(7, k)
    assert t.dtype == torch.float64 and t.shape == (8,)
    assert t[0] == 1 and t[-1] == 0 and (t.diff() < 0).all()


CDF = {
    "uniform": lambda t: t,
    "logit_normal": lambda t: torch.distributions.Normal(0, 1).cdf(t.logit()),
    "linear": lambda t: t**2,
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_inverts_its_distribution_function(name):
    u = torch.linspace(0, 1, 101, dtype=torch.float64)[1:-1]
    torch.testing.assert_close(CDF[name](LAWS[name](u)), u)
    assert LAWS[name](torch.zeros(1)) == 0


def test_from_grid_takes_every_time_but_the_last_equally_often():
    grid = flow_match_euler(10, 3.0)
    drawn = from_grid((torch.arange(1000) + 0.5) / 1000, grid)
    times, counts = drawn.unique(return_counts=True)
    assert torch.equal(times, grid[:-1].sort().values)
    assert (counts == 100).all()


@pytest.mark.parametrize("steps", [1, 3, 10, 64, 1000])
def test_from_grid_stays_inside_for_the_largest_u(steps):
    grid = single_shift(steps, 1.0)
    assert from_grid(torch.tensor([1 - 2**-24]), grid) == grid[-2]
