"""`flowrl selftest` holds on what works, and each of its checks fails on what it is there to find."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flowrl
from flowrl import selftest, train
from flowrl.algorithms.paired import Paired
from flowrl.bench import step
from flowrl.config import load
from flowrl.forwards import forwards
from flowrl.plan import plan
from flowrl.policy import Policy
from flowrl.session import Session, start
from tests.tiny import NFT, config, tiny_sana, tiny_sd15

RECIPES = {
    "tree, guidance, guard": (
        "sampler.window={size: 2, start: random}", "sampler.branch=2", "model.guidance=2.0", "algorithm.guard=true",
        "regularise.path_kl=0.1",
    ),
    "nft, all weights, bf16": (*NFT, "model.lora=null", "optimiser.updates=2", "compute.precision=bf16"),
}  # fmt: skip


@pytest.fixture
def session(tiny, tmp_path):
    return start(selftest.small(config(tmp_path, tiny, "regularise.path_kl=0.1"), str(tmp_path)))


@pytest.mark.parametrize("recipe, count", list(zip(RECIPES.values(), (9, 6), strict=True)), ids=RECIPES)
def test_all_checks_hold(tiny, tmp_path, recipe, count):
    checks = selftest.run(config(tmp_path, tiny, *recipe))
    assert len(checks) == count and all(check.passed for check in checks), selftest.table(checks)
    assert selftest.table(checks).endswith(f"all {count} checks hold")
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "brightness.py"}


@pytest.mark.parametrize(
    ("build", "model"),
    [(tiny_sana, "name: sana, instruction: false, max_sequence_length: 12, guidance: 2.0"), (tiny_sd15, "name: sd15")],
    ids=["sana", "sd15"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_checks_hold_on_networks_that_share_their_text(tmp_path, build, model, precision):
    folder = build(tmp_path / "model")
    block = f"model={{{model}, path: {folder}, lora: {{rank: 4, alpha: 8}}}}"
    checks = selftest.run(config(tmp_path / "run", folder, block, f"compute.precision={precision}"))
    assert len(checks) == 9 and all(check.passed for check in checks), selftest.table(checks)


@pytest.mark.parametrize("recipe", sorted(Path(flowrl.__file__).with_name("configs").glob("*/*.yaml")), ids=str)
def test_every_recipe_has_a_small_run(recipe, tmp_path):
    """A method may ask for more prompts or samples than the least."""
    small = selftest.small(load(recipe), str(tmp_path))
    assert small.data.prompts_per_step * small.data.group_size <= 128 and plan(small)


def test_shared_noise_is_found_unless_it_is_asked_for(session, monkeypatch):
    draw, data, paired = session.adapter.noise, session.config.data, Paired()
    shared = replace(session, config=replace(session.config, data=replace(data, shared_noise=1)))
    pairs = replace(shared, config=replace(shared.config, algorithm=paired))
    for s, equal in ((session, 0), (shared, 12), (pairs, 4)):
        check = selftest.noise_depends_on_its_key_alone(s)
        assert check.passed and check.wanted == f"0 and {equal}"
    monkeypatch.setattr(session.adapter, "noise", lambda keys: draw([(*key[:-1], 0) for key in keys]))
    for s, passed in ((session, False), (shared, True), (pairs, False)):
        assert selftest.noise_depends_on_its_key_alone(s).passed == passed


def test_noise_that_depends_on_the_batch_is_found(session, monkeypatch):
    monkeypatch.setattr(session.adapter, "noise", lambda keys: torch.randn(len(keys), 4, 4, 4))
    assert not selftest.noise_depends_on_its_key_alone(session).passed


def test_another_grid_is_found(session, monkeypatch):
    grid = session.adapter.grid
    monkeypatch.setattr(session.adapter, "grid", lambda steps: grid(steps) ** 1.1)
    assert not selftest.eta_0_is_the_stock_pipeline(session).passed


def test_a_velocity_that_is_not_the_rollouts_is_found(session, monkeypatch):
    generator = torch.Generator()

    def noisy(self, x, t, cond):
        v = self.adapter.velocity(x, t, cond)
        return v + 0.01 * torch.randn(v.shape, generator=generator)

    assert all(check.passed for check in selftest.ratio_is_1_before_the_first_update(session))
    monkeypatch.setattr(Policy, "velocity", noisy)
    assert not any(check.passed for check in selftest.ratio_is_1_before_the_first_update(session))


def test_a_forgotten_optimiser_is_found(session, monkeypatch, tmp_path):
    load = selftest.checkpoint.load
    monkeypatch.setattr(selftest.checkpoint, "load", lambda folder, policy, optimiser: load(folder, policy))
    assert not selftest.resuming_changes_nothing(session, tmp_path / "checkpoints").passed


def test_a_forward_run_twice_is_found(session, monkeypatch):
    train.train_step(session, 0)
    assert selftest.no_forward_is_run_twice(session, 1).passed
    velocity = Session.velocity
    monkeypatch.setattr(Session, "velocity", lambda s, *where: (velocity(s, *where), velocity(s, *where))[0])
    assert not selftest.no_forward_is_run_twice(session, 2).passed


def test_a_mean_of_micro_batch_means_is_found(session, monkeypatch):
    before = {slot: {n: v.clone() for n, v in values.items()} for slot, values in session.policy.state()[0].items()}
    assert selftest.gradient_does_not_depend_on_the_split(session).passed
    after = session.policy.state()[0]
    assert all(torch.equal(value, after[slot][n]) for slot, values in before.items() for n, value in values.items())
    loss = type(session.config.algorithm).loss
    monkeypatch.setattr(type(session.config.algorithm), "loss", lambda self, p: loss(self, p) / len(p))
    assert not selftest.gradient_does_not_depend_on_the_split(session).passed


def test_an_export_of_other_weights_is_found(session, monkeypatch, tmp_path):
    export = selftest.export
    session.policy.stepped()
    monkeypatch.setattr(selftest, "export", lambda s, folder, slot: export(s, folder, "average"))
    wrong, scale_0 = selftest.exported_weights_are_ours(session, tmp_path / "export")
    assert not wrong.passed and scale_0.passed


def test_the_bench_counts_what_the_plan_promises(tiny, tmp_path):
    c = config(tmp_path, tiny, "compute.rows_per_forward=5", "regularise.path_kl=0.1")
    result, planned = step.measure(c, 2), forwards(c, 1)
    act, learn = result["act"], result["learn"]
    assert act["forwards"] == planned.rollout.calls
    assert learn["forwards"] == (planned.current + planned.others).calls
    assert learn["backwards"] == planned.current.calls
    for row in (act, learn):
        assert 0 < row["network_s"] < row["wall_s"] and row["overhead"] > 1
    assert result["step"]["wall_s"] > act["wall_s"] + learn["wall_s"] - 1e-3 and result["media_s"] > 0
    assert "overhead" in step.table(result)


def test_the_meter_leaves_no_hook_behind(session):
    backward, network = session.accelerator.backward, session.adapter.network
    step.staged_step(session, 0)
    assert session.accelerator.backward == backward
    assert not network._forward_hooks and not network._forward_pre_hooks
