"""A diffusion model as a flow: the coordinates, the table of timesteps, and what they leave of the sampler."""

import pytest
import torch
from diffusers import DDIMScheduler
from torch.testing import assert_close

from flowrl import flow, grids
from flowrl.models.sd15 import SD15
from flowrl.types import Prompt
from tests.tiny import tiny_sd15

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def adapter(request, tmp_path_factory):
    folder = tiny_sd15(tmp_path_factory.mktemp("sd15") / request.param, request.param)
    return SD15(path=str(folder)).load(CPU, torch.float32)


def test_the_range_of_t_is_the_tables(adapter):
    assert adapter.t_range == pytest.approx((0.028, 0.936), abs=5e-4)
    table = adapter.first_order().alphas_cumprod.double()
    alpha, sigma = table.sqrt(), (1 - table).sqrt()
    assert_close(adapter.timestep(sigma / (alpha + sigma)), torch.arange(1000.0), atol=1e-4, rtol=0)
    between = adapter.timestep(torch.linspace(*adapter.t_range, 500))
    assert (between.diff() > 0).all() and between[[0, -1]].tolist() == pytest.approx([0, 999], abs=1e-3)


def test_the_velocity_is_noise_less_data_of_what_the_network_predicts(adapter):
    """Both recovered by hand, in the network's own coordinates, at times of its table."""
    scheduler = adapter.first_order()
    cond = adapter.encode([Prompt(0, "red"), Prompt(1, "blue")])
    g = torch.Generator().manual_seed(0)
    for place in (5, 500, 990):
        alpha = scheduler.alphas_cumprod[place].double().sqrt()
        sigma = (1 - alpha**2).sqrt()
        latent = torch.randn(2, *adapter.latent.shape, generator=g)
        with torch.no_grad():
            out = adapter.network(latent, torch.tensor([place] * 2), cond.inputs["text"][:2]).sample.double()
            t = (sigma / (alpha + sigma)).float().repeat(2)
            v = adapter.velocity((latent / (alpha + sigma)).float(), t, cond)
        if adapter.predicts == "epsilon":
            eps, x0 = out, (latent - sigma * out) / alpha
        else:
            eps, x0 = sigma * latent + alpha * out, alpha * latent - sigma * out
        assert_close(v.double(), eps - x0, rtol=2e-3, atol=2e-4 / float(alpha))


def test_scaled_states_are_the_latents_of_the_path():
    g = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 5, 3, generator=g, dtype=torch.float64)
    t = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    scale = flow.vp_scale(t)
    alpha, sigma = (1 - t) / scale, t / scale
    assert_close(alpha**2 + sigma**2, torch.ones(5, dtype=torch.float64))
    latent = alpha[:, None] * x0 + sigma[:, None] * eps
    assert_close(scale[:, None] * latent, flow.interpolate(x0, eps, t))
    assert scale[0] == scale[-1] == 1


def test_training_draws_no_time_that_the_network_does_not_know(adapter):
    grid, u = adapter.grid(8), torch.linspace(0, 1 - 1e-6, 999)
    low, high = adapter.t_range
    for law in ("uniform", "logit_normal", "linear", "grid"):
        t = grids.draw(law, u[1:], grid)
        assert low - 1e-6 <= t.min() and t.max() <= high, law


@pytest.mark.parametrize("alpha_to_one", [False, True])
def test_the_last_alpha_is_the_stock_schedulers(tmp_path, alpha_to_one):
    folder = tiny_sd15(tmp_path / "sd15", set_alpha_to_one=alpha_to_one)
    grid = SD15(path=str(folder)).load(CPU, torch.float32).grid(5)
    assert grid[-1] == (0 if alpha_to_one else pytest.approx(0.0283, abs=1e-4))


def test_a_model_that_predicts_noise_from_noise_alone_is_refused(tmp_path):
    folder = tiny_sd15(tmp_path / "sd15")
    pipeline = SD15(path=str(folder)).load(CPU, torch.float32).pipeline
    pipeline.scheduler = DDIMScheduler.from_config(
        pipeline.scheduler.config, rescale_betas_zero_snr=True, clip_sample=False
    )
    pipeline.save_pretrained(tmp_path / "zero")
    with pytest.raises(ValueError, match="predicts noise and its last timestep is noise alone"):
        SD15(path=str(tmp_path / "zero")).load(CPU, torch.float32)
