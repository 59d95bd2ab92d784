"""The laboratory: closed forms of what must come out, every objective there, and a wrong sign that does not pass."""

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from flowrl import draws, lab, lab_cases
from flowrl.algorithms import ram
from flowrl.algorithms.awm import AWM
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.nft import NFT
from flowrl.cli import app
from flowrl.forwards import forwards
from flowrl.lab import Normal, Parabola
from flowrl.lab_cases import ASIDE, CASES, CENTRED, LINE, select
from flowrl.lab_report import table
from flowrl.registry import ALGORITHMS
from flowrl.sample import Sampler

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def even(monkeypatch):
    """Noise of one stream, its quantiles stratified over the rows of a call; rows of one key have one, as ever.

    In one dimension keys are most of the cost, and the laws depend neither on them nor on a few samples more or less.
    """
    rng = torch.Generator().manual_seed(0)

    def uniform(shape, keys):
        seen = {}
        row = torch.tensor([seen.setdefault(tuple(key), len(seen)) for key in keys])
        cell, within = (torch.rand(len(seen), *shape, generator=rng) for _ in range(2))
        return ((cell.argsort(0) + within) / len(seen))[row].clamp(1e-6, 1 - 1e-6)

    monkeypatch.setattr(draws, "uniform", uniform)
    monkeypatch.setattr(draws, "normal", lambda shape, keys: torch.special.ndtri(uniform(shape, keys)))


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
def test_fixed_points_of_ram(settings, reward, law):
    """Within 0.01; with the path cost they are the exact tilt."""
    case = replace(
        BY_NAME["ram"], settings={"draws": 4, **settings}, reward=reward, m=settings["scale"], reaches=Normal(*law),
        within=0.01, size=1024, steps=150,
    )  # fmt: skip
    assert case.reaches.near(case.exact, 1e-6) == (settings.get("path_cost", False) or reward == LINE)
    result = lab.run(case)
    assert result.holds, result.reached


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.algorithm != "ram"], ids=lambda case: case.name)
def test_cases_hold_in_half_the_steps(case):
    result = lab.run(replace(case, steps=100))
    assert result.holds, result.reached


def test_every_algorithm_has_a_case():
    assert {case.algorithm for case in CASES} == set(ALGORITHMS.names())
    assert len(BY_NAME) == len(CASES)


def negated(loss):
    return lambda self, p: loss(self, replace(p, adv=-p.adv))


FLIPS = [  # case, module or class, attribute, what stands in its place
    pytest.param("awm", AWM, "loss", negated(AWM.loss), id="advantage of awm"),
    pytest.param("nft", NFT, "loss", negated(NFT.loss), id="advantage of nft"),
    pytest.param("flow_grpo", FlowGRPO, "loss", negated(FlowGRPO.loss), id="advantage of flow_grpo"),
    pytest.param("ram exact aside", ram, "cost_pull", lambda p, pull=ram.cost_pull: -pull(p), id="path cost of ram"),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "flipped"), FLIPS)
def test_a_wrong_sign_does_not_hold(name, owner, attribute, flipped, monkeypatch):
    case = replace(BY_NAME[name], steps=50, size=128, within=0.08)
    assert lab.run(case).holds
    monkeypatch.setattr(owner, attribute, flipped)
    result = lab.run(case)
    assert not result.holds, result.reached
    assert "1 of 1 cases do not hold" in table([result])


def test_rows_are_those_that_the_plan_promises():
    case = replace(BY_NAME["dgpo"], steps=3)
    config = lab.start(case, 0).config
    counts = [count for step in range(3) for count in vars(forwards(config, step)).values()]
    assert lab.run(case).rows == sum(count.rows for count in counts)


def test_a_case_that_a_run_would_refuse_is_refused():
    with pytest.raises(ValueError, match="sampler.eta = 0 takes none"):
        lab.run(replace(BY_NAME["flow_grpo"], sampler=Sampler(steps=4)))


def test_select_takes_a_case_or_an_algorithm():
    assert select("ram exact aside") == (BY_NAME["ram exact aside"],)
    assert {case.name for case in select("flow_grpo")} == {"flow_grpo", "flow_grpo aside", "flow_grpo tree"}
    assert select(None) == CASES
    with pytest.raises(ValueError, match="no case of the laboratory is named 'grpo'"):
        select("grpo")


@pytest.mark.parametrize(("within", "code"), [(1.0, 0), (1e-6, 1)], ids=["all hold", "one does not"])
def test_the_command(within, code, monkeypatch, tmp_path):
    cases = replace(BY_NAME["awm"], steps=2, within=1.0), replace(BY_NAME["paired"], steps=2, within=within)
    monkeypatch.setattr(lab_cases, "CASES", cases)
    out = tmp_path / "densities.png"
    done = CliRunner().invoke(app, ["lab", "--json", "--out", str(out)])
    assert done.exit_code == code
    rows = json.loads(done.stdout)
    assert [(row["case"], row["holds"]) for row in rows] == [("awm", True), ("paired", not code)]
    assert rows[0]["exact"] == {"mean": 0.25, "std": 1.0}
    assert out.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_case_is_the_users_mistake(tmp_path):
    done = CliRunner().invoke(app, ["lab", "--only", "rma", "--out", str(tmp_path / "lab.png")])
    assert done.exit_code == 2
    assert "named 'rma'; take one of nft," in done.stderr
