"""Flow-GRPO, GRPO-Guard, MixGRPO's schedule and NFT against the numbers of the authors' code."""

import pytest
import torch

from flowrl import regularise
from flowrl.algorithms._surrogates import PPO
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.nft import NFT
from flowrl.sample import Window
from tests.golden.points import edges, noised


@pytest.mark.parametrize("variant", ["nokl", "kl", "cfg_kl"])
def test_flow_grpo(golden, assert_golden, variant):
    d = golden("c_flow_grpo_ppo.npz")
    v, uncond = d["v_theta"].requires_grad_(), d["v_uncond"].requires_grad_()
    p = edges(d, uncond + d["cfg"] * (v - uncond) if "cfg" in variant else v)
    algorithm = FlowGRPO(surrogate=PPO(clip=float(d["clip"])))
    policy = algorithm.loss(p).mean()
    assert_golden(algorithm.log_ratio(p).exp().detach(), d[f"{variant}_ratio"], 1e-9)
    assert_golden(policy.detach(), d[f"{variant}_policy"], 1e-9)
    loss = policy
    if "kl" in variant.split("_"):
        kl = regularise.step_kl(p).mean()
        assert_golden(kl.detach(), d[f"{variant}_kl"], 1e-9)
        loss = policy + d["beta"] * kl
    grads = torch.autograd.grad(loss, [v, uncond] if "cfg" in variant else [v])
    assert_golden(loss.detach(), d[f"{variant}_loss"], 1e-9)
    assert_golden(grads[0], d[f"{variant}_grad_v"], 1e-9)
    if "cfg" in variant:
        assert_golden(grads[1], d["cfg_kl_grad_v_uncond"], 1e-9)


def test_path_kl_is_the_true_one(golden, assert_golden):
    d = golden("c_flow_grpo_ppo.npz")
    p = edges(d, d["v_theta"])
    assert_golden(regularise.path_kl(p).mean(), d["independent_kl_with_dt"], 1e-9)


def test_guard(golden, assert_golden):
    d = golden("f_grpo_guard.npz")
    v = d["v_theta"].requires_grad_()
    p = edges(d, v)
    algorithm = FlowGRPO(surrogate=PPO(clip=float(d["clip"])), guard=True)
    losses = algorithm.loss(p)
    (grad,) = torch.autograd.grad(losses.sum(), v)
    ratio = algorithm.log_ratio(p).exp().detach()
    assert_golden(ratio - 1, d["per_sample_ratio"] - 1, 1e-9)
    assert_golden(ratio - 1, d["independent_ratio_z_dot"] - 1, 1e-9)
    assert_golden(losses.detach(), d["per_sample_loss"], 1e-9)
    assert_golden(grad, d["per_sample_grad_v"], 1e-9)


@pytest.mark.parametrize("k", [0, 1])
def test_nft(golden, assert_golden, k):
    d = golden("d_nft.npz")
    beta, adv_max, lam = d["settings"][k].tolist()
    v = d["v_theta"].requires_grad_()
    p = noised(d, {"current": v, "old": d["v_old"], "ref": d["v_ref"]}, d["A"], d["sigma"])
    policy, kl = NFT(beta=beta, adv_max=adv_max).loss(p).mean(), regularise.velocity_kl(p)
    loss = policy + lam * kl.mean()
    (grad,) = torch.autograd.grad(loss, v)
    assert_golden(policy.detach(), d[f"s{k}_policy"], 1e-9)
    assert_golden(kl.mean().detach(), d[f"s{k}_kl"].mean(), 1e-9)
    assert_golden(loss.detach(), d[f"s{k}_loss"], 1e-9)
    assert_golden(grad, d[f"s{k}_grad_v"], 1e-9)


@pytest.mark.parametrize("k", [0, 1])
def test_nft_at_the_old_policy(golden, assert_golden, k):
    """The value does not depend on r there, the gradient does."""
    d = golden("d_nft.npz")
    beta, adv_max, _ = d["settings"][k].tolist()
    v = d["v_old"].clone().requires_grad_()
    p = noised(d, {"current": v, "old": d["v_old"]}, d["A"], d["sigma"])
    loss = NFT(beta=beta, adv_max=adv_max).loss(p).mean()
    (grad,) = torch.autograd.grad(loss, v)
    assert_golden(loss.detach(), d[f"s{k}_at_old_policy"], 1e-9)
    assert_golden(grad, d[f"s{k}_at_old_policy_grad_v"], 1e-9)


@pytest.mark.parametrize("case", range(4))
def test_mixgrpo_schedule(golden, case):
    """Where theirs shrinks at the end of the grid and goes empty, ours goes back after the last full window."""
    c = golden("g_mixgrpo_schedule.json")[case]
    fade = (c["t0"], c["k"]) if "exp" in c["dwell_rule"] else None
    window = Window(c["window"], "sliding", within=(0, c["steps"] - 2), every=c["dwell"], stride=c["stride"], fade=fade)
    full = [(start, count) for start, steps, count in c["runs_l_window_count"] if len(steps) == c["window"]]
    first_round = full[: next((i for i in range(1, len(full)) if full[i][0] < full[i - 1][0]), len(full))]
    expected = [start for start, count in first_round for _ in range(count)]
    got = [window.at(c["steps"], 0, step) for step in range(len(expected) + 1)]
    assert got == [*expected, 0]


def test_nft_identity():
    """(r |v+ - u|^2 + (1-r) |v- - u|^2) / b = |e|^2 / b + 2 (2r - 1) <e, d> + b |d|^2; e = v_old - u, d = v - v_old"""
    g = torch.Generator().manual_seed(0)
    v, old, u = torch.randn(3, 50, generator=g).double()
    r, b = 0.83, 0.4
    good, bad = old.lerp(v, b), old.lerp(v, -b)
    left = (r * (good - u).square().sum() + (1 - r) * (bad - u).square().sum()) / b
    e, d = old - u, v - old
    right = e.square().sum() / b + 2 * (2 * r - 1) * (e @ d) + b * d.square().sum()
    assert abs(left - right) < 1e-10
