"""TreeGRPO and BranchGRPO, one edge at a time, in Python floats: a tree is {edge: its children}, -1 above the roots."""

import math
from statistics import fmean, pstdev


def family(parent):
    children = {edge: [] for edge in range(-1, len(parent))}
    for edge, above in enumerate(parent):
        children[above].append(edge)
    return children


def leaves(edge, children, logp, weights):
    """{leaf edge below: its share}: the product of the shares of all the children on the way."""
    if not children[edge]:
        return {edge: 1.0}
    odds = [math.exp(logp[child]) if weights == "mean_logp" else 1.0 for child in children[edge]]
    found = {}
    for child, odd in zip(children[edge], odds, strict=True):
        for leaf, share in leaves(child, children, logp, weights).items():
            found[leaf] = share * odd / sum(odds)
    return found


def values(parent, leaf_adv, logp, weights="uniform"):
    """The advantage of each edge, None where no leaf below has one; leaf_adv: {leaf edge: advantage or None}."""
    children, found = family(parent), []
    for edge in range(len(parent)):
        shares = leaves(edge, children, logp, weights)
        judged = {leaf: share for leaf, share in shares.items() if leaf_adv[leaf] is not None}
        mean = sum(share * leaf_adv[leaf] for leaf, share in judged.items()) / sum(judged.values()) if judged else None
        found.append(mean)
    return found


def siblings(parent, state, value):
    """Q - V: each value less the mean of those that leave the same state; an only child has the baseline above it."""

    def baseline(edge):
        peers = [value[e] for e in range(len(parent)) if state[e] == state[edge] and value[e] is not None]
        if len(peers) > 1:
            return fmean(peers)
        return baseline(parent[edge]) if parent[edge] >= 0 else 0.0

    return [None if value[edge] is None else value[edge] - baseline(edge) for edge in range(len(parent))]


def depth(parent, tree, value):
    """BranchGRPO: z-scores over the nodes of one tree at one depth, 0 where they do not differ."""

    def level(edge):
        return 0 if parent[edge] < 0 else 1 + level(parent[edge])

    found = []
    for edge in range(len(parent)):
        peers = [e for e in range(len(parent)) if (tree[e], level(e)) == (tree[edge], level(edge))]
        known = [value[e] for e in peers if value[e] is not None]
        if value[edge] is None:
            found.append(None)
        else:
            spread = pstdev(known)
            found.append(0.0 if spread < 1e-6 else (value[edge] - fmean(known)) / spread)
    return found


def loss(adv, ratio, clip):
    """-sum over the edges of min(rho A, clip(rho, 1 - c, 1 + c) A)."""
    return -sum(min(rho * a, min(max(rho, 1 - clip), 1 + clip) * a) for a, rho in zip(adv, ratio, strict=True))


def window_odds(steps, size, r):
    """The law of the first step of a window."""
    return [(1 - r) * r**i / (1 - r ** (steps - size)) for i in range(steps - size)]
