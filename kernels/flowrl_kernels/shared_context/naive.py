"""The definition: attention of each row to the context it points at and to keys of its own, in plain torch.

B rows, H heads, Lq queries and Lo own keys a row, P contexts of Lc keys, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """softmax(scale q [k_ctx[context], k_own]^T) [v_ctx[context], v_own] [B, H, Lq, D], in float32 at least.

    q [B, H, Lq, D]; k_ctx, v_ctx [P, H, Lc, D]; context [B] int; k_own, v_own [B, H, Lo, D]; ctx_mask [P, Lc] bool,
    False where a key is padding. A query that no key is shown to gets 0.
    """
    k, v = k_ctx[context], v_ctx[context]
    shown = k_ctx.new_ones(k_ctx.shape[0], k_ctx.shape[2], dtype=torch.bool) if ctx_mask is None else ctx_mask
    shown = shown[context]
    if k_own is not None and v_own is not None:
        k, v = torch.cat([k, k_own], 2), torch.cat([v, v_own], 2)
        shown = torch.cat([shown, shown.new_ones(k_own.shape[0], k_own.shape[2])], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    score = scale * q.to(wide) @ k.to(wide).mT
    some = shown.any(1)[:, None, None, None]
    score = score.masked_fill(some & ~shown[:, None, None], -torch.inf)  # all -inf would be NaN
    return (some * score.softmax(-1) @ v.to(wide)).to(q.dtype)
