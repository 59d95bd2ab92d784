"""The calls that the xformers back end makes, by a stand-in that records them and answers by plain attention."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flowrl_kernels import shared_context_attention
from flowrl_kernels.shared_context import xformers
from tests.kernels.test_shared_context import TOLERANCE, assert_agree, case, value_and_gradients


class Blocks:
    """A block-diagonal bias: queries [1, sum Lq] see the keys of their block."""

    def __init__(self, queries, keys):
        self.queries, self.keys = queries, keys

    @classmethod
    def from_seqlens(cls, queries, keys):
        return cls(queries, keys)

    def dense(self):
        blocks = [torch.ones(q, k, dtype=torch.bool) for q, k in zip(self.queries, self.keys, strict=True)]
        return torch.block_diag(*blocks).bool()


def partial(seen, q, k, v, attn_bias, scale):
    """(attention, log-sum-exp) of [1, L, H, D]."""
    seen.append((tuple(q.shape), tuple(k.shape), attn_bias.queries, attn_bias.keys))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    score = score.masked_fill(~attn_bias.dense(), -1e30)
    return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v), score.logsumexp(-1)


def merged(*parts):
    weight = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]
    return (weight * torch.stack([out for out, _ in parts])).sum(0)


@pytest.fixture
def calls(monkeypatch):
    """What the stand-in was asked: (q shape, k shape, queries a block, keys a block)."""
    seen = []
    names = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.merge_training",
             "xformers.ops.fmha.attn_bias")  # fmt: skip
    stand_ins = {name: ModuleType(name) for name in names}
    merging = stand_ins["xformers.ops.fmha.merge_training"]
    merging.memory_efficient_attention_partial_autograd = lambda *args, **how: partial(seen, *args, **how)
    merging.merge_attentions_autograd = merged
    stand_ins["xformers.ops.fmha"].merge_training = merging
    stand_ins["xformers.ops.fmha"].flash = SimpleNamespace(FwOp=SimpleNamespace(is_available=lambda: True))
    stand_ins["xformers.ops"].fmha = stand_ins["xformers.ops.fmha"]
    stand_ins["xformers.ops.fmha.attn_bias"].BlockDiagonalMask = Blocks
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    xformers.unavailable.cache_clear()
    monkeypatch.setattr(xformers, "why_not", lambda q: xformers.unavailable())
    yield seen
    xformers.unavailable.cache_clear()


@pytest.mark.parametrize(("own", "masked"), [(0, False), (0, True), (3, False), (3, True)])
def test_two_partial_attentions_merge_to_the_definition(calls, own, masked):
    args = case(7, 2, 5, 32, 4, 9, own, masked, torch.float32)
    if masked:
        args["ctx_mask"][:, 0] = True  # a block without keys is left to own keys elsewhere
    want = value_and_gradients(args, back_end="naive")
    assert_agree(value_and_gradients(args, back_end="xformers"), want, TOLERANCE[torch.float32])


def test_the_context_is_one_block_for_all_its_rows(calls):
    args = case(5, 2, 3, 32, 4, 7, 2, False, torch.float32) | {"context": torch.tensor([3, 0, 3, 3, 0])}
    shared_context_attention(**args, back_end="xformers")
    shared, own = calls
    assert shared == ((1, 15, 2, 32), (1, 14, 2, 32), [6, 9], [7, 7])
    assert own == ((1, 15, 2, 32), (1, 10, 2, 32), [3] * 5, [2] * 5)


def test_a_library_that_does_not_load_is_told_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    xformers.unavailable.cache_clear()
    assert xformers.unavailable().startswith("xformers does not load (")
    xformers.unavailable.cache_clear()
    assert xformers.why_not(torch.zeros(1)) == "xformers has no kernel for cpu tensors"
