"""Surrogates against slow transcriptions, as policy gradients, and on updates that are cut up."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp
from threading import Barrier

import pytest
import torch
from torch.distributions import Normal

from flowrl import flow
from flowrl.algorithms._points import ReverseProcess
from flowrl.algorithms._surrogates import PPO, PSPO, SPO
from flowrl.algorithms._surveyed import LPO, M2PO, P3O
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.credit import alone
from flowrl.train import bound_parts
from flowrl.types import LATER, Cond, Point
from tests.reference import surrogates as slow
from tests.unit.test_points import GROUPS, judged, rollout

D = 5  # elements of a latent of `rollout`
ITEMS, BLOCKS = 24, 3
ALL = {
    "ppo": PPO(clip=0.2),
    "ppo, wide": PPO(clip=1.0),
    "spo": SPO(clip=0.2),
    "pspo": PSPO(alpha=0.3),
    "p3o": P3O(),
    "m2po": M2PO(),
    "m2po, no floors": M2PO(m2=0.03, floors=(0.0, 0.0)),
    "lpo": LPO(tau=0.7, kappa=1.3),
}
each = pytest.mark.parametrize("surrogate", ALL.values(), ids=ALL)
SURVEYING = {name: s for name, s in ALL.items() if s.surveys}
surveying = pytest.mark.parametrize("surrogate", SURVEYING.values(), ids=SURVEYING)


def items(spread=0.5, seed=0):
    """(log-ratios, a point of that many items), every seventh of them without a verdict."""
    g = torch.Generator().manual_seed(seed)
    d, adv = torch.randn(2, ITEMS, generator=g, dtype=torch.float64) * torch.tensor([[spread], [1.0]])
    row = torch.arange(ITEMS)
    weight = (row % 7 != 3).double()
    return d, Point(LATER, row, Cond({}, row), row, adv, weight, {"block": row % BLOCKS})


def charged(surrogate, d, p, total=alone):
    """(loss, its derivative in d) of every item."""
    settled = surrogate.settle(d, p, total) if surrogate.surveys else LATER
    d = d.clone().requires_grad_()
    losses = surrogate(d, p.adv, settled)
    (slope,) = torch.autograd.grad(losses.sum(), d)
    return losses.detach(), slope


def same(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


# against the transcriptions

SLOW = {
    PPO: lambda s, d, a, on: slow.ppo(d, a, s.clip),
    SPO: lambda s, d, a, on: slow.spo(d, a, s.clip),
    PSPO: lambda s, d, a, on: slow.pspo(d, a, s.alpha),
    P3O: lambda s, d, a, on: slow.p3o(d, a, on),
    M2PO: lambda s, d, a, on: slow.m2po(d, a, on, s.m2, s.floors),
}


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("surrogate", [s for s in ALL.values() if type(s) in SLOW], ids=[n for n in ALL if n != "lpo"])
def test_loss_and_derivative_are_those_of_the_papers(surrogate, spread):
    d, p = items(spread)
    losses, slopes = charged(surrogate, d, p)
    want = SLOW[type(surrogate)](surrogate, d.tolist(), p.adv.tolist(), p.weight.tolist())
    same(losses, want[0])
    same(slopes, want[1])


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0])
def test_lpo_is_n_times_the_cross_entropy_of_each_block(spread):
    s, (d, p) = ALL["lpo"], items(spread)
    losses, slopes = charged(s, d, p)
    block = p.items["block"]
    entropies, want = slow.lpo(d.tolist(), p.adv.tolist(), p.weight.tolist(), block.tolist(), s.tau, s.kappa)
    for b, entropy in entropies.items():
        mine = (block == b) & (p.weight > 0)
        same(losses[mine].mean(), entropy - mine.sum().double().log())
        same(slopes[mine] / mine.sum(), torch.tensor(want, dtype=torch.float64)[mine])
        same(slopes[mine].sum(), 0.0)


# as policy gradients


@each
def test_at_the_old_policy_all_are_the_policy_gradient(surrogate):
    _, p = items()
    _, slope = charged(surrogate, torch.zeros(ITEMS).double(), p)
    if isinstance(surrogate, LPO):  # to first order in 1 / tau, on what is judged
        _, slope = charged(replace(surrogate, tau=1e5), torch.zeros(ITEMS).double(), p)
        for b in range(BLOCKS):
            mine = (p.items["block"] == b) & (p.weight > 0)
            same(slope[mine] * 1e5 / surrogate.kappa, p.adv[mine].mean() - p.adv[mine], 1e-4)
        return
    same(slope, -p.adv * (0.7 if isinstance(surrogate, PSPO) else 1.0))


SIDES = [  # A, rho, PPO's derivative in the ratio at clip 0.2, SPO's
    (2.0, 1.1, -2.0, -1.0), (2.0, 1.2, None, 0.0), (2.0, 1.3, 0.0, 1.0), (2.0, 0.7, -2.0, -5.0),
    (-2.0, 0.9, 2.0, 1.0), (-2.0, 0.8, None, 0.0), (-2.0, 0.7, 0.0, -1.0), (-2.0, 1.3, 2.0, 5.0),
]  # fmt: skip


@pytest.mark.parametrize(("adv", "rho", "ppo", "spo"), SIDES, ids=[f"A={a:g}, rho={r:g}" for a, r, *_ in SIDES])
def test_ppo_lets_go_and_spo_pulls_back_beyond_the_clip_on_the_side_of_gain_only(adv, rho, ppo, spo):
    d, p = torch.tensor([rho], dtype=torch.float64).log(), replace(items()[1], adv=torch.tensor([adv]).double())
    if ppo is not None:  # the kink
        same(charged(PPO(clip=0.2), d, p)[1] / rho, [ppo])
    same(charged(SPO(clip=0.2), d, p)[1] / rho, [spo], 1e-6)


def test_lpo_pulls_back_once_the_policy_has_passed_its_target():
    _, p = items()
    s, w = LPO(), LPO().settle(torch.zeros(ITEMS).double(), p, alone)[:, 0]
    assert charged(s, w.log(), p)[1].abs().max() < 1e-12, "nothing is left to learn at the target"
    (_, short), (_, far) = charged(s, 0.5 * w.log(), p), charged(s, 1.5 * w.log(), p)
    best = p.adv.where(p.weight > 0, -torch.inf).argmax()
    assert short[best] < 0 < far[best]


# log-ratios in nats and as means over many elements


@pytest.mark.parametrize(("s", "share"), [(0.1, 0.990), (0.5, 0.779), (1.0, 0.368)])
def test_ess_and_kl_of_gaussians(s, share):
    """pi = N(s, 1) under samples of N(0, 1): ESS = exp(-s^2), KL = s^2 / 2, whose derivative is s."""
    x = Normal(0.0, 1.0).icdf((torch.arange(400_000).double() + 0.5) / 400_000)
    shift = torch.tensor(s).double().requires_grad_()
    d = shift * x - shift.square() / 2
    p = replace(items()[1], adv=torch.zeros_like(x), weight=torch.ones_like(x))
    ess = P3O().settle(d.detach(), p, alone)
    same(ess[0], share, 2e-3)
    kl = P3O()(d, p.adv, ess).mean() / (1 - ess[0])
    (slope,) = torch.autograd.grad(kl, shift)
    same(kl.detach(), s * s / 2, 1e-3)
    same(slope, s, 1e-3)


def test_means_over_elements_stay_in_every_trust_region_and_nats_leave_it():
    """The same update by its mean log-ratios, 1e-3 wide, and by those of 1,000 elements in nats."""
    d, p = items(1e-3)
    policy_gradient = -p.adv * d.exp()
    assert P3O().settle(d, p, alone)[0] > 1 - 1e-5
    assert P3O().settle(1000 * d, p, alone)[0] < 0.6
    same(charged(PSPO(alpha=0.3), d, p)[1], 0.7 * policy_gradient)
    assert charged(M2PO(), d, p)[1].equal(policy_gradient)
    held = charged(M2PO(), 1000 * d, p)[1] == 0
    assert 0 < held.sum() < ITEMS / 2 and (p.adv * d)[held].min() > 0
    w = LPO().settle(d, p, alone)[:, 0]
    same(charged(LPO(), d, p)[1], 1 - w, 1e-2)
    assert (charged(LPO(), 1000 * d, p)[1] - (1 - w)).abs().max() > 0.5


def test_logp_scale_of_as_many_as_elements_gives_nats():
    (p,) = points()
    v = p.x @ moved()
    p = replace(p, read={"current": v}.__getitem__)
    (mean, std), (mean_old, std_old) = (
        [part[p.item] for part in flow.step(p.kernel, p.x, some, *p.how)] for some in (v, p.x / 2)
    )
    x_next = p.items["x_next"]
    joint = Normal(mean, std[:, None]).log_prob(x_next) - Normal(mean_old, std_old[:, None]).log_prob(x_next)
    same(FlowGRPO(logp_scale=D).log_ratio(p), joint.sum(1), 1e-4)


# updates in parts


def points(groups=range(GROUPS)):
    """The update of all samples, in float64, its advantages centred."""
    r = judged(rollout(groups, kernel="flow_sde", eta=0.7))
    for p in ReverseProcess().points(r, Cond({}, torch.arange(len(r.roots))), 1, (7, 3)):
        adv = (p.items["x_next"].sum(1) * 3).sin().double()
        weight = (p.items["x_next"][:, 0] > -1.0).double()
        cast = {key: value.double() for key, value in p.items.items() if value.is_floating_point()}
        yield replace(p, x=p.x.double(), adv=adv, weight=weight, items={**p.items, **cast})


def moved():
    """The matrix of a velocity that is near the rollout's x / 2."""
    g = torch.Generator().manual_seed(1)
    return torch.eye(D).double() / 2 + 0.1 * torch.randn(D, D, generator=g, dtype=torch.float64)


class Linear:
    """Stands in for a policy of velocity x @ matrix."""

    def __init__(self, matrix, fresh=False):
        self.matrix, self.fresh = matrix, fresh

    def bound(self, p, acted):
        return replace(p, read=lambda slot: p.x @ self.matrix, fresh=self.fresh)


def gradient(algorithm, point, rows, total=alone):
    matrix = moved().requires_grad_()
    for part in bound_parts(Linear(matrix), algorithm, point, 0, rows, total):
        (algorithm.loss(part) @ part.weight).backward()
    return matrix.grad


@pytest.mark.parametrize("rows", [1, 5, 32])
@each
def test_the_gradient_is_the_same_in_any_micro_batches(surrogate, rows):
    algorithm = FlowGRPO(surrogate=surrogate, logp_scale=D)
    (p,) = points()
    want = gradient(algorithm, p, len(p))
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(gradient(algorithm, p, rows), want, rtol=1e-10, atol=1e-12)


class Processes:
    """Two threads that add their tensors up."""

    def __init__(self):
        self.barrier, self.values = Barrier(2, timeout=20), [LATER, LATER]

    def total(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        both = self.values[0] + self.values[1]
        self.barrier.wait()
        return both


@each
def test_two_processes_have_the_gradient_of_one(surrogate):
    algorithm, both = FlowGRPO(surrogate=surrogate, logp_scale=D), Processes()
    halves = [next(points(groups)) for groups in (range(1), range(1, GROUPS))]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(gradient, algorithm, p, 7, lambda value, rank=rank: both.total(rank, value))
            for rank, p in enumerate(halves)
        ]
        split = sum(job.result() for job in jobs)
    (whole,) = points()
    torch.testing.assert_close(split, gradient(algorithm, whole, len(whole)), rtol=1e-10, atol=1e-12)


@surveying
def test_samples_without_a_verdict_are_outside(surrogate):
    d, p = items()
    on = p.weight > 0
    want = charged(surrogate, d, p)
    got = charged(surrogate, d.where(on, 3.0), replace(p, adv=p.adv.where(on, 9.0)))
    for one, other in zip(got, want, strict=True):
        assert one[on].equal(other[on])


def test_blocks_of_lpo_do_not_influence_each_other():
    d, p = items()
    other = p.items["block"] != 0
    _, want = charged(LPO(), d, p)
    _, slope = charged(LPO(), d + other, replace(p, adv=p.adv.where(~other, -p.adv)))
    assert slope[~other].equal(want[~other]) and not slope[other].equal(want[other])


@surveying
def test_a_fresh_update_is_settled_without_a_look(surrogate):
    algorithm = FlowGRPO(surrogate=surrogate)
    (p,) = points()
    assert algorithm.surveys
    found = algorithm.survey(replace(p, read=None, fresh=True))
    assert found.equal(torch.zeros(len(p.item)).double())
    (part,) = bound_parts(Linear(torch.eye(D).double() / 2, fresh=True), algorithm, p, 0, len(p), alone)
    logged = algorithm.metrics(part)
    same(logged["ratio"], torch.ones(len(p.item)), 1e-6)
    if "ess" in logged:
        assert logged["ess"].equal(torch.ones(len(p.item)).double())


@pytest.mark.parametrize("surrogate", [PPO(), SPO(), PSPO()], ids=["ppo", "spo", "pspo"])
def test_what_needs_no_survey_takes_none(surrogate):
    assert not FlowGRPO(surrogate=surrogate).surveys


# what is logged


@each
def test_metrics(surrogate):
    d, p = items()
    settled = surrogate.settle(d, p, alone) if surrogate.surveys else LATER
    logged = surrogate.metrics(d, settled)
    assert logged.pop("ratio").equal(d.exp())
    on = (d.tolist(), p.adv.tolist(), p.weight.tolist())
    match surrogate:
        case PPO() | SPO():
            same(logged.pop("clip_frac").double(), ((d.exp() - 1).abs() > surrogate.clip).double())
        case P3O():
            judged_only = [x for x, seen in zip(d.tolist(), p.weight.tolist(), strict=True) if seen]
            same(logged.pop("ess"), [slow.effective_sample_size(judged_only)] * ITEMS)
        case M2PO():
            tau = slow.m2po_tau(*on, surrogate.m2)
            same(logged.pop("tau"), [tau] * ITEMS)
            low, high = min(1 - surrogate.floors[0], exp(-tau)), max(1 + surrogate.floors[1], exp(tau))
            same(logged.pop("clip_frac").double(), ((d.exp() < low) | (d.exp() > high)).double())
    assert not logged
