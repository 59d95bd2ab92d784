"""Checkpoints are whole or absent, come back bit by bit, and execute nothing."""

import json
import logging
import os
import pickle

import pytest
import torch
from torch import nn

from flowrl import checkpoint
from flowrl.policy import Decay, Policy, Slots


class Toy:
    def __init__(self):
        self.network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def learner():
    torch.manual_seed(0)
    policy = Policy(Toy(), None, Slots(old=Decay(rate=0.5, cap=0.9)), seed=0, autocast=None)
    return policy, torch.optim.AdamW(policy.parameters, lr=0.1)


def learn(policy, optimiser, steps):
    x = torch.linspace(-1, 1, 15).view(5, 3)
    for _ in range(steps):
        optimiser.zero_grad()
        (policy.adapter.network(x) - 1).square().mean().backward()
        optimiser.step()
        policy.stepped()
        policy.acted()


def save(root, step, keep=5):
    policy, optimiser = learner()
    learn(policy, optimiser, step)
    return checkpoint.save(root, step, policy, optimiser, {"best": 0.5}, keep)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path):
    policy, optimiser = learner()
    learn(policy, optimiser, 2)
    folder = checkpoint.save(tmp_path, 2, policy, optimiser, {"best": float("-inf")}, keep=1)
    fresh, fresh_optimiser = learner()
    state = checkpoint.load(folder, fresh, fresh_optimiser)
    assert state["step"] == 2 and state["best"] == float("-inf")
    for p, o in ((policy, optimiser), (fresh, fresh_optimiser)):
        learn(p, o, 3)
    tensors, counters = policy.state()
    again, counters_again = fresh.state()
    assert counters == counters_again
    for slot in ("current", "old", "ref", "average"):
        assert all(torch.equal(value, again[slot][name]) for name, value in tensors[slot].items()), slot
    assert not torch.equal(tensors["current"]["0.weight"], tensors["average"]["0.weight"])


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 9, 10):
        save(tmp_path, step, keep=2)
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000009", "step-000010"]
    assert sorted(os.listdir(tmp_path)) == ["step-000009", "step-000010"]


def cut(folder):
    (folder / "current.safetensors").write_bytes((folder / "current.safetensors").read_bytes()[:-8])


def flip(folder):
    content = bytearray((folder / "optimiser.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "optimiser.pt").write_bytes(content)


DAMAGE = {
    "cut file": cut,
    "flipped bit": flip,
    "file gone": lambda folder: (folder / "state.json").unlink(),
    "manifest gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: (folder / "manifest.json").write_text('{"state.json": '),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_broken_checkpoint_is_named_and_passed_over(tmp_path, caplog, damage):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.complete(tmp_path) == [good]
    assert "step-000002 is incomplete" in caplog.text and "step-000001" not in caplog.text


def test_a_write_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch):
    good = save(tmp_path, 1)

    def killed(*_):
        raise KeyboardInterrupt

    for place in ("os.replace", "torch.save", "flowrl.checkpoint.save_file"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(place, killed)
            save(tmp_path, 2)
        assert checkpoint.complete(tmp_path) == [good] and not (tmp_path / "step-000002").exists()
    save(tmp_path, 2)  # the remains of the attempts are in nobody's way
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000001", "step-000002"]
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"]


def test_a_checkpoint_written_again_is_the_new_one(tmp_path):
    save(tmp_path, 1)
    policy, optimiser = learner()
    learn(policy, optimiser, 4)
    checkpoint.save(tmp_path, 1, policy, optimiser, {"best": 0.75}, keep=5)
    assert checkpoint.load(*checkpoint.complete(tmp_path), policy)["best"] == 0.75


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    state = json.loads((folder / "state.json").read_text()) | {"format": 99}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="step-000001 is a checkpoint of format 99, this version reads format 1"):
        checkpoint.load(folder, learner()[0])


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    folder, hit = save(tmp_path, 1), tmp_path / "hit"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(hit),)

    torch.save({"state": Payload()}, folder / "optimiser.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(folder, *learner())
    assert not hit.exists()
