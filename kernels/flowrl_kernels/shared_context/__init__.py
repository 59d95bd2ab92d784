"""Attention of the samples of a group to the context they share, without repeating it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_kernels.backend import chosen, why_not_triton
from flowrl_kernels.shared_context import fold, naive, sdpa, xformers


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None = None,
    v_own: Tensor | None = None, ctx_mask: Tensor | None = None, scale: float | None = None, *,
    back_end: str | None = None,
) -> Tensor:  # fmt: skip
    """Attention of row b to the context it points at and to keys of its own, in one softmax.

        out[b] = softmax(scale q[b] [k_ctx[context[b]], k_own[b]]^T) [v_ctx[context[b]], v_own[b]]

    q [B, H, Lq, D]; k_ctx, v_ctx [P, H, Lc, D], stored once a context; context [B] int in [0, P), in any order and any
    number of rows a context; k_own, v_own [B, H, Lo, D]; ctx_mask [P, Lc] bool, False where a key is padding; scale
    D^-1/2 unless given. Returns [B, H, Lq, D] in q's dtype. A query that no key is shown to gets 0.

    `back_end` is naive (the definition), fold, triton, xformers, sdpa (the context repeated, as stock networks do) or
    auto: triton on a GPU where it takes the shape, else fold. Differentiable in q and in all keys and values. A back
    end that declines is replaced, which is told once. ValueError: shapes that do not belong together, an unknown name.
    """
    _check(q, k_ctx, v_ctx, context, k_own, v_own, ctx_mask)
    why_not = {"naive": "", "fold": "", "sdpa": "", "triton": _why_not_triton(q), "xformers": xformers.why_not(q)}
    name = chosen(back_end, why_not, ("triton", "fold") if q.is_cuda else ("fold",))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _module(name).shared_context_attention(q, k_ctx, v_ctx, context, k_own, v_own, ctx_mask, scale)


def _why_not_triton(q: Tensor) -> str:
    wide = f"triton's kernel takes head dimensions up to 128, not {q.shape[-1]}" if q.shape[-1] > 128 else ""
    return wide or why_not_triton(q)


def _module(name: str) -> Any:
    if name == "triton":  # which not every machine has
        from flowrl_kernels.shared_context import launch

        return launch
    return {"naive": naive, "fold": fold, "sdpa": sdpa, "xformers": xformers}[name]


def _check(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None,
) -> None:  # fmt: skip
    b, h, _, d = q.shape
    own = (b, h, *k_own.shape[2:3], d) if k_own is not None else None
    wanted = {
        "k_ctx": (k_ctx, (len(k_ctx), h, *k_ctx.shape[2:3], d)), "v_ctx": (v_ctx, tuple(k_ctx.shape)),
        "context": (context, (b,)), "k_own": (k_own, own), "v_own": (v_own, own),
        "ctx_mask": (ctx_mask, None if ctx_mask is None else (len(k_ctx), k_ctx.shape[2])),
    }  # fmt: skip
    for name, (value, shape) in wanted.items():
        if (None if value is None else tuple(value.shape)) != shape:
            found = "missing" if value is None else f"of shape {tuple(value.shape)}"
            raise ValueError(f"{name} is {found}: beside q {tuple(q.shape)} it must be {shape or 'absent'}")
        if value is not None and value.is_floating_point() and value.dtype != q.dtype and name != "context":
            raise ValueError(f"{name} is {value.dtype}: q is {q.dtype}, and they must be alike")
    if context.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context is {context.dtype}: it must be int32 or int64")
