"""The rows that read one context become one long query of it: no key is repeated or gathered, and padding is left out.

Queries do not see each other, so n rows [n, H, Lq, D] against one context are [H, n Lq, D] against it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """As `naive`; torch's fused attention a context or, where rows have keys of their own, one softmax over both."""
    counts = torch.bincount(context, minlength=k_ctx.shape[0]).tolist()
    order = context.argsort(stable=True)
    ordered = torch.equal(order, torch.arange(len(order), device=order.device))
    rows = [None if x is None else x.transpose(1, 2) for x in (q, k_own, v_own)]  # [B, L, H, D]
    parts = [[None] * len(counts) if x is None else (x if ordered else x[order]).split(counts) for x in rows]
    masks = [None] * len(counts) if ctx_mask is None else ctx_mask.unbind()
    out = []
    for mine, own_k, own_v, k, v, mask in zip(*parts, k_ctx.unbind(), v_ctx.unbind(), masks, strict=True):
        if mask is not None and not mask.all():
            k, v = k[:, mask], v[:, mask]
        if own_k is None and k.shape[1]:
            seen = scaled_dot_product_attention(_folded(mine)[None], k[None], v[None], scale=scale)[0]
            out.append(seen.transpose(0, 1).unflatten(0, mine.shape[:2]))
        else:
            none = mine[:, :0]
            out.append(_joint(mine, none if own_k is None else own_k, none if own_v is None else own_v, k, v, scale))
    joined = torch.cat(out)
    return (joined if ordered else joined[order.argsort()]).transpose(1, 2)


def _folded(x: Tensor) -> Tensor:
    """[n, L, H, ...] -> [H, n L, ...]."""
    return x.flatten(0, 1).transpose(0, 1)


def _joint(q: Tensor, k_own: Tensor, v_own: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[n, Lq, H, D] of rows that see the keys k, v [H, Lc, D] of one context, then their own [n, Lo, H, D]."""
    wide, dtype, seen = torch.promote_types(q.dtype, torch.float32), q.dtype, k.shape[1]
    q, k_own, v_own, k, v = (x.to(wide) for x in (q, k_own, v_own, k, v))
    shared = (_folded(q) @ k.mT).transpose(0, 1).unflatten(0, q.shape[:2])  # [n, Lq, H, Lc]
    alone = torch.einsum("nqhd,nkhd->nqhk", q, k_own)
    weight = (scale * torch.cat([shared, alone], -1)).softmax(-1)
    out = (_folded(weight[..., :seen]) @ v).transpose(0, 1).unflatten(0, q.shape[:2])
    return (out + torch.einsum("nqhk,nkhd->nqhd", weight[..., seen:], v_own)).to(dtype)
