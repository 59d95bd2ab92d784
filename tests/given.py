"""Points of judged data without a network: rollouts by their advantages, velocities that are functions of a point."""

from dataclasses import replace

import torch

from flowrl import flow
from flowrl.credit import alone
from flowrl.train import bound_parts
from flowrl.types import Cond, Rollout, Roots

D = 5  # elements of a latent


def log_prob(kernel, x_next, mean, std):
    """[E] the log-prob that `kernel` gives to x_next under a mean [E, *L] and std [E]."""
    return flow.LOG_PROBS[kernel](flow.mean_sq(x_next.detach() - mean), std)


class Given:
    """A policy whose velocities are functions of a point, by slot: all that `bound_parts` asks of one."""

    def __init__(self, **slots):
        self.slots = slots

    def bound(self, p, acted):
        return replace(p, read=lambda slot: self.slots[slot](p), bind=lambda elsewhere: self.bound(elsewhere, acted))


def bound(algorithm, point, rows=10**6, **slots):
    """The parts of a point, of at most `rows` rows, settled where the objective surveys."""
    return bound_parts(Given(**slots), algorithm, point, -1, rows, alone)


def fixed(algorithm, point, **velocities):
    """The whole point under given velocities [B, D]."""
    (part,) = bound(algorithm, point, **{slot: lambda p, v=v: v for slot, v in velocities.items()})
    return part


def drift(seed):
    """A velocity in float64 and the matrix it is made of."""
    w = (0.5 * normal(D, D, seed=seed)).requires_grad_()
    return (lambda p: torch.tanh(p.x @ w + p.t[:, None])), w


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def judged(adv, weight=None, first=0):
    """A rollout whose groups are the rows of adv [G, n], and its conditions; prompt g has the id 10 + g."""
    groups, size = adv.shape
    group = torch.arange(first, first + groups).repeat_interleave(size)
    n = len(group)
    roots = Roots(group - first, 10 + group, torch.arange(size).repeat(groups), group)
    x0 = torch.cat([normal(size, D, seed=int(g)) for g in group[::size]])
    weight = torch.ones(n, dtype=torch.float64) if weight is None else weight.flatten().double()
    rollout = Rollout(roots, x0, torch.arange(n), torch.full((n,), -1), torch.linspace(1, 0, 9), "ode", None, None, 0,
                      adv=adv.double().flatten(), weight=weight)  # fmt: skip
    return rollout, Cond({}, group - first)


def points(algorithm, adv, weight=None, updates=1, first=0):
    rollout, cond = judged(adv, weight, first)
    return list(algorithm.points(rollout, cond, updates, (7, 3)))


def reordered(p, rows):
    """The rows of a forward point in another order."""
    items = {name: value[rows] for name, value in p.items.items()}
    return replace(p, x=p.x[rows], t=p.t[rows], cond=p.cond[rows], adv=p.adv[rows], weight=p.weight[rows], items=items)


def gradient(algorithm, point, rows, w, **slots):
    """d (sum of weighted losses) / d w, in micro-batches."""
    total = torch.zeros_like(w)
    for part in bound(algorithm, point, rows, **slots):
        total += torch.autograd.grad(algorithm.loss(part) @ part.weight, w)[0]
    return total
