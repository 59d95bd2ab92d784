"""Whole steps and whole runs on a very small pipeline: repeated, interrupted, split, starved of rewards, mistyped."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from flowrl import checkpoint, online, run, train
from flowrl.bench.step import staged_step
from flowrl.cli import app
from flowrl.clock import Clock
from flowrl.forwards import forwards
from flowrl.session import start
from flowrl.tell import Sums
from tests.tiny import NFT, config

RECIPES = {
    "flow_grpo": (),
    "tree": ("sampler.window={size: 2, start: random}", "sampler.branch=2"),
    "nft, all weights": (*NFT, "model.lora=null", "optimiser.updates=2", "regularise.velocity_kl=0.1"),
}


def untimed(metrics):
    """As text, so that NaN equals NaN."""
    return json.dumps({name: value for name, value in sorted(metrics.items()) if not name.startswith("time/")})


def weights(s, slot="current"):
    return torch.cat([value.flatten() for value in s.policy.state()[0][slot].values()]).clone()


def trained(c, steps):
    s = start(c)
    return s, [train.train_step(s, step) for step in range(steps)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_run_repeats_bit_by_bit(tiny, tmp_path, recipe):
    (one, rows), (other, again) = (trained(config(tmp_path, tiny, *recipe), 2) for _ in range(2))
    assert [untimed(row) for row in rows] == [untimed(row) for row in again]
    assert untimed(rows[0]) != untimed(rows[1])
    for slot in ("current", "old", "average"):
        assert torch.equal(weights(one, slot), weights(other, slot))
    assert not torch.equal(weights(one), weights(one, "ref"))


def test_another_seed_is_another_run(tiny, tmp_path):
    (_, (row,)), (_, (other,)) = (trained(config(tmp_path, tiny, f"seed={seed}"), 1) for seed in (0, 1))
    assert untimed(row) != untimed(other)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_killed_run_goes_on_as_if_nothing_had_been(tiny, tmp_path, monkeypatch, recipe):
    recipe = (*recipe, "steps=4", "save.every=2")
    whole, killed = (config(tmp_path, tiny, *recipe, f"run={tmp_path}/{name}") for name in ("whole", "killed"))
    run.run(whole)

    def power_cut(s, step):
        if step == 3:
            raise KeyboardInterrupt
        return train.train_step(s, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run, "train_step", power_cut)
        run.run(killed)
    assert [f.name for f in checkpoint.complete(killed.folder / "checkpoints")] == ["step-000002"]
    run.run(killed, resume=True)

    rows, again = (
        [untimed(json.loads(row)) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole.folder, killed.folder)
    )
    assert len(rows) == 4 and rows == again
    for name in ("current", "old", "ref", "average"):
        one, other = (
            folder / f"checkpoints/step-000004/{name}.safetensors" for folder in (whole.folder, killed.folder)
        )
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_micro_batch_does_not_change_the_first_step(tiny, tmp_path, recipe):
    seen = [trained(config(tmp_path, tiny, *recipe, f"compute.rows_per_forward={n}"), 1)[1][0] for n in (1, 3, 999)]
    for row in seen[1:]:
        assert row["train/grad_norm"] == pytest.approx(seen[0]["train/grad_norm"], rel=1e-5)
        assert row["train/loss"] == pytest.approx(seen[0]["train/loss"], rel=1e-5, abs=1e-6)


COUNTED = {  # rows of the rollout, and of the updates in steps 0, 1 and 2; 8 samples and 4 times
    "flow_grpo": ((), 4 * 8, [24, 24, 24]),
    "flow_grpo with a KL": (("regularise.path_kl=0.1",), 4 * 8, [24, 48, 48]),
    "guard": (("algorithm.guard=true", "optimiser.updates=2"), 4 * 8, [24, 24, 24]),
    "nft": ((*NFT, "optimiser.updates=2"), 4 * 8, [8 + 4, 8 + 4, 8 + 4]),
    "nft with a KL": ((*NFT, "optimiser.updates=2", "regularise.velocity_kl=0.1"), 4 * 8, [12, 20, 20]),
    "nft with a slow old policy": ((*NFT, "policy.old={rate: 0.1, cap: 0.5}"), 4 * 8, [8, 16, 16]),
    "nft with guidance": ((*NFT, "model.guidance=2.0"), 4 * 16, [8, 8, 8]),
    "nft with guidance in the loss": ((*NFT, "algorithm={name: nft, guidance: 2.0}"), 4 * 8, [16, 16, 16]),
    "tree": (("sampler.window={size: 2, start: 0}", "sampler.branch=3"), 8 + 24 + 72 + 72, [32, 32, 32]),
}


@pytest.mark.parametrize("recipe, rollout, updates", COUNTED.values(), ids=COUNTED)
def test_the_network_runs_as_often_as_planned(tiny, tmp_path, recipe, rollout, updates):
    c = config(tmp_path, tiny, *recipe, "compute.rows_per_forward=5")
    s, seen = start(c), []
    s.adapter.network.register_forward_hook(lambda network, args, output: seen.append(len(output[0])))
    for step, rows in enumerate(updates):
        train.train_step(s, step)
        planned = forwards(c, step)
        assert sum(seen) == rollout + rows
        assert planned.rollout.rows == rollout and (planned.current + planned.others).rows == rows
        assert len(seen) == (planned.rollout + planned.current + planned.others).calls
        seen.clear()


STARVED = """
import math

import numpy as np


def score(images, prompts, metadata):
    values = [float(np.asarray(image).mean()) for image in images]
    return [math.nan if i == 2 else value for i, value in enumerate(values)]


def equal(images, prompts, metadata):
    return [0.5] * len(images)


def silent(images, prompts, metadata):
    return [math.nan] * len(images)
"""


def starved(tmp_path, tiny, function, policy, *overrides):
    path = tmp_path / "starved.py"
    path.write_text(STARVED)
    reward = json.dumps([{"name": f"{path}:{function}", "on_failure": policy, "budget": 1}])
    return config(tmp_path, tiny, f"rewards={reward}", *overrides)


@pytest.mark.parametrize("recipe", [(), NFT], ids=["flow_grpo", "nft"])
@pytest.mark.parametrize("policy, lost", [("drop_sample", [2]), ("drop_group", [0, 1, 2, 3])])
def test_a_sample_without_a_verdict_weighs_nothing(tiny, tmp_path, policy, lost, recipe):
    s, sums = start(starved(tmp_path, tiny, "score", policy, *recipe)), Sums()
    rollout, _ = train.rolled_out(s, 0, Clock(), sums)
    assert (rollout.weight == 0).nonzero().flatten().tolist() == lost
    assert not rollout.adv[lost].any() and torch.isfinite(rollout.adv).all()
    assert_close(rollout.adv.view(2, 4).sum(1), torch.zeros(2), atol=1e-5, rtol=0)  # centred over the survivors

    before = weights(s)
    metrics = train.train_step(s, 0)
    assert metrics["train/skipped"] == 0 and math.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0
    (frac,) = (value for name, value in metrics.items() if name.endswith("/nan_frac"))
    assert frac == len(lost) / 8
    assert torch.isfinite(weights(s)).all() and not torch.equal(weights(s), before)


@pytest.mark.parametrize("recipe", [(), NFT], ids=["flow_grpo", "nft"])
@pytest.mark.parametrize("function", ["equal", "silent"])
def test_rewards_without_a_signal_move_nothing(tiny, tmp_path, function, recipe):
    c = starved(tmp_path, tiny, function, "drop_sample", *recipe, "optimiser={lr: 0.01, weight_decay: 0, updates: 2}")
    s, rows = trained(c, 2)
    assert [row["credit/zero_std_frac"] for row in rows] == [1, 1]
    assert torch.equal(weights(s), weights(s, "ref"))


def test_a_scorer_that_stays_silent_ends_the_run_in_time(tiny, tmp_path):
    s = start(starved(tmp_path, tiny, "silent", "drop_sample", "optimiser={lr: 0.01, updates: 2}"))
    with pytest.raises(train.Diverged, match="5 updates in a row no sample has had a verdict: see"):
        for step in range(3):
            assert train.train_step(s, step)["train/skipped"] == 1
            assert step < 2


def test_updates_without_a_pair_are_counted_and_end_nothing(tiny, tmp_path):
    dpo = ("sampler={steps: 4}", "algorithm={name: dpo}", "optimiser={lr: 0.01, weight_decay: 0, updates: 2}")
    s, rows = trained(starved(tmp_path, tiny, "equal", "drop_sample", *dpo), 4)
    assert [row["train/skipped"] for row in rows] == [1] * 4
    assert torch.equal(weights(s), weights(s, "ref"))


SLOW = """
import time

import numpy as np


def score(images, prompts, metadata):
    time.sleep(0.25)
    return [float(np.asarray(image).mean()) for image in images]
"""


def test_scorers_work_while_the_next_portion_is_sampled(tiny, tmp_path, monkeypatch):
    """Four portions, each 0.25 s of sampling and 0.25 s of judging: 5 quarters in the place of 8."""
    (tmp_path / "slow.py").write_text(SLOW)
    rewards = json.dumps([{"name": f"{tmp_path}/slow.py:score"}])
    s = start(config(tmp_path, tiny, f"rewards={rewards}", "data.prompts_per_step=4", "compute.prompts_at_once=1"))
    act = online.act

    def acting(*args):
        time.sleep(0.25)
        return act(*args)

    monkeypatch.setattr(online, "act", acting)
    begun = time.perf_counter()
    train.rolled_out(s, 0, Clock(), Sums())
    assert 1.25 <= time.perf_counter() - begun < 1.75


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_portions_are_the_rollout(tiny, tmp_path, recipe):
    """The same samples, states and edges, whatever is sampled together."""
    whole, parted = (
        start(config(tmp_path, tiny, *recipe, "data.prompts_per_step=3", f"compute.prompts_at_once={n}"))
        for n in ("null", 2)
    )
    a, b = (train.rolled_out(s, 0, Clock(), Sums())[0] for s in (whole, parted))
    assert a.group.equal(b.group) and a.roots.index.equal(b.roots.index)
    for name in ("x0", "rewards", "adv", "weight"):
        assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4)
    assert a.leaf.numel() == b.leaf.numel() and (b.edges.parent[b.leaf[b.leaf >= 0]] < len(b.edges.logp)).all()
    for r in (a, b):  # a leaf's edge leaves a state of the leaf's own root, and leads back to its first edge
        kept = r.leaf >= 0
        assert r.states.root[r.edges.state[r.leaf[kept]]].equal(r.root[kept])
        above = r.edges.parent[r.leaf[kept]]
        inner = above >= 0
        assert r.states.root[r.edges.state[above[inner]]].equal(r.root[kept][inner])
        assert_close(r.states.x[r.edges.state[r.leaf[kept]]][inner], r.edges.x_next[above[inner]])
    first, second = (train.train_step(s, 0) for s in (whole, parted))
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)
    seen, planned = staged_step(parted, 1), forwards(parted.config, 1)
    assert (seen["act"].rows, seen["act"].forwards) == (planned.rollout.rows, planned.rollout.calls)


def test_a_gradient_that_is_not_finite_is_left_out_and_ends_the_run_in_time(tiny, tmp_path):
    s = start(config(tmp_path, tiny))
    with torch.no_grad():
        s.policy.parameters[0].fill_(math.inf)
    before = weights(s)
    with pytest.raises(train.Diverged, match="5 updates in a row the gradient has not been finite: lower"):
        for step in range(5):
            assert train.train_step(s, step)["train/skipped"] == 1
            assert step < 4
    assert torch.equal(weights(s), before) and s.policy.updates == 0


def test_a_folder_in_use_is_refused(tiny, tmp_path):
    c = config(tmp_path, tiny, "steps=1")
    run.run(c)
    assert {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "export"} == set(os.listdir(c.folder))
    with pytest.raises(ValueError, match="is not empty; give another name"):
        run.run(c)
    with pytest.raises(ValueError, match="there is no whole checkpoint in"):
        run.run(config(tmp_path, tiny, f"run={tmp_path}/other"), resume=True)


def test_a_resumed_run_keeps_its_config(tiny, tmp_path):
    run.run(config(tmp_path, tiny, "steps=1"))
    with pytest.raises(ValueError, match="optimiser.* differ"):
        run.run(config(tmp_path, tiny, "steps=2", "optimiser.lr=0.1"), resume=True)
    longer = config(tmp_path, tiny, "steps=2")
    run.run(longer, resume=True)
    assert len((longer.folder / "metrics.jsonl").read_text().splitlines()) == 2


MISTAKES = {
    "misspelt key": (["mine.yaml", "sampler.stepz=4"], "sampler.steps"),
    "missing file": (["mien.yaml"], "mine.yaml"),
    "group of one": (["mine.yaml", "data.group_size=1"], "data.group_size = 1"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_a_users_mistake_is_one_message_and_status_2(tiny, tmp_path, monkeypatch, arguments, message):
    c = config(tmp_path, tiny)
    (tmp_path / "mine.yaml").write_text(c.to_yaml())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 2 and message in done.stderr and not done.stdout
    assert not (c.folder / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, status", [(["mine.yaml"], 0), *((arguments, 2) for arguments, _ in MISTAKES.values())],
    ids=["no mistake", *MISTAKES],
)  # fmt: skip
def test_the_process_ends_with_its_status(tiny, tmp_path, arguments, status):
    c = config(tmp_path, tiny, "steps=1")
    (tmp_path / "mine.yaml").write_text(c.to_yaml())
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "flowrl", "train", *arguments], cwd=tmp_path, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == ("" if status else str(c.folder))
