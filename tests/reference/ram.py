"""RAM (2605.10759), one sample and one element at a time, in float64; the paper's loss, without our 1 / M."""

import math


def loss(x0, eps, v, v_old, v_ref, adv, scale, extra=None):
    """Of one sample, all flat rows; `extra` is what the cost of the path adds to the target."""
    total = 0.0
    for k in range(len(x0)):
        reinforced = scale * adv * ((eps[k] - x0[k]) - v_old[k])
        target = v_ref[k] + reinforced + (extra[k] if extra else 0.0)
        total = total + (v[k] - float(target)) ** 2
    return total / len(x0)


def control_cost(t, v_old, v_ref):
    """Half the squared control u = -2 (v - v_ref) / g of the memoryless process, g^2 = 2 t / (1 - t)."""
    g = math.sqrt(2 * t / (1 - t))
    return sum((2 * (a - b) / g) ** 2 for a, b in zip(v_old, v_ref, strict=True)) / 2


def path_cost(x0, x_s, x_t, s, t, at_s, at_t):
    """t / (1 - t) times the gradient of the mean cost, by one x_s; at_s and at_t are (v_old, v_ref) there."""
    a = (1 - t) / (1 - s)
    tau = math.sqrt(t**2 - a**2 * s**2)
    gap = control_cost(s, *at_s) - control_cost(t, *at_t)
    added = []
    for k in range(len(x0)):
        z = (x_t[k] - a * x_s[k]) / tau
        eps_hat = x_t[k] + (1 - t) * at_t[0][k]
        added.append(t * t / (1 - t) * gap * (eps_hat / t - z / tau))
    return added
