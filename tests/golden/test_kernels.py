"""The kernels and their log-probs against flow_grpo, FlowCPS, DanceGRPO, MixGRPO and BranchGRPO."""

import pytest
import torch

from flowrl.flow import clean, draw, mean_sq, replay, step
from tests.given import log_prob

CASES = [
    pytest.param("flow_sde", "a_flow_sde_step.npz", "eta0_", id="flow_sde-eta0.7"),
    pytest.param("flow_sde", "a_flow_sde_step.npz", "eta1_", id="flow_sde-eta1"),
    pytest.param("cps", "a_cps_step.npz", "eta0_", id="cps-eta0.8"),
    pytest.param("cps", "a_cps_step.npz", "eta1_", id="cps-eta1"),
    pytest.param("dance", "a_dance_sde_step.npz", "", id="dance"),
]


def read(golden, file, prefix):
    """The step's arrays without their prefix, and the tensors one step takes."""
    d = golden(file)
    eta = d["eta"][int(prefix[3])] if prefix else d["eta"]
    d["stored"] = d["stored_" + prefix[:4]] if prefix else d["stored"]
    d |= {name.removeprefix(prefix): value for name, value in d.items() if prefix and name.startswith(prefix)}
    cap = float(d["sigma_grid"][1])
    return d, (d["sigma"], d["sigma_next"], eta.expand(6), cap)


@pytest.mark.parametrize(("kernel", "file", "prefix"), CASES)
def test_step(golden, assert_golden, kernel, file, prefix):
    d, times = read(golden, file, prefix)
    mean, std = step(kernel, d["x"], d["v"], *times)
    x_next = mean + std.view(-1, 1, 1, 1) * d["noise"]
    assert_golden(mean, d["mean"], 1e-12)
    assert_golden(std, d["std"], 1e-9)
    assert_golden(x_next, d["xnext"], 1e-12)
    assert_golden(log_prob(kernel, x_next, mean, std), d["logp"], 1e-9)
    drawn = draw(kernel, d["x"], d["v"], *times, 1.0, torch.arange(len(mean)), d["noise"], torch.float64)
    assert_golden(drawn[0], d["xnext"], 1e-12)
    assert_golden(drawn[1], d["logp"], 1e-9)


@pytest.mark.parametrize(("kernel", "file", "prefix"), CASES)
def test_replay(golden, assert_golden, kernel, file, prefix):
    d, times = read(golden, file, prefix)
    v = d["v"].requires_grad_()
    logp = replay(kernel, d["x"], v, *times, 1.0, torch.arange(len(v)), d["stored"])
    (grad,) = torch.autograd.grad((d["logp_weight"] * logp).sum(), v)
    assert_golden(logp.detach(), d["replay_logp"], 1e-9)
    assert_golden(grad, d["replay_grad_v"], 1e-9)


@pytest.mark.parametrize(("kernel", "file", "prefix"), CASES)
def test_float32_stays_close(golden, kernel, file, prefix):
    d, times = read(golden, file, prefix)
    mean, std = step(kernel, d["x"].float(), d["v"].float(), *times)
    x_next = mean + std.view(-1, 1, 1, 1) * d["noise"].float()
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), d["mean"], atol=1e-6, rtol=0)
    torch.testing.assert_close(x_next.double(), d["xnext"], atol=1e-6, rtol=0)
    torch.testing.assert_close(log_prob(kernel, x_next, mean, std).double(), d["logp"], atol=1e-6, rtol=0)


def test_dance_predicts_the_data(golden, assert_golden):
    d = golden("a_dance_sde_step.npz")
    assert_golden(clean(d["x"], d["v"], d["sigma"]), d["x0_pred"], 1e-12)


def test_mixgrpo_logp_lacks_only_constants(golden, assert_golden):
    """MixGRPO loses the normalising terms: its number is ours plus log std + log(2 pi) / 2, the same for every x'."""
    d, times = read(golden, "a_dance_sde_step.npz", "")
    mean, std = step("dance", d["x"], d["v"], *times)
    z = (d["xnext"] - mean) / std.view(-1, 1, 1, 1)
    assert_golden(-mean_sq(z) / 2, d["mix_logp"], 1e-9)
    ours = log_prob("dance", d["xnext"], mean, std)
    constants = std.log() + torch.tensor(2 * torch.pi, dtype=torch.float64).log() / 2
    assert_golden(ours + constants, d["mix_logp"], 1e-9)


def test_scaled_branch_noise_is_judged_by_its_own_std(golden, assert_golden):
    """A BranchGRPO child has 4 std of noise; its density is that of 4 std, not of the std their code evaluates."""
    d, times = read(golden, "a_dance_sde_step.npz", "")
    mean, std = step("dance", d["x"], d["v"], *times, d["branch_scale"])
    for child, z in enumerate([d["noise"], d["noise_replay"]]):
        x_next = mean + std.view(-1, 1, 1, 1) * z
        assert_golden(x_next, d["branch_xnext"][:, child], 1e-6)
        assert_golden(log_prob("dance", x_next, mean, std), d["branch_logp_consistent"][:, child], 1e-9)
        theirs = log_prob("dance", x_next, mean, std / d["branch_scale"])
        assert_golden(theirs, d["branch_logp_unscaled"][:, child], 1e-9)
