"""Diffusion-DPO (2311.12908), one pair and one element at a time, in float64 torch scalars."""

import torch


def matching_error(x0, eps, v):
    total = 0.0
    for k in range(len(x0)):
        total = total + (v[k] - (eps[k] - x0[k])) ** 2
    return total / len(x0)


def pair_loss(winner, loser, beta):
    """winner, loser: (x0, eps, v, v_ref), each a flat row."""
    differences = []
    for x0, eps, v, v_ref in (winner, loser):
        differences.append(matching_error(x0, eps, v) - matching_error(x0, eps, v_ref))
    inside = -(beta / 2) * (differences[0] - differences[1])
    return torch.log(1 + torch.exp(-inside))
