"""Group advantages and pairs against flow_grpo, DanceGRPO, MixGRPO and Flow-Factory.

Their divisors differ from ours only in the term added to the std and in the degrees of freedom. Rewards scaled by 1e8
make our term vanish, which compares the formulas themselves; theirs (1e-8, or none) stays below the tolerance.
"""

import math

import pytest
import torch

from flowrl.credit import best_worst, group_advantages

BIG = 1e8
ONE = torch.ones(1, dtype=torch.float64)


@pytest.fixture
def ragged(golden):
    """Groups of 1 to 7 samples; those of 3 and 4 are constant."""
    d = golden("b_group_advantage.npz")
    return d, (d["group"] == 3) | (d["group"] == 4)


@pytest.fixture
def equal(golden):
    """Three groups of G = 12; reward_a is constant in the second."""
    d = golden("b_equal_groups.npz")
    d["group"] = torch.arange(36) // d["G"]
    return d, d["group"] == 1


@pytest.mark.parametrize(
    ("normalise", "clip", "array"),
    [
        ("global", None, "grpo_global_std"),
        ("group", None, "grpo_group_std"),
        ("group", 5.0, "grpo_group_std_clipped"),
    ],
    ids=["global", "group", "group-clipped"],
)
def test_flow_grpo(ragged, assert_golden, normalise, clip, array):
    d, constant = ragged
    adv, weight = group_advantages(d["reward"][:, None], d["group"], ONE, normalise, clip)
    assert_golden(adv[~constant], d[array][~constant], 1e-9)
    assert (adv[constant] == 0).all()
    assert weight.tolist() == [float((d["group"] == one).sum() > 1) for one in d["group"]]


def test_flow_grpo_pairs(ragged):
    d, constant = ragged
    theirs = d["dpo_groups_ge2"].masked_fill(constant, 0)
    ours = torch.zeros_like(theirs)
    pairs = best_worst(d["reward"], d["group"])
    ours[pairs[:, 0]], ours[pairs[:, 1]] = 1, -1
    assert torch.equal(ours, theirs.nan_to_num(0))
    assert (d["group"][pairs[:, 0]] == d["group"][pairs[:, 1]]).all()


def test_dance(equal, assert_golden):
    d, constant = equal
    adv, _ = group_advantages(BIG * d["reward_a"][:, None], d["group"], ONE, "group", None)
    unbiased = math.sqrt(1 - 1 / float(d["G"]))  # they divide by G - 1
    assert_golden(unbiased * adv[~constant], d["dance_f64"][~constant], 1e-6)
    assert (adv[constant] == 0).all()


def test_mixgrpo_weighs_normalised_columns(equal, assert_golden):
    d, _ = equal
    rewards = BIG * torch.stack([d["reward_a"], d["reward_b"]], 1)
    adv, _ = group_advantages(rewards, d["group"], torch.stack([d["w_a"], d["w_b"]]), "group", None)
    assert_golden(math.sqrt(1 - 1 / float(d["G"])) * adv, d["mix_trim0.0"], 1e-6)


@pytest.mark.parametrize("normalise", ["group", "global"])
def test_flow_factory_weighted_sum(equal, assert_golden, normalise):
    d, _ = equal
    mixed = d["w_a"] * d["reward_a"] + d["w_b"] * d["reward_b"]
    adv, _ = group_advantages(BIG * mixed[:, None], d["group"], ONE, normalise, None)
    assert_golden(adv, d[f"ff_ws_{normalise}"], 1e-9)


def test_flow_factory_gdpo(equal, assert_golden):
    d, _ = equal
    rewards = BIG * torch.stack([d["reward_a"], d["reward_b"]], 1)
    adv, _ = group_advantages(rewards, d["group"], BIG * torch.stack([d["w_a"], d["w_b"]]), "gdpo", None)
    assert_golden(adv, d["ff_gdpo"], 1e-9)
