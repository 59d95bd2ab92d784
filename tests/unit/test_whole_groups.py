"""Objectives that compare the samples of a group: any micro-batch gives their gradient, no group feels another."""

import pytest
from torch.testing import assert_close

from flowrl.algorithms.crd import CRD
from flowrl.algorithms.dgpo import DGPO
from tests.given import drift, fixed, gradient, normal, points

SIZES = 3, 4
ADV, WEIGHT = normal(*SIZES, seed=9), (normal(*SIZES, seed=8) > -1).double()
OBJECTIVES = {
    "dgpo": lambda draws: DGPO(beta=3.0, draws=draws, clip=0.2),
    "crd, uniform": lambda draws: CRD(draws=draws, temperature=-1.0),
    "crd, better alone": lambda draws: CRD(draws=draws, temperature=0.0),
    "crd, both directions": lambda draws: CRD(draws=draws, temperature=0.5),
}
EACH = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@EACH
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_the_micro_batch_does_not_change_the_gradient(rows, updates, objective):
    algorithm = objective(2)
    (current, w), (old, _), (ref, _) = (drift(seed) for seed in (1, 2, 3))
    for p in points(algorithm, ADV, WEIGHT, updates):
        whole, split = (gradient(algorithm, p, n, w, current=current, old=old, ref=ref) for n in (10**6, rows))
        assert whole.abs().max() > 0
        assert_close(split, whole, rtol=1e-12, atol=1e-14)


@EACH
def test_groups_never_influence_each_other(objective):
    algorithm = objective(1)
    (p,) = points(algorithm, ADV)
    v, old, ref = normal(3, len(p), 5, seed=1)
    before = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    v[5] += 0.1
    after = algorithm.loss(fixed(algorithm, p, current=v, old=old, ref=ref))
    assert (before == after).view(SIZES).all(1).tolist() == [True, False, True]
    assert (before != after).view(SIZES)[1].sum() > 1, "its own group feels it"
