"""What stock networks do: the context is repeated for each row, then torch's attention. Here to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """As `naive`."""
    k, v, shown = k_ctx[context], v_ctx[context], None if ctx_mask is None else ctx_mask[context]
    if k_own is not None and v_own is not None:
        k, v = torch.cat([k, k_own], 2), torch.cat([v, v_own], 2)
        if shown is not None:
            shown = torch.cat([shown, shown.new_ones(k_own.shape[0], k_own.shape[2])], 1)
    mask = None if shown is None else shown[:, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
