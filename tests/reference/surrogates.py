"""The surrogates, a decision at a time in Python floats: loss and derivative in the log-ratio of every item.

d log-ratios, a advantages, on whether there was a verdict; each returns (losses, derivatives).
"""

import math


def ppo(d, a, clip):
    return _each(d, a, lambda rho, adv: _clipped(rho, adv, 1 - clip, 1 + clip))


def spo(d, a, clip):
    def one(rho, adv):
        bend = abs(adv) / (2 * clip)
        return -adv * rho + bend * (rho - 1) ** 2, (-adv + 2 * bend * (rho - 1)) * rho

    return _each(d, a, one)


def pspo(d, a, alpha):
    return _each(d, a, lambda rho, adv: (-adv * ((1 - alpha) * rho + alpha), -adv * (1 - alpha) * rho))


def p3o(d, a, on):
    ess = effective_sample_size([x for x, seen in zip(d, on, strict=True) if seen])
    losses, slopes = [], []
    for x, adv in zip(d, a, strict=True):
        rho = math.exp(x)
        capped = min(rho, ess)
        losses.append(-capped * adv * x + (1 - ess) * (rho * math.log(rho) - rho + 1))
        slopes.append(-capped * adv + (1 - ess) * rho * math.log(rho))
    return losses, slopes


def effective_sample_size(d):
    weights = [math.exp(x) for x in d]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def m2po(d, a, on, m2, floors):
    tau = m2po_tau(d, a, on, m2)
    low = min(math.exp(-tau), 1 - floors[0])
    high = max(math.exp(tau), 1 + floors[1])
    return _each(d, a, lambda rho, adv: _clipped(rho, adv, low, high))


def m2po_tau(d, a, on, m2):
    """By bisection; infinite where nothing needs to be clipped."""
    harmful = [abs(x) for x, adv, seen in zip(d, a, on, strict=True) if seen and adv * x > 0]
    if not harmful or sum(x * x for x in harmful) <= m2 * len(harmful):
        return math.inf
    low, high = 0.0, max(harmful)
    for _ in range(200):
        tau = (low + high) / 2
        if sum(min(x * x, tau * tau) for x in harmful) <= m2 * len(harmful):
            low = tau
        else:
            high = tau
    return low


def lpo(d, a, on, block, tau, kappa):
    """The cross-entropies of the blocks and their derivatives, as {block: loss} and one derivative an item."""
    entropies, slopes = {}, [0.0] * len(d)
    for b in set(block):
        members = [i for i in range(len(d)) if block[i] == b and on[i]]
        if not members:
            continue
        wanted = _softmax([a[i] / tau for i in members])
        have = _softmax([kappa * d[i] for i in members])
        entropies[b] = -sum(w * math.log(p) for w, p in zip(wanted, have, strict=True))
        for i, w, p in zip(members, wanted, have, strict=True):
            slopes[i] = kappa * (p - w)
    return entropies, slopes


def _softmax(values):
    weights = [math.exp(x) for x in values]
    return [w / sum(weights) for w in weights]


def _each(d, a, one):
    both = [one(math.exp(x), adv) for x, adv in zip(d, a, strict=True)]
    return [loss for loss, _ in both], [slope for _, slope in both]


def _clipped(rho, adv, low, high):
    free, held = -adv * rho, -adv * min(max(rho, low), high)
    return (free, -adv * rho) if free >= held else (held, 0.0)
