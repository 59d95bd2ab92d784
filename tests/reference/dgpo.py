"""DGPO (2510.08425), one sample and one element at a time, in float64 torch scalars."""

import math


def matching_error(x0, eps, v):
    total = 0.0
    for k in range(len(x0)):
        total = total + (v[k] - (eps[k] - x0[k])) ** 2
    return total / len(x0)


def losses(x0, eps, v, v_anchor, v_old, adv, weight, block, *, beta, clip):
    """The loss of each row, the whole batch given; rows of a block are a group at one (t, eps)."""
    n = len(adv)
    error = [matching_error(x0[i], eps[i], v[i]) for i in range(n)]
    found = []
    for i in range(n):
        group = [j for j in range(n) if block[j] == block[i] and weight[j] > 0]
        total = 0.0
        for j in group:
            total += adv[j] * beta * (error[j] - matching_error(x0[j], eps[j], v_anchor[j])).item() / len(group)
        strength = 1 / (1 + math.exp(-total))
        mine = error[i]
        if clip is not None:
            ratio = math.exp((matching_error(x0[i], eps[i], v_old[i]) - mine).item())
            if (adv[i] > 0 and ratio > 1 + clip) or (adv[i] <= 0 and ratio < 1 - clip):
                mine = mine.detach()
        found.append(strength * adv[i] * mine)
    return found
