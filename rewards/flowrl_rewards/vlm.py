"""A judge on this machine: any vision-language model of transformers that continues a text about pictures.

One forward per ask gives the distribution of the first token of the answer; `write` goes on greedily.

Shape letters: n asks, V tokens of the vocabulary, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl_rewards._judge import Ask, Asker, Questionnaire
from flowrl_rewards._pretrained import pretrained
from flowrl_rewards._weights import absent_file, absent_packages, device_of, resolved


@dataclass(frozen=True, kw_only=True)
class LocalJudge(Asker):
    """A model by hub id, local path or the name of an embedded one.

    `layout` is the text for a processor without a chat template: {images} = its image token once a picture.
    ValueError: an option that cannot be, or a model that has no single token for an answer.
    """

    model: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    layout: str = "{images}\n{question}\n"
    size: int | None = 504  # pixels a side, bilinear; null = the processor's own rule
    rows: int = 8  # asks a forward
    max_tokens: int = 512  # of a written answer
    dtype: str = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        if "{images}" not in self.layout or "{question}" not in self.layout:
            raise ValueError(f"layout = {self.layout!r} lacks {{images}} or {{question}}; give a text with both")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype = {self.dtype!r} is unknown; give 'float32', 'bfloat16' or 'float16'")
        for option in ("size", "rows", "max_tokens"):
            value = vars(self)[option]
            if value is not None and value < 1:
                raise ValueError(f"{option} = {value} is no count; give a positive integer")

    def missing(self) -> Sequence[str]:
        return [*absent_packages("torchvision", extra="rewards"), *absent_file("model", self.model)]

    def weigh(self, asks: Sequence[Ask], answers: Sequence[Sequence[str]]) -> Tensor:
        ids = [self._ids(spellings) for spellings in answers]
        parts = []
        for _, answered in self._answers(asks, 1):
            logp = answered.logits[0].float().log_softmax(1)  # [n, V]
            parts.append(torch.stack([logp[:, spelt].logsumexp(1) for spelt in ids], 1).cpu())
        return torch.cat(parts)

    def write(self, asks: Sequence[Ask], schema: Mapping[str, Any]) -> list[str | None]:
        texts: list[str | None] = []
        ends = torch.tensor(self._network.generation_config.eos_token_id).flatten().tolist()
        for length, answered in self._answers(asks, self.max_tokens):
            for tokens in answered.sequences[:, length:].tolist():
                whole = not set(ends).isdisjoint(tokens)
                texts.append(self._processor.tokenizer.decode(tokens, skip_special_tokens=True) if whole else None)
        return texts

    def _answers(self, asks: Sequence[Ask], tokens: int) -> Iterator[tuple[int, Any]]:
        """(length of the questions, what generate returns) of each forward; `logits` are raw, before any processor."""
        for start in range(0, len(asks), self.rows):
            inputs = self._inputs(asks[start : start + self.rows])
            answered = self._network.generate(
                **inputs, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            yield inputs["input_ids"].shape[1], answered

    def _inputs(self, asks: Sequence[Ask]) -> Any:
        """Token ids [n, L] and pixels; rows are padded on the left, so that all answers begin at L."""
        processor = self._processor
        pictures = [ask.shown(self.size) for ask in asks]
        texts = [self._text(ask) for ask in asks]
        begun = texts[0].startswith(processor.tokenizer.bos_token or "\0")  # by the chat template
        inputs = processor(
            text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt",
            add_special_tokens=not begun,
        )  # fmt: skip
        return inputs.to(self._network.device, self._network.dtype)

    def _text(self, ask: Ask) -> str:
        processor = self._processor
        if processor.chat_template is None:
            return self.layout.format(images=processor.image_token * len(ask.pictures), question=ask.text)
        content = [*({"type": "image"} for _ in ask.pictures), {"type": "text", "text": ask.text}]
        return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    def _ids(self, spellings: Sequence[str]) -> list[int]:
        """The tokens that are a whole spelling."""
        tokenizer = self._processor.tokenizer
        encoded = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
        ids = {tokens[0] for tokens in encoded if len(tokens) == 1} - {tokenizer.unk_token_id}
        if not ids:
            raise ValueError(f"model = {self.model} has no single token for {spellings[0]!r}; give method = 'text'")
        return sorted(ids)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(resolved(self.model))

    @cached_property
    def _network(self) -> Any:
        from transformers import AutoModelForImageTextToText

        dtype = getattr(torch, self.dtype)
        network = pretrained(AutoModelForImageTextToText, resolved(self.model), "model", dtype)
        return network.to(device_of(self.device))


@dataclass(frozen=True, kw_only=True)
class VLM(LocalJudge, Questionnaire):
    """A local judge's answers to questions about each picture: v in [0, 1], see `_judge`."""

    def __post_init__(self) -> None:
        LocalJudge.__post_init__(self)
        Questionnaire.__post_init__(self)
