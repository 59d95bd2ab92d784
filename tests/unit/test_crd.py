"""CRD: the paper's loss, what centring cancels, the guided teacher, whole groups, any micro-batch."""

import re

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.crd import CRD
from tests.given import D, fixed, normal, points, reordered

ADV = torch.tensor([[0.3, -1.2, 0.9, 0.0], [-0.5, 0.1, 0.2, 2.7], [1.0, -2.0, 0.4, -0.4]])
WEIGHT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]])
TEMPERATURES = pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.3], ids=["uniform", "hard", "softmax"])


@TEMPERATURES
def test_rows_in_another_order_have_their_losses(temperature):
    algorithm = CRD(temperature=temperature, teacher_guidance=1.0)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), D, seed=1)
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(0))
    straight = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    moved = fixed(algorithm, reordered(p, order), current=v[order], old=old[order], ref=ref[order])
    assert_close(algorithm.loss(moved), straight[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"adv_max": -1.0}, {"kl": -0.1}, {"temperature": 0.005}], ids=str)
def test_wrong_numbers_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"algorithm.{name} is {value}")):
        CRD(**wrong)
