"""The plan of a run: its counts against those of a real network, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flowrl import draws
from flowrl.config import Config
from flowrl.config_file import ConfigError
from flowrl.credit import alone
from flowrl.forwards import Count, Forwards, forwards, stochastic_steps
from flowrl.models.base import guided
from flowrl.plan import plan
from flowrl.policy import Policy
from flowrl.registry import REGULARISERS
from flowrl.sample import sample
from flowrl.train import bound_parts
from flowrl.types import Cond, Rollout, Roots
from tests.unit.test_config import config

NFT = ("algorithm={name: nft}", "sampler={steps: 8}")
AWM = ("algorithm={name: awm, draws: 2}", "sampler={steps: 8}")
RAM = ("algorithm={name: ram, draws: 2}", "sampler={steps: 8}")
DPO = ("algorithm={name: dpo, pairs: 2}", "sampler={steps: 8}")
DGPO = ("algorithm={name: dgpo}", "sampler={steps: 8}", "data.prompts_per_step=4")
CRD = ("algorithm={name: crd}", "sampler={steps: 8}", "data.prompts_per_step=4")
TREE = ("sampler.window={size: 3, start: 1}", "sampler.branch=3")
BRANCH = ("sampler.branch={'0': 2, '3': 3}", "sampler.branch_noise=4")
PAIRED = ("algorithm={name: paired}", "sampler={steps: 4, kernel: edm_churn, eta: 0.01}", "data.shared_noise=0.9")


class Counted:
    """An adapter of two latent elements whose network counts its forwards."""

    def __init__(self) -> None:
        self.network = nn.Linear(2, 2, bias=False)
        self.network.register_forward_hook(self._count)
        self.grad, self.free = Count(), Count()

    def _count(self, _: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
        one = Count(len(inputs[0]), 1)
        if torch.is_grad_enabled():
            self.grad += one
        else:
            self.free += one

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        if cond.guidance <= 1:
            return self.network(x)
        return guided(lambda x, t: self.network(x), x, t, cond.guidance, [], [])

    def counts(self) -> tuple[Count, Count]:
        """(with, without) gradient since the last call."""
        counts, self.grad, self.free = (self.grad, self.free), Count(), Count()
        return counts


def measured(c: Config, steps: int) -> list[Forwards]:
    """What one process of a run with one process does in each of its steps."""
    adapter = Counted()
    policy = Policy(adapter, None, c.policy, c.seed, None)
    return [_step(c, adapter, policy, step) for step in range(steps)]


def _step(c: Config, adapter: Counted, policy: Policy, step: int) -> Forwards:
    chunk = plan(c).rows_per_forward
    rollout, cond = _rollout(c, policy, step, chunk)
    _, acted = adapter.counts()
    for point in c.algorithm.points(rollout, cond, c.optimiser.updates, (c.seed, step)):
        for part in bound_parts(policy, c.algorithm, point, rollout.version, chunk, alone):
            loss = c.algorithm.loss(part).sum() + sum(REGULARISERS[name](part).sum() for name in c.regularise)
            loss.backward()
            c.algorithm.metrics(part)
        with torch.no_grad():
            adapter.network.weight.add_(0.01)
        policy.stepped()
    policy.acted()
    return Forwards(acted, *adapter.counts())


def _rollout(c: Config, policy: Policy, step: int, chunk: int) -> tuple[Rollout, Cond]:
    group = torch.arange(c.data.prompts_per_step).repeat_interleave(c.data.group_size)
    roots = Roots(group, group, torch.arange(c.data.group_size).repeat(c.data.prompts_per_step), group)
    cond = Cond({}, group, c.model.guidance)

    def velocity(x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        parts = [slice(i, i + chunk) for i in range(0, len(x), chunk)]
        return torch.cat([policy.velocity(x[part], t[part], cond[part]) for part in parts])

    noise = draws.normal((2,), [(c.seed, step, draws.ROOT, *who) for who in roots.of(torch.arange(len(group)))])
    grid, slot = torch.linspace(1, 0, c.sampler.steps + 1), c.algorithm.acts_with
    with policy.reading(slot):
        rollout = sample(
            velocity, noise, cond, roots, grid, c.sampler.plan(c.seed, step), c.sampler, (c.seed, step),
            keep_v=c.algorithm.keep_v, version=policy.versions[slot],
        )  # fmt: skip
    adv = torch.randn(len(rollout.x0))
    edges = replace(
        rollout.edges, adv=torch.randn(len(rollout.edges.state)), weight=torch.ones_like(rollout.edges.logp)
    )
    return replace(rollout, adv=adv, weight=torch.ones_like(adv), edges=edges), cond


RECIPES = {
    "dgpo, slow old reference": (*DGPO, "algorithm.reference=old", "policy.old={rate: 0.5, cap: 0.9}"),
    "flow_grpo": (),
    "flow_grpo, kl": ("regularise={velocity_kl: 1, path_kl: 0.1}",),
    "spo": ("algorithm.surrogate.name=spo",),
    "p3o": ("algorithm.surrogate.name=p3o",),
    "m2po, four updates, kl": ("algorithm.surrogate.name=m2po", "optimiser.updates=4", "regularise.velocity_kl=1"),
    "lpo, one update": ("algorithm.surrogate.name=lpo", "optimiser.updates=1"),
    "lpo, guided, small": ("algorithm.surrogate.name=lpo", "model.guidance=3", "compute.rows_per_forward=5"),
    "lpo, a tree each": (*TREE, "algorithm.surrogate.name=lpo", "data.group_size=1", "optimiser.updates=1"),
    "p3o, guard": ("algorithm.surrogate.name=p3o", "algorithm.guard=true"),
    "p3o, tree": ("algorithm.surrogate.name=p3o", *TREE),
    "guard": ("algorithm.guard=true",),
    "guard, kl": ("algorithm.guard=true", "regularise.path_kl=0.1"),
    "window": ("sampler.window={size: 2, start: 0}", "optimiser.updates=4"),
    "tree": TREE,
    "tree, random place": ("sampler.window={size: 2, start: random}", "sampler.branch=3", "sampler.steps=5"),
    "branches": BRANCH,
    "a tree each": (*TREE, "data.group_size=1", "optimiser.updates=1"),
    "paired": PAIRED,
    "paired, one update, kl": (*PAIRED, "optimiser.updates=1", "regularise.path_kl=0.1"),
    "nft": NFT,
    "nft, dpm2, four updates": (*NFT, "sampler.solver=dpm2", "optimiser.updates=4"),
    "nft, one update": (*NFT, "optimiser.updates=1", "regularise.velocity_kl=0.3"),
    "nft, kl": (*NFT, "regularise.velocity_kl=0.3"),
    "nft, slow old, kl": (*NFT, "policy.old={rate: 0.5, cap: 0.9}", "regularise.velocity_kl=0.3"),
    "nft, slow old from the third step": (*NFT, "policy.old={rate: 0.5, cap: 0.9, flat: 1, clock: rollout}"),
    "nft, slow old from the first step": (*NFT, "policy.old={rate: 0.5, cap: 0.9, flat: -2}"),
    "nft, slow old after five updates": (*NFT, "policy.old={rate: 0.5, cap: 0.9, flat: 5}"),
    "nft, two draws": (*NFT, "algorithm.draws=2"),
    "awm": (*AWM,),
    "awm, ratio of draws, slow old": (*AWM, "algorithm.ratio=draw", "policy.old={rate: 0.5, cap: 0.9}"),
    "awm, ratio of samples, four updates": (*AWM, "algorithm.ratio=sample", "optimiser.updates=4"),
    "awm, no old policy": (*AWM, "algorithm.old_kl=0"),
    "ram": (*RAM,),
    "ram, path cost, one update": (*RAM, "algorithm.path_cost=true", "optimiser.updates=1"),
    "ram, path cost, slow old, kl": (
        *RAM,
        "algorithm.path_cost=true",
        "policy.old={rate: 0.5, cap: 0.9, clock: rollout}",
        "regularise.velocity_kl=0.3",
    ),
    "ram, guided rollout": (*RAM, "model.guidance=3"),
    "dpo": DPO,
    "dpo, three draws, small": (*DPO, "algorithm.draws=3", "compute.rows_per_forward=5"),
    "dpo, lagging reference, kl": (
        *DPO,
        "algorithm.reference=old",
        "policy.old={rate: 1, cap: 0.9, clock: rollout}",
        "regularise.velocity_kl=0.3",
    ),
    "dgpo": DGPO,
    "dgpo, no clip, kl": (*DGPO, "algorithm.clip=null", "regularise.velocity_kl=0.3"),
    "dgpo, old reference, four updates": (*DGPO, "algorithm.reference=old", "optimiser.updates=4"),
    "crd": CRD,
    "crd, slow old, two draws, small": (
        *CRD,
        "policy.old={rate: 0.5, cap: 0.9}",
        "algorithm.draws=2",
        "compute.rows_per_forward=5",
    ),
    "crd, plain teacher, kl": (*CRD, "algorithm.teacher_guidance=1", "regularise.velocity_kl=0.3"),
    "crd, no teacher, one update": (*CRD, "algorithm.kl=0", "optimiser.updates=1"),
    "guided": ("model.guidance=3", "regularise.velocity_kl=1"),
    "small batches": ("compute.rows_per_forward=5",),
}


@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES)
def test_the_network_runs_as_often_as_promised(changes):
    c = config("data.prompts_per_step=3", *changes)
    assert measured(c, steps=4) == [forwards(c, step) for step in range(4)]


def test_a_tree_shares_the_forwards_of_its_states():
    c = config(*TREE, "data.prompts_per_step=1", "data.group_size=2", "optimiser.updates=1")
    assert stochastic_steps(c) == (2 * 13, 2 * 39)
    assert forwards(c, 1).current.rows == 2 * 13
    assert plan(c).samples == 2 * 27


@pytest.mark.parametrize("name", ["p3o", "m2po", "lpo"])
def test_a_survey_costs_nothing_while_the_weights_are_those_that_acted(name):
    """And one more forward of every row, without gradient, in each later update."""
    surveyed = ("optimiser.updates=4", f"algorithm.surrogate.name={name}", "data.group_size=8")
    plain = forwards(config("optimiser.updates=4", "data.group_size=8"), 2)
    got = forwards(config(*surveyed), 2)
    assert (got.rollout, got.current, plain.others) == (plain.rollout, plain.current, Count())
    assert got.others.rows * 4 == plain.current.rows * 3


@pytest.mark.parametrize("rows", [1, 5, 16, "auto"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("updates", [1, 2, 3, 24])
def test_processes_and_batches_share_the_work_of_one(world, rows, updates):
    wide = ("data.prompts_per_step=48", "data.group_size=24", f"optimiser.updates={updates}")
    whole, part = plan(config(*wide)), plan(config(*wide, f"compute.rows_per_forward={rows}"), world, 300)
    assert part.samples * world == whole.samples == 48 * 24
    assert (part.states * world, part.edges * world) == (whole.states, whole.edges) == (48 * 24 * 7,) * 2
    assert part.rows_per_update * world * updates == whole.states
    assert (part.micro_batches - 1) * part.rows_per_forward < part.rows_per_update
    assert part.rows_per_update <= part.micro_batches * part.rows_per_forward
    assert part.forwards.rollout.rows * world == whole.forwards.rollout.rows == 48 * 24 * 8


def test_the_user_sees_the_numbers():
    c = config("data.prompts_per_step=6", "data.group_size=8", "compute.rows_per_forward=5", "regularise.velocity_kl=1")
    assert plan(c, world=2, n_prompts=100).lines() == [
        "100 prompts, once through in 17 steps of 20",
        "a step: 6 prompts x 8 = 48 samples, 24 on each of 2 processes",
        "rollout: 8 steps of flow_sde, 168 states with 168 stochastic steps",
        "learning: 2 updates of 84 rows in 17 micro-batches of up to 5 rows",
        "forwards, as rows (calls): rollout 192 (40), updates 168 (34), old and reference 168 (34)",
    ]


def test_a_batch_is_no_larger_than_what_there_is():
    assert plan(config("compute.rows_per_forward=1000")).rows_per_forward == 56
    assert plan(config(*NFT)).rows_per_forward == 16


REFUSED = {
    "group of one": (
        ("data.group_size=1",), 1,
        "data.group_size = 1: no relative signal, .* lower compute.rows_per_forward",
    ),
    "processes": (
        ("data.prompts_per_step=10",), 4,
        "data.prompts_per_step = 10 does not split evenly over 4 processes: take 8 or 12 prompts, or 2 or 5 processes",
    ),
    "fewer prompts than processes": (
        ("data.prompts_per_step=2",), 3,
        "data.prompts_per_step = 2 .* over 3 processes: take 3 prompts, or 1 or 2 processes",
    ),
    "updates": (
        ("data.group_size=24", "optimiser.updates=7"), 1,
        "optimiser.updates = 7 does not divide data.group_size = 24: .* take 6 or 8 updates",
    ),
    "groups on two processes": (
        ("algorithm={name: dgpo}", "sampler={steps: 8}", "data.prompts_per_step=4", "optimiser.updates=4"), 2,
        "optimiser.updates = 4 does not divide data.prompts_per_step / processes = 2: .* take 1 or 2 updates",
    ),
    "no stochastic step": (
        ("sampler={steps: 8}",), 1,
        "algorithm.name = flow_grpo learns from stochastic steps and sampler.eta = 0 .* sampler.eta=0.7",
    ),
    "copies": ((*NFT, "data.shared_noise=true"), 1, "data.shared_noise = 1 with sampler.eta = 0: .* same picture"),
    "a tree for two updates": (
        (*TREE, "data.group_size=1"), 1, "optimiser.updates = 2 does not divide data.group_size = 1: .* take 1 updates",
    ),
    "depths of a chain": (("credit.backup=depth",), 1, "credit.backup = depth .* take credit.backup=uniform"),
    "odd pairs": (
        (*PAIRED, "data.group_size=7", "optimiser.updates=1"), 1,
        "data.group_size = 7 .* are a pair.* take data.group_size=8",
    ),
    "updates between pairs": (
        (*PAIRED, "data.group_size=12", "optimiser.updates=4"), 1,
        "optimiser.updates = 4 does not divide data.group_size / 2 = 6: .* take 2 or 3 updates",
    ),
    "pairs of strangers": (
        (*PAIRED, "data.shared_noise=false"), 1, "data.shared_noise = 0 .* take data.shared_noise=0.9975",
    ),
    "trees for pairs": (
        (*PAIRED, "sampler.branch={'0': 2}"), 1, "sampler.branch = {0: 2}: algorithm.name = paired .*no use for a tree",
    ),
    "tree for nft": (("algorithm={name: nft}", *TREE), 1, "sampler.branch = 3: algorithm.name = nft .*branch=1"),
    "path kl for nft": ((*NFT, "regularise.path_kl=0.5"), 1, "regularise.path_kl = 0.5 .* take regularise.velocity_kl"),
    "guard": (
        ("algorithm.guard=true", "sampler.kernel=dance"), 1,
        "algorithm.guard = true with sampler.kernel = dance: .* take sampler.kernel=flow_sde",
    ),
    "lpo of single samples": (
        ("algorithm.surrogate.name=lpo", "optimiser.updates=4"), 1,
        "optimiser.updates = 4 with algorithm.surrogate.name = lpo: .* one of each; take optimiser.updates=1",
    ),
    "weights that cancel": (
        ("rewards=[{name: jpeg_size}, {name: jpeg_size, weight: -1}]",), 1,
        "rewards = jpeg_size 1, jpeg_size -1: the weights add up to 0 .* no signal",
    ),
    "weight zero": (("rewards=[{name: jpeg_size, weight: 0}]",), 1, "rewards = jpeg_size 0: .* no signal"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "world", "said"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_cannot_work_is_refused_with_numbers_and_a_way_out(changes, world, said):
    with pytest.raises(ConfigError, match=said) as error:
        plan(config(*changes), world)
    assert "\n" not in str(error.value), "nothing else is wrong"


def test_opposite_weights_of_two_rewards_do_not_cancel():
    assert plan(config("rewards=[{name: jpeg_size}, {name: jpeg_incompressible, weight: -1}]"))


def test_noise_that_is_shared_wholly_needs_a_stochastic_sampler():
    assert plan(config("data.shared_noise=true")) and plan(config(*NFT, "data.shared_noise=0.99"))


def test_all_reasons_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        plan(config("data.group_size=1", "sampler={}", "data.shared_noise=true", "data.prompts_per_step=4"), world=3)
    assert len(str(error.value).splitlines()) == 1 + 4
