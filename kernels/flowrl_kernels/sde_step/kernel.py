"""Triton: x, v and the noise (or the next state) are read once; each program leaves the sum of its own elements."""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024


@triton.jit
def _mean(X, V, DT, PULL, REST, r, place, inside):
    """[BLOCK] the mean of row r at these elements, in float32."""
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(V + place, mask=inside, other=0.0).to(tl.float32)
    return x + tl.load(DT + r) * v + tl.load(PULL + r) * (x + tl.load(REST + r) * v)


@triton.jit
def step_kernel(X, V, GIVEN, OUT, PART, DT, PULL, REST, STD, ROW, n, DRAW: tl.constexpr, BLOCK: tl.constexpr):
    """A block of an edge: GIVEN is its noise where DRAW, else its next state."""
    e, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    r = tl.load(ROW + e).to(tl.int64)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    mean = _mean(X, V, DT, PULL, REST, r, r * n + i, inside)
    given = tl.load(GIVEN + e * n + i, mask=inside, other=0.0).to(tl.float32)
    if DRAW:
        rounded = (mean + tl.load(STD + r) * given).to(OUT.dtype.element_ty)
        tl.store(OUT + e * n + i, rounded, mask=inside)
        given = rounded.to(tl.float32)
    gap = tl.where(inside, given - mean, 0.0)
    tl.store(PART + e * tl.num_programs(0) + chunk, tl.sum(gap * gap, 0))


@triton.jit
def pull_kernel(X, V, NEXT, G, ACC, DT, PULL, REST, MEMBERS, FIRST, n, BLOCK: tl.constexpr):
    """A block of a row: the sum over its edges MEMBERS[FIRST[r] .. FIRST[r + 1]] of g (mean - next)."""
    r = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    mean = _mean(X, V, DT, PULL, REST, r, r * n + i, inside)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in range(tl.load(FIRST + r), tl.load(FIRST + r + 1)):
        e = tl.load(MEMBERS + k).to(tl.int64)
        acc += tl.load(G + e) * (mean - tl.load(NEXT + e * n + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(ACC + r * n + i, acc, mask=inside)


def sde_step(
    x: Tensor, v: Tensor, dt: Tensor, pull: Tensor, rest: Tensor, std: Tensor, row: Tensor, noise: Tensor | None,
    x_next: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `naive`."""
    x, v, dt, pull, rest, std = (value.contiguous() for value in (x, v, dt, pull, rest, std))
    given = noise if x_next is None else x_next
    assert given is not None, "a step is either drawn or given"
    drawn, square = _Step.apply(x, v, dt, pull, rest, std, row, given.contiguous(), x_next is None, dtype)
    return drawn if x_next is None else x_next, square


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v, dt, pull, rest, std, row, given, draw, dtype):
        n, edges = x[0].numel(), len(row)
        chunks = triton.cdiv(n, BLOCK)
        out = torch.empty_like(given, dtype=dtype) if draw else given
        part = x.new_empty(edges, chunks, dtype=torch.float32)
        # without fused multiply-adds a step that is drawn has the same mean as when it is replayed
        step_kernel[(chunks, edges)](
            x, v, given, out, part, dt, pull, rest, std, row, n, DRAW=draw, BLOCK=BLOCK, enable_fp_fusion=False
        )
        ctx.save_for_backward(x, v, dt, pull, rest, row, out)
        ctx.mark_non_differentiable(out)
        return out, part.sum(1) / n

    @staticmethod
    @once_differentiable
    def backward(ctx, _, g):
        x, v, dt, pull, rest, row, x_next = ctx.saved_tensors
        n, counts = x[0].numel(), torch.bincount(row, minlength=len(x))
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        acc = torch.empty_like(x, dtype=torch.float32)
        pull_kernel[(triton.cdiv(n, BLOCK), len(x))](
            x, v, x_next, g.contiguous(), acc, dt, pull, rest, row.argsort(stable=True), first, n, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
        of_x, of_v = ((2 / n * value).view(-1, *[1] * (x.ndim - 1)) for value in (1 + pull, dt + pull * rest))
        return (acc * of_x).to(x.dtype), (acc * of_v).to(v.dtype), *[None] * 8
