"""The slots of a network: what they hold, when they move, and how often the network runs."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn
from torch.testing import assert_close

from flowrl.policy import Averaging, Decay, LoRA, Policy, Slots
from flowrl.types import Cond, Point

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/g_old_policy_decay.json").read_text())
NFT_TYPES = {
    "0": Decay(),
    "1": Decay(rate=0.001, cap=0.5),
    "2": Decay(rate=0.0075, cap=0.999, flat=75),
}
CRD_TYPES = {
    "75-0-0.0075-0.999": Decay(rate=0.0075, cap=0.999, flat=75),
    "0-0-0.02-0.99": Decay(rate=0.02, cap=0.99),
    "0-0-0.01-0.5": Decay(rate=0.01, cap=0.5),
}
SLOTS = ("current", "old", "ref", "average")


class Toy:
    """An adapter on a small network that counts its forwards."""

    lora_targets = ()

    def __init__(self):
        self.network, self.calls = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 0
        self.network.register_forward_hook(self._count)

    def _count(self, *_):
        self.calls += 1

    def velocity(self, x, t, cond):
        return self.network(x)


def policy_of(slots=None, adapter=None):
    return Policy(adapter or Toy(), None, slots or Slots(), seed=0, autocast=None)


def move(policy, by=0.1):
    """One update."""
    with torch.no_grad():
        for p in policy.parameters:
            p.add_(by)
    policy.stepped()


def weights(policy, slot="current"):
    with policy.reading(slot):
        return torch.cat([p.detach().flatten().clone() for p in policy.parameters])


def point(**more):
    x, t, row = torch.randn(2, 3), torch.full((2,), 0.5), torch.arange(2)
    return Point(x, t, Cond({}, row), row, t, t, {}, **more)


@pytest.mark.parametrize("name", NFT_TYPES)
def test_the_decay_schedules_are_nfts(name):
    kept = [NFT_TYPES[name].kept(k) for k in GOLDEN["step"]]
    assert kept == pytest.approx(GOLDEN["nft_type"][name], abs=1e-15)


@pytest.mark.parametrize("name", CRD_TYPES)
def test_the_decay_schedules_are_those_that_start_at_0(name):
    kept = [CRD_TYPES[name].kept(k) for k in GOLDEN["step"]]
    assert kept == pytest.approx(GOLDEN["crd"][name], abs=1e-15)


def test_the_current_weights_are_back_after_an_exception():
    policy = policy_of()
    base = weights(policy)
    move(policy)
    place = [p.data_ptr() for p in policy.parameters]
    with pytest.raises(KeyError), policy.reading("ref"):
        assert torch.equal(torch.cat([p.detach().flatten() for p in policy.parameters]), base)
        raise KeyError
    assert [p.data_ptr() for p in policy.parameters] == place
    assert_close(weights(policy), base + 0.1)
    assert torch.equal(weights(policy, "ref"), base)


def test_versions_tell_which_slots_are_equal():
    policy = policy_of(Slots(average=Averaging(decay=0.5)))
    assert set(policy.versions.values()) == {0}
    move(policy)
    assert policy.versions["old"] == policy.versions["ref"] == 0
    assert len({policy.versions[slot] for slot in ("current", "average", "ref")}) == 3
    policy.acted()
    assert policy.versions["old"] == policy.versions["current"]
    assert torch.equal(weights(policy, "old"), weights(policy))
    for a in SLOTS:
        for b in SLOTS:
            same = policy.versions[a] == policy.versions[b]
            assert same == torch.equal(weights(policy, a), weights(policy, b)), (a, b)


def test_slots_of_one_version_are_evaluated_once():
    policy = policy_of(Slots(old=Decay(rate=0.5, cap=0.5)))
    calls = policy.adapter

    def forwards(*slots):
        before, p = calls.calls, policy.bound(point(), acted=-1)
        for slot in slots:
            p.read(slot)
        return calls.calls - before

    assert forwards("current", "old", "ref", "current", "old") == 1  # all are the start
    move(policy)
    assert forwards("current", "old", "ref", "old") == 2  # old and ref are the start
    policy.acted()  # old is half way
    assert forwards("current", "old", "ref", "ref", "old", "current") == 3


def test_a_velocity_that_the_rollout_brought_is_not_evaluated_again():
    policy = policy_of()
    move(policy)
    brought = torch.randn(2, 3)
    p = policy.bound(point(step={"v": brought}), acted=policy.versions["old"])
    assert torch.equal(p.v_old, brought) and policy.adapter.calls == 0
    again = policy.bound(point(step={"v": brought}), acted=policy.versions["current"])
    assert not torch.equal(again.v, brought)  # that one needs its gradient


def test_only_the_current_velocity_has_a_gradient():
    policy = policy_of()
    move(policy)
    p = policy.bound(point(), acted=-1)
    assert p.v.requires_grad and not p.v_old.requires_grad and not p.v_ref.requires_grad
    policy.acted()
    p = policy.bound(point(), acted=-1)
    assert not p.v_old.requires_grad and torch.equal(p.v_old, p.v)


def test_old_and_average_follow_by_their_arithmetic():
    policy = policy_of(Slots(old=Decay(rate=0.2, cap=0.5), average=Averaging(decay=0.3)))
    old = average = base = weights(policy)
    for k in range(1, 5):
        move(policy)
        current = base + 0.1 * k
        kept = min((1 + k) / (10 + k), 0.3)
        average = kept * average + (1 - kept) * current
        policy.acted()
        kept = min(0.2 * k, 0.5)
        old = kept * old + (1 - kept) * current
        assert_close(weights(policy), current)
        assert_close(weights(policy, "average"), average)
        assert_close(weights(policy, "old"), old)
        assert torch.equal(weights(policy, "ref"), base)


@pytest.mark.parametrize("clock, kept", [("update", 0.4), ("rollout", 0.2)])
def test_the_old_policys_clock_counts_updates_or_rollouts(clock, kept):
    policy = policy_of(Slots(old=Decay(rate=0.2, cap=0.9, clock=clock)))
    base = weights(policy)
    move(policy)
    move(policy)
    policy.acted()
    assert_close(weights(policy, "old"), base + (1 - kept) * 0.2)


class ToyTransformer(Toy):
    """One joint block of SD3, on which LoRA can be put."""

    lora_targets = ("attn.to_q", "attn.to_out.0")

    def __init__(self):
        torch.manual_seed(5)
        self.network = SD3Transformer2DModel(
            sample_size=2, patch_size=1, in_channels=2, out_channels=2, num_layers=1, attention_head_dim=8,
            num_attention_heads=1, joint_attention_dim=4, caption_projection_dim=8, pooled_projection_dim=4,
            pos_embed_max_size=2,
        )  # fmt: skip


def lora_of(adapter, seed=0):
    return Policy(adapter, LoRA(rank=2, alpha=4), Slots(), seed=seed, autocast=None)


@torch.no_grad()
def test_the_reference_of_a_lora_is_the_base():
    toy = ToyTransformer()
    args = torch.randn(3, 2, 2, 2), torch.randn(3, 5, 4), torch.randn(3, 4), torch.tensor([100.0, 500, 900])
    base = toy.network(*args, return_dict=False)[0]
    policy = lora_of(toy)
    assert len(policy.names) == 4 and all("lora" in name for name in policy.names)
    start = toy.network(*args, return_dict=False)[0]
    assert_close(start, base, atol=1e-6, rtol=0)
    move(policy)
    assert (toy.network(*args, return_dict=False)[0] - base).abs().max() > 1e-3
    with policy.reading("ref"):
        assert torch.equal(toy.network(*args, return_dict=False)[0], start)


def test_a_loras_start_depends_on_its_seed_alone():
    def start(seed, drawn):
        toy = ToyTransformer()
        torch.randn(drawn)
        return weights(lora_of(toy, seed))

    assert torch.equal(start(1, 0), start(1, 7)) and not torch.equal(start(1, 0), start(2, 0))


def test_a_state_put_back_is_all_of_the_policy():
    policy, other = (policy_of(Slots(old=Decay(rate=0.5, cap=0.5))) for _ in range(2))
    for _ in range(2):
        move(policy)
        policy.acted()
    move(policy)
    tensors, counters = policy.state()
    other.load_state(tensors, json.loads(json.dumps(counters)))
    for slot in SLOTS:
        assert torch.equal(weights(other, slot), weights(policy, slot))
    assert other.versions == policy.versions
    for p in (policy, other):
        move(p)
        p.acted()
    assert torch.equal(weights(other, "old"), weights(policy, "old")) and other.versions == policy.versions


def test_the_state_of_another_network_is_refused():
    policy = policy_of()
    tensors, counters = policy.state()
    del tensors["old"]["2.bias"]
    with pytest.raises(ValueError, match=r"the checkpoint's old weights and the model differ in 1 tensors \(2.bias\)"):
        policy.load_state(tensors, counters)
