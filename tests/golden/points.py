"""Points of the fixtures: six rows, whose velocities are given by slot."""

import torch

from flowrl import flow
from flowrl.types import Cond, Point


def noised(d, velocities, adv, t, **items):
    """Rows x_t of a fixture's x0 and eps; velocities maps "current", "old", "ref" to [6, *L]."""
    n = len(t)
    rows = torch.arange(n)
    items = {"x0": d["x0"], "eps": d["eps"], "sample": rows, "block": torch.zeros_like(rows), **items}
    x = flow.interpolate(items["x0"], items["eps"], t)
    return Point(x, t, Cond({}, rows), rows, adv, torch.ones(n).double(), items, read=velocities.__getitem__)


def edges(d, v):
    """The stored steps of a fixture under the current velocity v."""
    rows = torch.arange(6)
    adv = d["A"].clamp(-float(d["adv_clip"]), float(d["adv_clip"]))
    sigma, sigma_next = (d[k] if d[k].ndim else d[k].expand(6) for k in ("sigma", "sigma_next"))
    velocities = {"current": v, "old": d["v_old"], "ref": d.get("v_ref")}
    step = {"t_next": sigma_next, "eta": d["eta"].expand(6), "spread": torch.ones(6).double()}
    items = {"x_next": d["x_next"], "logp": d["logp_old"], "block": torch.zeros_like(rows)}
    return Point(d["x"], sigma, Cond({}, rows), rows, adv, torch.ones(6).double(), items, step, "flow_sde",
                 float(d["sigma_second"]), read=velocities.__getitem__)  # fmt: skip
