"""DGPO: the paper's loss, what it has in common with DPO, whole groups at one (t, eps), any micro-batch."""

import re

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.dgpo import DGPO
from flowrl.config_file import ConfigError
from flowrl.plan import plan
from tests.given import D, fixed, normal, points, reordered
from tests.unit.test_config import config

ADV = torch.tensor([[0.3, -1.2, 0.9, 0.0], [-0.5, 0.1, 0.2, 1.7], [1.0, -1.0, 0.4, -0.4]])
WEIGHT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]])


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
        "optimiser.updates = 2 does not divide data.prompts_per_step / processes = 3: .* take 1 or 3 updates",
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
