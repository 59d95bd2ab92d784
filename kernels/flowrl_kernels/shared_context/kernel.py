"""Triton: one launch and one softmax over the shared region, then the row's own.

A key region is read through a pointer to its first key, so the shared one costs an index and no copy. Backward
recomputes the scores from the saved log-sum-exp. A segment of keys is read by members: a context by the rows that point
at it, own keys by their row alone. One program sums dK and dV of a block of a segment over its members in the order of
the rows, so there is no atomic and the result is the same every time.

Shapes as in `naive`; strides are those of rows or contexts, heads and positions, the last axis being dense.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from triton import knobs

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _dot(a, b):
    """a b, accumulated in float32."""
    if INTERPRETED:  # its dot multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tile(base, position, length, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] of the rows at `position`, 0 outside."""
    d = tl.arange(0, BLOCK_D)
    inside = (position < length)[:, None] & (d < D)[None, :]
    return tl.load(base + position[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _put(base, value, position, length, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (position < length)[:, None] & (d < D)[None, :]
    tl.store(base + position[:, None] * stride + d[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _shown(position, length, MASK, HAS_MASK: tl.constexpr):
    """[BLOCK_K] which keys may be seen."""
    shown = position < length
    if HAS_MASK:
        shown = shown & (tl.load(MASK + position, mask=shown, other=0) != 0)
    return shown


@triton.jit
def _attend(
    acc, top, total, q, K, V, MASK, length, sk, sv, scale,
    HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One region into the running softmax: acc = sum of p v, total = sum of p, both relative to 2^top."""
    for start in range(0, length, BLOCK_K):
        position = start + tl.arange(0, BLOCK_K)
        score = _dot(q, tl.trans(_tile(K, position, length, sk, D, BLOCK_D))) * (scale * LOG2E)
        score = tl.where(_shown(position, length, MASK, HAS_MASK)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        p, kept = tl.exp2(score - level[:, None]), tl.exp2(top - level)
        v = _tile(V, position, length, sv, D, BLOCK_D)
        acc = acc * kept[:, None] + _dot(p.to(v.dtype), v)
        total, top = total * kept + tl.sum(p, 1), higher
    return acc, top, total


@triton.jit
def forward_kernel(
    Q, K, V, K_OWN, V_OWN, MASK, CONTEXT, OUT, LSE, Lq, Lc, Lo, scale,
    sqb, sqh, sql, skb, skh, skl, svb, svh, svl, sob, soh, sol, spb, sph, spl, smb, sxb, sxh, sxl,
    H, HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of queries of one row and head; sk, sv are of the contexts, so, sp of own keys and values, sx of OUT."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c = tl.load(CONTEXT + b).to(tl.int64)
    q = _tile(Q + b * sqb + h * sqh, position, Lq, sql, D, BLOCK_D)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, K + c * skb + h * skh, V + c * svb + h * svh, MASK + c * smb, Lc, skl, svl, scale,
        HAS_MASK, D, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, K_OWN + b * sob + h * soh, V_OWN + b * spb + h * sph, MASK, Lo, sol, spl, scale,
        False, D, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    _put(OUT + b * sxb + h * sxh, acc / tl.where(total == 0, 1.0, total)[:, None], position, Lq, sxl, D, BLOCK_D)
    lse = tl.where(total == 0, float("inf"), top + tl.log2(total))  # so that no key is shown in backward either
    tl.store(LSE + (b * H + h) * Lq + position, lse, mask=position < Lq)


@triton.jit
def _pull(
    dq, q, do, lse, delta, K, V, MASK, length, sk, sv, scale,
    HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What one region adds to dQ / scale."""
    for start in range(0, length, BLOCK_K):
        position = start + tl.arange(0, BLOCK_K)
        k, v = _tile(K, position, length, sk, D, BLOCK_D), _tile(V, position, length, sv, D, BLOCK_D)
        p = tl.exp2(_dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])
        p = tl.where(_shown(position, length, MASK, HAS_MASK)[None, :], p, 0.0)
        ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
        dq += _dot(ds.to(k.dtype), k)
    return dq


@triton.jit
def query_kernel(
    Q, K, V, K_OWN, V_OWN, MASK, CONTEXT, DO, LSE, DELTA, DQ, Lq, Lc, Lo, scale,
    sqb, sqh, sql, skb, skh, skl, svb, svh, svl, sob, soh, sol, spb, sph, spl, smb, sdb, sdh, sdl, sxb, sxh, sxl,
    H, HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries; sd are the strides of DO, sx those of DQ."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c = tl.load(CONTEXT + b).to(tl.int64)
    q = _tile(Q + b * sqb + h * sqh, position, Lq, sql, D, BLOCK_D)
    do = _tile(DO + b * sdb + h * sdh, position, Lq, sdl, D, BLOCK_D)
    lse = tl.load(LSE + (b * H + h) * Lq + position, mask=position < Lq, other=float("inf"))
    delta = tl.load(DELTA + (b * H + h) * Lq + position, mask=position < Lq, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    dq = _pull(
        dq, q, do, lse, delta, K + c * skb + h * skh, V + c * svb + h * svh, MASK + c * smb, Lc, skl, svl, scale,
        HAS_MASK, D, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    dq = _pull(
        dq, q, do, lse, delta, K_OWN + b * sob + h * soh, V_OWN + b * spb + h * sph, MASK, Lo, sol, spl, scale,
        False, D, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    _put(DQ + b * sxb + h * sxh, dq * scale, position, Lq, sxl, D, BLOCK_D)


@triton.jit
def key_kernel(
    Q, K, V, MASK, MEMBERS, FIRST, DO, LSE, DELTA, DK, DV, Lq, Lk, scale,
    sqb, sqh, sql, skb, skh, skl, svb, svh, svl, smb, sdb, sdh, sdl, sxb, sxh, sxl,
    H, HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dK and dV, of strides sx, of a block of keys of segment s, read by rows MEMBERS[FIRST[s] .. FIRST[s + 1]]."""
    h, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    k = _tile(K + s * skb + h * skh, position, Lk, skl, D, BLOCK_D)
    v = _tile(V + s * svb + h * svh, position, Lk, svl, D, BLOCK_D)
    shown = _shown(position, Lk, MASK + s * smb, HAS_MASK)
    dk, dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for i in range(tl.load(FIRST + s), tl.load(FIRST + s + 1)):
        b = tl.load(MEMBERS + i).to(tl.int64)
        for start in range(0, Lq, BLOCK_Q):
            place = start + tl.arange(0, BLOCK_Q)
            q = _tile(Q + b * sqb + h * sqh, place, Lq, sql, D, BLOCK_D)
            do = _tile(DO + b * sdb + h * sdh, place, Lq, sdl, D, BLOCK_D)
            lse = tl.load(LSE + (b * H + h) * Lq + place, mask=place < Lq, other=float("inf"))
            delta = tl.load(DELTA + (b * H + h) * Lq + place, mask=place < Lq, other=0.0)
            p = tl.exp2(_dot(k, tl.trans(q)) * (scale * LOG2E) - lse[None, :])  # [BLOCK_K, BLOCK_Q]
            p = tl.where(shown[:, None], p, 0.0)
            ds = p * (_dot(v, tl.trans(do)) - delta[None, :])
            dk += _dot(ds.to(q.dtype), q)
            dv += _dot(p.to(do.dtype), do)
    _put(DK + s * sxb + h * sxh, dk * scale, position, Lk, sxl, D, BLOCK_D)
    _put(DV + s * sxb + h * sxh, dv, position, Lk, sxl, D, BLOCK_D)
