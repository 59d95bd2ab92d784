"""CRD (2603.14128), one sample and one element at a time, in float64 torch scalars."""

import math

import torch


def error(x0, eps, v, adaptive):
    size, total, absolute = len(x0), 0.0, 0.0
    for k in range(size):
        off = v[k] - (eps[k] - x0[k])
        total = total + off**2
        absolute += abs(off.item())
    return total / size / (max(absolute / size, 1e-5) if adaptive else 1)


def weightings(rewards, temperature):
    """The weights of a group's members, a list for each direction."""
    n = len(rewards)
    if temperature < 0:
        return [[1 / n] * n]
    if temperature > 0:
        tables = [[math.exp(sign * r / temperature) for r in rewards] for sign in (1, -1)]
    else:
        tables = [[math.exp(r) if r > 0 else 0.0 for r in rewards], [1.0] * n]
    return [[w / sum(table) for w in table] for table in tables]


def losses(
    x0, eps, v, v_old, teacher, adv, weight, block, *, beta, adv_max, match, adaptive, temperature, kl, by_reward
):
    """The loss of each row, the whole batch given; rows of a block are a group at one draw."""
    n = len(adv)
    implied = [error(x0[i], eps[i], v_old[i], adaptive) - error(x0[i], eps[i], v[i], adaptive) for i in range(n)]
    rewards = [min(max(a / adv_max, -1), 1) / 2 + 0.5 for a in adv]
    found = []
    for i in range(n):
        group = [j for j in range(n) if block[j] == block[i] and weight[j] > 0]
        directions = weightings([rewards[j] for j in group], temperature)
        total = 0.0
        for shares in directions:
            centre = sum(s * implied[j].item() for s, j in zip(shares, group, strict=True))
            level = sum(s * rewards[j] for s, j in zip(shares, group, strict=True))
            have, want = beta * (implied[i] - centre), rewards[i] - level
            if match == "mse":
                total = total + (have - want) ** 2
            else:
                y = 1 / (1 + math.exp(-want))
                total = total + y * torch.log(1 + torch.exp(-have)) + (1 - y) * torch.log(1 + torch.exp(have))
        drift = sum((v[i][k] - teacher[i][k]) ** 2 for k in range(len(v[i]))) / len(v[i])
        least = 1e-4 / kl if by_reward else 1
        strength = kl * (least + (1 - least) * rewards[i])
        found.append(adv_max / beta * total / len(directions) + strength * drift)
    return found
