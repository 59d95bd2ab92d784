"""What a judge is, wherever it runs, and the reward that its answers to some questions are.

yes_no   v = p(yes),  1 - p(yes) where "no" is the good answer
digits, text   v = s / high, or squashed s
reward   sum_q w_q v_q / sum_q w_q   over the questions q

Shape letters: N samples, n asks, A answers, Q questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards import questions as q

ABOUT = (
    'this image match the caption "{prompt}"?',
    'the second image follow the instruction "{instruction}" and keep all else of the first?',
)  # without, with the source picture


@dataclass(frozen=True)
class Ask:
    """One question about some pictures, in the order in which the judge sees them."""

    pictures: tuple[Image.Image, ...]
    text: str

    def shown(self, size: int | None) -> list[Image.Image]:
        """The pictures in RGB, bilinearly resized to size x size where there is one."""
        pictures = [picture.convert("RGB") for picture in self.pictures]
        return pictures if size is None else [p.resize((size, size), Image.Resampling.BILINEAR) for p in pictures]


class Asker(ABC):
    """A model that answers."""

    @abstractmethod
    def weigh(self, asks: Sequence[Ask], answers: Sequence[Sequence[str]]) -> Tensor:
        """[n, A] log-probability that an answer begins with a spelling of each of `answers`; -inf = not seen."""

    @abstractmethod
    def write(self, asks: Sequence[Ask], schema: Mapping[str, Any]) -> list[str | None]:
        """The n written answers, None for one that was cut; `schema` is for a model that can be held to it."""

    @abstractmethod
    def missing(self) -> Sequence[str]:
        """A sentence for each package, file or variable that is absent."""


@dataclass(frozen=True, kw_only=True)
class Questionnaire(Asker):
    """A judge that is asked about each picture: (source,) result. Unreadable = NaN.

    A question is its text, or {text, weight, positive}; none = the usual one of the method.
    ValueError: options that are no template, no scale, or do not go together.
    """

    columns: ClassVar[tuple[str, ...]] = ("score",)
    scope: ClassVar[str] = "sample"
    questions: Sequence[Any] = ()
    method: Literal["yes_no", "digits", "text"] = "yes_no"
    low: int = 0
    high: int = 5
    squash: bool = False
    source: bool = False  # show the picture that an edit started from, too

    def __post_init__(self) -> None:
        q.check_scale(self.low, self.high)
        if self.method not in ("yes_no", "digits", "text"):
            raise ValueError(f"method = {self.method!r} is unknown; give 'yes_no', 'digits' or 'text'")
        if isinstance(self.questions, str):
            raise ValueError(f"questions = {self.questions!r} is one text; give a list of them")
        asked = tuple(map(q.Question.read, self.questions or [self._usual()]))
        if self.method == "yes_no" and self.squash:
            raise ValueError("squash = True is for scores, and method = 'yes_no' gives none; take 'digits' or 'text'")
        if self.method != "yes_no" and any(question.positive == "no" for question in asked):
            raise ValueError(f"positive = 'no' is for method = 'yes_no', and it is {self.method!r}; remove one of them")
        object.__setattr__(self, "questions", asked)

    @property
    def needs(self) -> frozenset[str]:
        keys = frozenset().union(*(q.placeholders(question.text) for question in self.questions)) - q.OF_PROMPT
        return keys | {"source"} if self.source else keys

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        pictures = [
            (prompt.metadata["source"], picture) if self.source else (picture,)
            for picture, prompt in zip(media.pil(), prompts, strict=True)
        ]
        asks = [
            Ask(shown, q.filled(question.text, prompt))
            for question in self.questions
            for shown, prompt in zip(pictures, prompts, strict=True)
        ]
        values = self._values(asks).unflatten(0, (len(self.questions), -1))  # [Q, N]
        flip = torch.tensor([[question.positive == "no"] for question in self.questions])
        weights = torch.tensor([question.weight for question in self.questions])
        return weights @ torch.where(flip, 1 - values, values) / weights.sum()

    def _values(self, asks: Sequence[Ask]) -> Tensor:
        """[n] in [0, 1]"""
        texts: list[str | None] = []
        if self.method == "yes_no":
            values = q.yes_no(self.weigh(asks, (q.YES, q.NO)))
        elif self.method == "digits":
            answers = [(str(digit), f" {digit}") for digit in range(self.low, self.high + 1)]
            values = self._scaled(q.digits(self.weigh(asks, answers), self.low))
        else:
            schema = q.answer_schema("score", {"type": "number", "minimum": self.low, "maximum": self.high})
            texts = self.write(asks, schema)
            values = self._scaled(torch.tensor([q.number(text or "", self.low, self.high) for text in texts]))
        q.tell_unread(values, texts)
        return values

    def _scaled(self, score: Tensor) -> Tensor:
        return q.squashed(score) if self.squash else score / self.high

    def _usual(self) -> str:
        about = ABOUT[self.source]
        if self.method == "yes_no":
            return f"Does {about} Answer Yes or No."
        how = "one digit" if self.method == "digits" else 'only {{"score": s}}, where s is a number'
        return f"How well does {about} Answer with {how} from {self.low} to {self.high}."
