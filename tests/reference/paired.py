"""FDFO, one state of one trajectory at a time, in float64 torch scalars."""

import torch


def losses(x0, rewards, v, v_roll, clip):
    """{(sample, state): loss}; x0[n], v[n][s], v_roll[n][s] are flat rows; samples 2k and 2k + 1 are a pair."""
    found = {}
    for n in range(len(x0)):
        m = n + 1 if n % 2 == 0 else n - 1
        if rewards[n] is None or rewards[m] is None:
            continue
        size = len(x0[n])
        better = (rewards[n] - rewards[m]) / 2
        apart = [(x0[n][k] - x0[m][k]) / 2 for k in range(size)]
        square = sum(a * a for a in apart) / size
        g = [a / (square + 1e-6) for a in apart]
        for s in range(len(v[n])):
            target = [v_roll[n][s][k] - g[k] for k in range(size)]
            miss = sum((v[n][s][k] - target[k]) ** 2 for k in range(size)) / size
            rho = torch.exp(-miss + sum(c * c for c in g) / size)
            found[n, s] = -better * rho + abs(better) / (2 * clip) * (rho - 1) ** 2
    return found
