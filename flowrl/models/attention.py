"""Cross-attention to text that is stored once a prompt, and whose keys and values are projected once.

Networks of this kind read their text in cross-attention layers alone, and their keys and values depend on the prompt
and on no time, so a group, the steps of a rollout and both halves of guidance share them. The stock network is called
as it is: it is handed the text of P prompts as a list of tokens, in B rows of equal length where it expects one row a
sample, which is all the same to layers that act on each token; our processors put the prompts together again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.types import Cond
from flowrl_kernels import shared_context_attention

VERSIONS = 3  # of the weights whose keys and values are kept: the current ones, the old ones and the reference
KV = dict["CrossAttention", tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Reading:
    """How the rows of one forward read the text."""

    row: Tensor  # [B] the prompt of a row
    shape: tuple[int, int]  # prompts, tokens of each
    mask: Tensor | None  # [prompts, tokens] bool
    kept: KV | None  # by layer, to be read or filled; None where gradients must reach the projections


class SharedContext:
    """The text of a network, shared by the rows of a batch; without `share` it is repeated, as stock pipelines do."""

    def __init__(self, network: Any, share: bool = True) -> None:
        self.share = share
        self.reading: Reading | None = None
        self._inputs: Mapping[str, Tensor] = {}  # whose keys and values are kept
        self._kept: OrderedDict[int, KV] = OrderedDict()  # by the version of the weights
        self._layers = 0
        if share:
            processors = dict(network.attn_processors)
            for name, stock in processors.items():
                if name.endswith("attn2.processor"):
                    processors[name] = FAMILIES[type(stock).__name__](self, stock)
                    self._layers += 1
            network.set_attn_processor(processors)

    @contextmanager
    def of(self, cond: Cond, rows: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(text, mask) to call the network with inside, for rows [B] of the inputs text [P, L, C] and mask [P, L]."""
        text, mask = cond.inputs["text"], cond.inputs.get("mask")
        if not self.share:
            yield text[rows], None if mask is None else mask[rows]
            return
        kept = None
        if torch.is_grad_enabled() or cond.version is None:  # what this batch reads, and no more
            used, rows = rows.unique(return_inverse=True)
            text, mask = text[used], None if mask is None else mask[used]
        else:
            kept = self._kept_of(cond.inputs, cond.version)
        known = kept is not None and len(kept) == self._layers
        self.reading = Reading(rows, (text.shape[0], text.shape[1]), None if mask is None else mask.bool(), kept)
        try:
            yield _spread(text[:1, :1] if known else text, len(rows)), None
        finally:
            self.reading = None

    def _kept_of(self, inputs: Mapping[str, Tensor], version: int) -> KV:
        if inputs is not self._inputs:
            self._inputs, self._kept = inputs, OrderedDict()
        kept = self._kept.setdefault(version, {})
        self._kept.move_to_end(version)
        if len(self._kept) > VERSIONS:
            self._kept.popitem(last=False)
        return kept

    def checkpoint(self, block: Callable, *args: Any) -> Any:
        """A block that is recomputed in backward, when it must read what it read in forward."""
        now = self.reading

        def contexts():
            return nullcontext(), self._again(now)

        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)

    @contextmanager
    def _again(self, reading: Reading | None) -> Iterator[None]:
        before, self.reading = self.reading, reading
        try:
            yield
        finally:
            self.reading = before


def _spread(text: Tensor, rows: int) -> Tensor:
    """The tokens of text [P, L, C] as [rows, n, C], with zeros at the end."""
    flat = text.flatten(0, 1)
    return nn.functional.pad(flat, (0, 0, 0, -len(flat) % rows)).unflatten(0, (rows, -1))


def _gathered(tokens: Tensor, shape: tuple[int, int]) -> Tensor:
    """[P, L, C], the inverse of `_spread`."""
    prompts, length = shape
    return tokens.flatten(0, 1)[: prompts * length].unflatten(0, shape)


class CrossAttention:
    """Of one layer, whose projections stay the modules they are; the stock processor where nothing is shared."""

    def __init__(self, shared: SharedContext, stock: Callable) -> None:
        self.shared, self.stock = shared, stock

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        now = self.shared.reading
        if now is None or encoder_hidden_states is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, *args, **kwargs)
        k, v = self.keys_and_values(attn, encoder_hidden_states, now)
        q = self.heads(attn, attn.to_q(hidden_states), attn.norm_q).to(v.dtype)
        out = shared_context_attention(q, k, v, now.row, ctx_mask=now.mask)
        return self.finish(attn, attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2))), hidden_states)

    def keys_and_values(self, attn: Any, tokens: Tensor, now: Reading) -> tuple[Tensor, Tensor]:
        """[P, heads, L, D] each, projected once a prompt, and once a rollout where no gradient is asked for."""
        if now.kept and self in now.kept:
            return now.kept[self]
        text = self.text(attn, _gathered(tokens, now.shape))
        v = self.heads(attn, attn.to_v(text), None)
        k = self.heads(attn, attn.to_k(text), attn.norm_k).to(v.dtype)
        if now.kept is not None:
            now.kept[self] = k, v
        return k, v

    def text(self, attn: Any, text: Tensor) -> Tensor:
        return text

    def heads(self, attn: Any, x: Tensor, norm: nn.Module | None) -> Tensor:
        """[., L, heads D] -> [., heads, L, D], normalised across heads."""
        return (x if norm is None else norm(x)).unflatten(2, (attn.heads, -1)).transpose(1, 2)

    def finish(self, attn: Any, out: Tensor, residual: Tensor) -> Tensor:
        return out


class SanaCrossAttention(CrossAttention):
    def finish(self, attn: Any, out: Tensor, residual: Tensor) -> Tensor:
        return out / attn.rescale_output_factor


class AttentionCrossAttention(CrossAttention):
    """diffusers' `Attention` as in SD1.5, SDXL and PixArt, which normalises each head."""

    def text(self, attn: Any, text: Tensor) -> Tensor:
        return attn.norm_encoder_hidden_states(text) if attn.norm_cross else text

    def heads(self, attn: Any, x: Tensor, norm: nn.Module | None) -> Tensor:
        x = x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
        return x if norm is None else norm(x)

    def finish(self, attn: Any, out: Tensor, residual: Tensor) -> Tensor:
        return (out + residual if attn.residual_connection else out) / attn.rescale_output_factor


FAMILIES: dict[str, type[CrossAttention]] = {
    "SanaAttnProcessor2_0": SanaCrossAttention,
    "AttnProcessor2_0": AttentionCrossAttention,
    "WanAttnProcessor": CrossAttention,
    "LTXVideoAttnProcessor": CrossAttention,
}  # by the stock processor
