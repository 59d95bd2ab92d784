"""Every objective with LoRA or none and any regulariser: gradients add up, the base stays, forwards are as promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from diffusers import ConfigMixin, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from torch import nn

from flowrl import draws, train
from flowrl.credit import alone
from flowrl.forwards import Count, forwards
from flowrl.online import credit
from flowrl.plan import plan
from flowrl.policy import LoRA, Policy
from flowrl.registry import ALGORITHMS, REGULARISERS
from flowrl.sample import sample
from flowrl.session import Session
from flowrl.tell import Sums
from flowrl.types import Cond, Roots
from tests.unit.test_config import config

ODE = ("sampler={steps: 4}",)
SETTINGS = {
    "flow_grpo": (("sampler.steps=4",),),
    "paired": (("sampler={steps: 4, kernel: edm_churn, eta: 0.1}", "data.shared_noise=0.9"),),
    "dpo": ((*ODE, "data.group_size=4", "algorithm.pairs=2"),),
    "ram": (ODE, (*ODE, "algorithm.path_cost=true")),
}
SURROGATES = [
    (f"algorithm.surrogate={{name: {name}}}", "algorithm.logp_scale=3")
    for name in ("spo", "pspo", "p3o", "m2po", "lpo")
]
CASES = {name: SETTINGS.get(name, (ODE,)) for name in ALGORITHMS.names()}
CASES["flow_grpo"] += tuple((*SETTINGS["flow_grpo"][0], *surrogate) for surrogate in SURROGATES)
CASES["flow_grpo"] += ((*SETTINGS["flow_grpo"][0], "algorithm.guard=true"),)
CHARGES = {"none": {}, "kl": {"velocity_kl": 0.3}, "hinge": {"norm_hinge": 2.0}}
CHARGES["both"] = {**CHARGES["kl"], **CHARGES["hinge"]}


class Net(ModelMixin, ConfigMixin, PeftAdapterMixin):
    config_name = "config.json"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, t):
        return self.b(torch.tanh(self.a(torch.cat([x, t[:, None]], 1))))


class Toy:
    """An adapter in float64 that counts its forwards."""

    lora_targets = ("a", "b")

    def __init__(self):
        self.network, self.grad, self.free = Net(), Count(), Count()
        self.network.register_forward_hook(self._count)

    def _count(self, _, inputs, __):
        if torch.is_grad_enabled():
            self.grad += Count(len(inputs[0]), 1)
        else:
            self.free += Count(len(inputs[0]), 1)

    def velocity(self, x, t, cond):
        n = 2 if cond.guidance > 1 else 1
        return self.network(x.double().repeat(n, 1), t.double().repeat(n)).chunk(n)[0]


def session(c, lora):
    adapter = Toy()
    policy = Policy(adapter, LoRA(rank=2, alpha=4) if lora else None, c.policy, 0, None)
    adapter.network.double()
    policy.snapshots = {slot: [p.double() for p in values] for slot, values in policy.snapshots.items()}
    optimiser = torch.optim.SGD(policy.parameters, lr=0.5)
    return Session(c, Accelerator(cpu=True), [], plan(c), None, [], None, adapter, policy, optimiser)


def rollout(s, step):
    c = s.config
    size, prompts = c.data.group_size, c.data.prompts_per_step
    group = torch.arange(prompts).repeat_interleave(size)
    roots = Roots(group, group, torch.arange(size).repeat(prompts), group)
    noise = draws.normal((3,), [(step, draws.ROOT, *who) for who in roots.of(torch.arange(len(group)))])
    with s.policy.reading(c.algorithm.acts_with):
        found = sample(
            s.velocity, noise.double(), Cond({}, group), roots, torch.linspace(1, 0, 5), c.sampler.plan(0, step),
            c.sampler, (0, step), keep_v=c.algorithm.keep_v, version=s.policy.versions[c.algorithm.acts_with],
        )  # fmt: skip
    g = torch.Generator().manual_seed(step)
    return credit(s, replace(found, rewards=torch.randn(len(found.x0), 1, generator=g)), Sums()), Cond({}, group)


class Rewards:
    weights = (1.0,)


def gradient(s):
    return torch.cat([p.grad.flatten() for p in s.policy.parameters])


@pytest.mark.parametrize("charges", CHARGES.values(), ids=CHARGES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "name, settings", [pytest.param(n, x, id=f"{n}{i or ''}") for n, many in CASES.items() for i, x in enumerate(many)]
)
def test_gradients_add_up(monkeypatch, name, settings, lora, charges):
    regularise = f"regularise={{{', '.join(f'{k}: {c}' for k, c in charges.items())}}}"
    c = config(f"algorithm.name={name}", *settings, regularise, "compute.rows_per_forward=6")
    s = replace(session(c, lora), rewards=Rewards())
    ref = [p.clone() for p in s.policy.snapshots["ref"]]
    seen = []

    def step(s, sums):
        seen.append(gradient(s))
        for p in s.policy.parameters:
            p.data += 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(len(seen)))
        s.optimiser.zero_grad()
        s.policy.stepped()

    monkeypatch.setattr(train, "_step", step)
    for now in range(2):
        r, cond = rollout(s, now)
        s.adapter.grad = s.adapter.free = Count()
        expected = []
        for point in c.algorithm.points(r, cond, c.optimiser.updates, (0, now)):
            counts = s.adapter.grad, s.adapter.free
            expected.append(apart(s, point, r.version, charges))
            s.adapter.grad, s.adapter.free = counts
            train.update(s, point, r.version, Sums())
        s.policy.acted()
        for got, want in zip(seen[-c.optimiser.updates :], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        planned = forwards(c, now)
        assert (s.adapter.grad, s.adapter.free) == (planned.current, planned.others)
    assert any(g.abs().max() > 0 for g in seen)
    assert all(torch.equal(before, after) for before, after in zip(ref, s.policy.snapshots["ref"], strict=True))


def apart(s, point, acted, charges):
    """The objective's gradient plus coefficient times that of each regulariser, each taken alone on the whole point."""
    (part,) = train.bound_parts(s.policy, s.config.algorithm, point, acted, len(point), alone)
    total = gradient_of(s, s.config.algorithm.loss(part) @ part.weight.double() / part.weight.sum())
    weight = part.row_weight()
    for name, c in charges.items():
        total = total + c * gradient_of(s, REGULARISERS[name](part) @ weight.double() / weight.sum())
    return total


def gradient_of(s, loss):
    grads = torch.autograd.grad(loss.double(), s.policy.parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])
