"""The laboratory: closed forms of what must come out, every objective there, and a wrong sign that does not pass."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl import draws, lab
from flowrl.lab import Normal, Parabola
from flowrl.lab_cases import ASIDE, CASES, CENTRED, LINE
from flowrl.sample import Sampler

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def fast(monkeypatch):
    """Noise from one stream: the keys, which the laws do not depend on, are most of the cost in one dimension."""
    rng = torch.Generator().manual_seed(0)
    monkeypatch.setattr(draws, "normal", lambda shape, keys: torch.randn(len(keys), *shape, generator=rng))
    monkeypatch.setattr(draws, "uniform", lambda shape, keys: torch.rand(len(keys), *shape, generator=rng))


def ids(case):
    return case.name


@pytest.mark.parametrize("reward", [LINE, CENTRED, ASIDE, Parabola(a=-1.0, k=0.5, c=2.0)], ids=str)
@pytest.mark.parametrize("m", [0.5, 2.0])
def test_the_tilt_is_that_of_the_integral(reward, m):
    x = torch.linspace(-15, 15, 30_001, dtype=torch.float64)
    mass = (m * reward(x) - x.square() / 2).softmax(0)
    mean = float(mass @ x)
    std = math.sqrt(float(mass @ (x - mean).square()))
    assert vars(reward.tilt(m)) == pytest.approx({"mean": mean, "std": std}, abs=1e-9)


def test_kl_of_normals():
    p, q = Normal(0.3, 0.8), Normal(-0.5, 1.7)
    laws = (torch.distributions.Normal(law.mean, law.std) for law in (p, q))
    assert p.kl(q) == pytest.approx(float(torch.distributions.kl_divergence(*laws)), rel=1e-6)
    assert p.kl(p) == 0


RAM_POINTS = [  # settings, reward, (mean, std)
    pytest.param({"scale": 1.0}, CENTRED, (0.0, 0.758), id="plain, centred"),
    pytest.param({"scale": 1.0, "path_cost": True}, CENTRED, (0.0, 2**-0.5), id="exact, centred"),
    pytest.param({"scale": 1.0}, ASIDE, (0.390, 0.760), id="plain, aside"),
    pytest.param({"scale": 1.0, "path_cost": True}, ASIDE, (0.5, 2**-0.5), id="exact, aside"),
    pytest.param({"scale": 0.5}, LINE, (0.25, 1.0), id="plain, linear"),
    pytest.param({"scale": 0.5, "path_cost": True}, LINE, (0.25, 1.0), id="exact, linear"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reward", "law"), RAM_POINTS)
def test_fixed_points_of_ram(settings, reward, law, fast):
    case = replace(
        BY_NAME["ram"], settings={"draws": 4, **settings}, reward=reward, m=settings["scale"], reaches=Normal(*law),
        within=0.01, sampler=Sampler(steps=64, solver="dpm2"), size=3072, steps=100,
    )  # fmt: skip
    result = lab.run(case)
    assert result.holds, (result.reached, case.reaches)
