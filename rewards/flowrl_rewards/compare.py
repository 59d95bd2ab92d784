"""A judge that compares the pictures of a group.

pairwise   v_i = mean over the pairs {i, j} of (p_ij + 1 - p_ji) / 2,   p_ij = sigmoid(l(A) - l(B)), A = i, B = j
listwise   v_i = s_i / high of a list of scores,   or   (n - place of i) / (n - 1) of a ranking, place 1 = the best

A picture is shown in a place that depends on the pictures alone, so that the order of a group's rows does not matter.

Shape letters: n pictures of the group, P pairs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards import questions as q
from flowrl_rewards._judge import Ask, Asker
from flowrl_rewards.vlm import LocalJudge
from flowrl_rewards.vlm_remote import RemoteJudge

A, B = ("A", " A"), ("B", " B")


@dataclass(frozen=True, kw_only=True)
class Comparison(ABC):
    """One question about a whole group, put to a `judge`: the options of a local one, or with `url` of a remote one.

    `question` may hold {count}, how many pictures there are; "" = the usual one.
    """

    columns: ClassVar[tuple[str, ...]] = ("score",)
    scope: ClassVar[str] = "group"
    judge: Asker | Mapping[str, Any] = field(default_factory=dict)
    question: str = ""
    source: bool = False  # show the picture that an edit started from first

    def __post_init__(self) -> None:
        q.placeholders(self.question)
        if isinstance(self.judge, Mapping):
            kind = RemoteJudge if "url" in self.judge else LocalJudge
            object.__setattr__(self, "judge", kind(**self.judge))
        object.__setattr__(self, "question", self.question or self._usual())

    @property
    def needs(self) -> frozenset[str]:
        keys = q.placeholders(self.question) - q.OF_PROMPT - {"count"}
        return keys | {"source"} if self.source else keys

    def missing(self) -> Sequence[str]:
        return self._asker.missing()

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        order = _order(media)
        pictures = media.pil()
        first = prompts[order[0]]
        before = (first.metadata["source"],) if self.source else ()
        text = q.filled(self.question, first, count=len(order))
        scores = torch.full((len(order),), math.nan)
        scores[order] = self._compared(before, [pictures[row] for row in order], text)
        return scores

    @property
    def _asker(self) -> Asker:
        assert isinstance(self.judge, Asker)
        return self.judge

    @abstractmethod
    def _usual(self) -> str: ...

    @abstractmethod
    def _compared(self, before: tuple[Image.Image, ...], pictures: Sequence[Image.Image], text: str) -> Tensor:
        """[n] the values of the pictures, the source shown before."""


@dataclass(frozen=True, kw_only=True)
class Pairwise(Comparison):
    """The share of comparisons that a picture wins, in [0, 1]; each pair is asked in both orders.

    `pairs` = at most how many pairs a group, null = all n (n - 1) / 2; with less than n / 2, some pictures have no
    verdict. A pair without an answer counts for neither.
    """

    pairs: int | None = None

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise ValueError(f"pairs = {self.pairs} asks nothing; give a positive number, or null for all of them")
        super().__post_init__()

    def _usual(self) -> str:
        if self.source:
            return (
                "The first image is the source, image A is the second and image B the third. Which of A and B follows "
                'the instruction "{instruction}" better and keeps all else of the source? Answer A or B.'
            )
        return (
            "Image A is the first and image B the second. "
            'Which of them matches the caption "{prompt}" better? Answer A or B.'
        )

    def _compared(self, before: tuple[Image.Image, ...], pictures: Sequence[Image.Image], text: str) -> Tensor:
        n = len(pictures)
        wins = torch.full((n, n), math.nan)
        pairs = round_robin(n)[: self.pairs]
        if pairs:
            shown = [*pairs, *((j, i) for i, j in pairs)]
            asks = [Ask((*before, pictures[i], pictures[j]), text) for i, j in shown]
            first = q.yes_no(self._asker.weigh(asks, (A, B)))
            q.tell_unread(first)
            won = (first[: len(pairs)] + 1 - first[len(pairs) :]) / 2  # [P]
            i, j = torch.tensor(pairs).T
            wins[i, j], wins[j, i] = won, 1 - won
        return wins.nanmean(1)


@dataclass(frozen=True, kw_only=True)
class Listwise(Comparison):
    """All pictures in one question: a JSON list of scores in low .. high, or of places; in [0, 1].

    An answer that is anything else costs the whole group its verdict.
    """

    method: Literal["scores", "ranking"] = "scores"
    low: int = 0
    high: int = 5

    def __post_init__(self) -> None:
        q.check_scale(self.low, self.high)
        if self.method not in ("scores", "ranking"):
            raise ValueError(f"method = {self.method!r} is unknown; give 'scores' or 'ranking'")
        super().__post_init__()

    def _usual(self) -> str:
        task = 'match the caption "{prompt}"'
        begin = "Here are {count} images, numbered 1 to {count} in their order."
        if self.source:
            task = 'follow the instruction "{instruction}" and keep all else of the source'
            begin = "The first image is the source. After it come {count} images, numbered 1 to {count} in their order."
        if self.method == "ranking":
            wanted = "their {count} numbers, the best image first"
        else:
            wanted = f"{{count}} scores from {self.low} to {self.high}, in the order of the images"
        return f'{begin} How well do they {task}? Answer with {{{{"list": [...]}}}}, {wanted}.'

    def _compared(self, before: tuple[Image.Image, ...], pictures: Sequence[Image.Image], text: str) -> Tensor:
        n = len(pictures)
        item = {"type": "integer"} if self.method == "ranking" else {"type": "number"}
        schema = q.answer_schema("list", {"type": "array", "items": item, "minItems": n, "maxItems": n})
        texts = self._asker.write([Ask((*before, *pictures), text)], schema)
        numbers = q.one_list(texts[0] or "")
        ranked = self.method == "ranking"
        values = q.places(numbers, n) if ranked else q.scores(numbers, n, self.low, self.high)
        q.tell_unread(values[:1], texts)
        return values


def round_robin(n: int) -> list[tuple[int, int]]:
    """All pairs of n, neighbours on a circle first.

    The first n / 2, rounded up, hold every member; whole turns of n pairs hold each member twice.
    """
    begin = [*range(0, n, 2), *range(1, n, 2)]
    return [(i, (i + apart) % n) for apart in range(1, n // 2 + 1) for i in begin if 2 * apart < n or i < apart]


def _order(media: Media) -> list[int]:
    """The rows, sorted by a digest of their pictures."""
    return sorted(range(len(media.images)), key=lambda row: sha256(media.images[row].numpy().tobytes()).digest())
