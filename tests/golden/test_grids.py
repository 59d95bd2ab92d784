"""Time grids against the stored ones and against the installed diffusers."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl.grids import flow_match_euler, single_shift

STEPS_AND_SHIFT = [(1, 3.0), (4, 3.0), (10, 3.0), (28, 1.0), (40, 3.0), (17, 6.5)]


def test_diffusers_grids(golden):
    entries = golden("g_sigma_grids.json")["diffusers"]
    assert entries
    for entry in entries:
        want = torch.tensor(entry["sigmas"], dtype=torch.float64)
        torch.testing.assert_close(flow_match_euler(entry["n"], entry["shift"]), want, atol=1e-6, rtol=0)


def test_single_shift_grids(golden):
    entries = golden("g_sigma_grids.json")["dance_single_shift"]
    assert entries
    for entry in entries:
        want = torch.tensor(entry["sigmas"], dtype=torch.float64)
        torch.testing.assert_close(single_shift(entry["n"], entry["shift"]), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("steps", "k"), STEPS_AND_SHIFT, ids=lambda value: str(value))
def test_installed_diffusers_has_this_grid(steps, k):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=k)
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(flow_match_euler(steps, k), scheduler.sigmas.double(), atol=1e-6, rtol=0)
