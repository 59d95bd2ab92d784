"""AWM (2509.25050), one sample and one element at a time, in float64 torch scalars."""

import math

import torch


def matching_loss(x0, eps, v):
    total = 0.0
    for k in range(len(x0)):
        total = total + (v[k] - (eps[k] - x0[k])) ** 2
    return total / len(x0)


def log_likelihood(weight, power, ell, t):
    if weight == "uniform":
        return -ell
    if weight == "t":
        return -t * ell
    if weight == "t2":
        return -t * t * ell
    if weight == "elbo":
        return -(1 - t) * ell / t
    if weight == "huber":
        return -t * (torch.sqrt(ell + 1e-10) - 1e-5)
    assert weight == "ghuber"
    return -(t / power) * (torch.pow(ell + 1e-10, power) - math.pow(1e-10, power))


def clipped(ratio, adv, clip):
    free = -adv * ratio
    held = -adv * min(max(ratio, 1 - clip), 1 + clip)
    return max(free, held)


def losses(x0, eps, t, v, v_old, adv, sample, *, weight, power, ratio, clip, adv_max, old_kl):
    """The loss of each row: x0, eps, v, v_old are lists of flat rows; advantages are clipped to 5."""
    n = len(t)
    q = [log_likelihood(weight, power, matching_loss(x0[i], eps[i], v[i]), t[i]) for i in range(n)]
    old = [log_likelihood(weight, power, matching_loss(x0[i], eps[i], v_old[i]), t[i]) for i in range(n)]
    found = []
    for i in range(n):
        if ratio == "one":
            log_ratio = q[i] - q[i].detach()
        elif ratio == "draw":
            log_ratio = q[i] - old[i]
        else:
            mine = [j for j in range(n) if sample[j] == sample[i]]
            log_ratio = sum(q[j] for j in mine) / len(mine) - sum(old[j] for j in mine) / len(mine)
        moved = sum((v[i][k] - v_old[i][k]) ** 2 for k in range(len(v[i]))) / len(v[i])
        found.append(clipped(torch.exp(log_ratio), adv[i] / 5 * adv_max, clip) + old_kl * moved)
    return found
