"""xformers' partial attention over each region, merged. The library is an extra: probed, never required."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def unavailable() -> str:
    """Why xformers cannot be used here, "" where it can."""
    try:
        from xformers.ops import fmha  # type: ignore[import-not-found]
    except (ImportError, OSError, RuntimeError) as error:  # a wheel for another torch fails in any of these ways
        return f"xformers does not load ({error})"
    return "" if fmha.flash.FwOp.is_available() else "xformers brings no kernel that loads beside this torch"


def why_not(q: Tensor) -> str:
    """Why this back end declines, "" where it does not."""
    if not q.is_cuda:
        return f"xformers has no kernel for {q.device.type} tensors"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"xformers has no kernel for {q.dtype}"
    return unavailable()


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """As `naive`. All rows are one sequence in blocks: a context's rows against its keys, then each against its own."""
    from xformers.ops.fmha import merge_training as fmha  # type: ignore[import-not-found]
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask  # type: ignore[import-not-found]

    lq, order = q.shape[2], context.argsort(stable=True)
    rows = torch.bincount(context, minlength=len(k_ctx)).tolist()
    q, k_ctx, v_ctx = q.transpose(1, 2)[order], k_ctx.transpose(1, 2), v_ctx.transpose(1, 2)  # [., L, H, D]
    shown = torch.ones(k_ctx.shape[:2], dtype=torch.bool, device=q.device) if ctx_mask is None else ctx_mask.clone()
    shown &= torch.tensor(rows, device=q.device)[:, None] > 0  # a context that nobody reads is no block
    keys = [n for n, read in zip(shown.sum(1).tolist(), rows, strict=True) if read]
    blocks = BlockDiagonalMask.from_seqlens([n * lq for n in rows if n], keys)
    parts = [_partial(fmha, q, k_ctx[shown], v_ctx[shown], blocks, scale)]
    if k_own is not None and v_own is not None:
        k_own, v_own = k_own.transpose(1, 2)[order], v_own.transpose(1, 2)[order]
        blocks = BlockDiagonalMask.from_seqlens([lq] * len(q), [k_own.shape[1]] * len(q))
        parts.append(_partial(fmha, q, k_own.flatten(0, 1), v_own.flatten(0, 1), blocks, scale))
    return fmha.merge_attentions_autograd(*parts)[0].unflatten(0, q.shape[:2])[order.argsort()].transpose(1, 2)


def _partial(fmha, q: Tensor, k: Tensor, v: Tensor, blocks, scale: float):
    return fmha.memory_efficient_attention_partial_autograd(
        q.flatten(0, 1)[None], k[None], v[None], blocks, scale=scale
    )
