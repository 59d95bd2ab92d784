"""The Triton back end: its tiles, and the launches of forward and backward."""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowrl_kernels.shared_context.kernel import forward_kernel, key_kernel, query_kernel


def tiles_of(dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Tiles that spill no register and fit shared memory from sm_80 on, for head dimensions up to 128."""
    wide = max(16, triton.next_power_of_2(dim))
    if dtype == torch.float32:  # its products are exact, so without tensor cores: small tiles, few registers
        side = 32 if wide <= 32 else 16
        return {"D": dim, "BLOCK_D": wide, "BLOCK_Q": side, "BLOCK_K": side, "num_warps": 8, "num_stages": 2}
    warps = 4 if wide <= 32 else 8
    return {"D": dim, "BLOCK_D": wide, "BLOCK_Q": 64, "BLOCK_K": 32, "num_warps": warps, "num_stages": 2}


def shared_context_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, context: Tensor, k_own: Tensor | None, v_own: Tensor | None,
    ctx_mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """As `naive`."""
    if k_own is None or v_own is None:
        k_own = v_own = q[:, :, :0]
    q, k_ctx, v_ctx, k_own, v_own = (_dense(x) for x in (q, k_ctx, v_ctx, k_own, v_own))
    return _Attention.apply(q, k_ctx, v_ctx, context, k_own, v_own, ctx_mask, scale)


def _dense(x: Tensor) -> Tensor:
    """With a last axis of stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, context, k_own, v_own, mask, scale):
        b, h, lq, dim = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty(b, h, lq, dtype=torch.float32)
        mask = None if mask is None else mask.contiguous().to(torch.int8)
        tiles = tiles_of(q.dtype, dim)
        forward_kernel[(triton.cdiv(lq, tiles["BLOCK_Q"]), h, b)](
            q, k_ctx, v_ctx, k_own, v_own, context if mask is None else mask, context, out, lse, lq, k_ctx.shape[2],
            k_own.shape[2], scale, *_strides(q, k_ctx, v_ctx, k_own, v_own), _row(mask), *_strides(out), h,
            HAS_MASK=mask is not None, **tiles,
        )  # fmt: skip
        ctx.save_for_backward(q, k_ctx, v_ctx, context, k_own, v_own, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k_ctx, v_ctx, context, k_own, v_own, mask, out, lse = ctx.saved_tensors
        b, h, lq, dim = q.shape
        do = _dense(do)
        delta = (do.float() * out.float()).sum(-1).contiguous()  # [B, H, Lq]
        tiles = tiles_of(q.dtype, dim)
        some = {"H": h, "HAS_MASK": mask is not None, **tiles}
        dq = torch.empty_like(q)
        query_kernel[(triton.cdiv(lq, tiles["BLOCK_Q"]), h, b)](
            q, k_ctx, v_ctx, k_own, v_own, context if mask is None else mask, context, do, lse, delta, dq, lq,
            k_ctx.shape[2], k_own.shape[2], ctx.scale, *_strides(q, k_ctx, v_ctx, k_own, v_own), _row(mask),
            *_strides(do, dq), **some,
        )  # fmt: skip

        def segments(k, v, mask, members, first):
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            if not dk.numel():
                return dk, dv
            key_kernel[(triton.cdiv(k.shape[2], tiles["BLOCK_K"]), h, len(k))](
                q, k, v, members if mask is None else mask, members, first, do, lse, delta, dk, dv, lq, k.shape[2],
                ctx.scale, *_strides(q, k, v), _row(mask), *_strides(do, dk), **{**some, "HAS_MASK": mask is not None},
            )  # fmt: skip
            return dk, dv

        counts = torch.bincount(context, minlength=len(k_ctx))
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        dk, dv = segments(k_ctx, v_ctx, mask, context.argsort(stable=True), first)
        alone = torch.arange(b + 1, device=q.device)
        dk_own, dv_own = segments(k_own, v_own, None, alone, alone)
        return dq, dk, dv, None, dk_own, dv_own, None, None


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows, heads and positions."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _row(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.stride(0)
