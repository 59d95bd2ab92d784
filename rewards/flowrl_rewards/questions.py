"""What a vision-language judge is asked, and how its answer is read.

With l(a) = log of the probability that the answer begins with a, summed over the spellings of a:

yes_no   v = sigmoid(l(yes) - l(no))
digits   s = sum_d d exp(l(d)) / sum_d exp(l(d)),   d = low .. high
number   s = the one number that a written answer states
squash   v = 1 / (1 + exp(-(2 s - 5)))   (2604.19406)

Shape letters: n asks or pictures, A answers.
"""

from __future__ import annotations

import json
import logging
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.types import Prompt

log = logging.getLogger(__name__)

YES = ("Yes", " Yes", "yes", " yes", "YES", " YES")
NO = ("No", " No", "no", " no", "NO", " NO")
OF_PROMPT = frozenset({"prompt", "instruction"})  # placeholders for the text of a prompt, which an edit obeys

_NUMBER = r"(-?[0-9]+(?:\.[0-9]+)?)"
_FORMS = tuple(
    (re.compile(opened, re.IGNORECASE), re.compile(whole, re.IGNORECASE))
    for opened, whole in (
        (r'"score"\s*:', rf'"score"\s*:\s*{_NUMBER}\s*(?:}}|,\s*")'),
        (r"<score>", rf"<score>\s*{_NUMBER}\s*</score>"),
        (r"final score\s*:", rf"final score\s*:\**\s*{_NUMBER}\**\.?(?!\S)"),
        (rf"\A\s*{_NUMBER}\s*\Z",) * 2,
    )
)


@dataclass(frozen=True)
class Question:
    """One question, a template. ValueError: it is none, or has a weight that is not positive."""

    text: str
    weight: float = 1.0
    positive: Literal["yes", "no"] = "yes"  # the good answer

    def __post_init__(self) -> None:
        placeholders(self.text)
        if not 0 < self.weight < math.inf:
            raise ValueError(f"question {self.text!r} has the weight {self.weight}; give a positive number")
        if self.positive not in ("yes", "no"):
            raise ValueError(f"question {self.text!r} has positive = {self.positive!r}; give 'yes' or 'no'")

    @classmethod
    def read(cls, given: Question | str | Mapping[str, Any]) -> Question:
        """The question of a config: its text, or {text, weight, positive}."""
        if isinstance(given, Mapping):
            return cls(**given)
        return given if isinstance(given, Question) else cls(given)


def placeholders(text: str) -> frozenset[str]:
    """The names in the braces of a template. ValueError: it is none."""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"question {text!r} is no template: {error}; write {{{{ and }}}} for braces") from error
    names = [(name, spec or conversion) for _, name, spec, conversion in parts if name is not None]
    for name, more in names:
        if more or not name.isidentifier():
            raise ValueError(
                f"question {text!r} has the placeholder {name!r}, which is no plain metadata key; "
                f"write {{prompt}}, {{instruction}} or {{key}}, and {{{{ and }}}} for braces"
            )
    return frozenset(name for name, _ in names)


def filled(text: str, prompt: Prompt, **more: Any) -> str:
    """A template with the values of a prompt."""
    return text.format_map({**prompt.metadata, "prompt": prompt.text, "instruction": prompt.text, **more})


def answer_schema(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with one key."""
    return {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}


def check_scale(low: int, high: int) -> None:
    """ValueError: the ends are no range of digits."""
    if not 0 <= low < high <= 9:
        raise ValueError(
            f"low = {low}, high = {high} is no scale of digits; give 0 <= low < high <= 9, such as 0 and 5"
        )


def yes_no(weights: Tensor) -> Tensor:
    """[n] probability of the first of two answers, weights l [n, 2]; NaN where neither was seen."""
    return torch.sigmoid(weights[:, 0] - weights[:, 1])


def digits(weights: Tensor, low: int) -> Tensor:
    """[n] mean of the digits low, low + 1, ... under weights l [n, A]; NaN where none was seen."""
    return weights.softmax(1) @ torch.arange(low, low + weights.shape[1], dtype=weights.dtype)


def squashed(score: Tensor) -> Tensor:
    """[n] in (0, 1) of scores in 0 .. 5 (HP-Scorer)."""
    return torch.sigmoid(2 * score - 5)


def number(text: str, low: float, high: float) -> float:
    """The score that a text states: {"score": s}, <Score>s</Score>, Final Score: s, or s alone.

    NaN: it states none, two different ones, one outside low .. high, or one that is not in plain ASCII digits.
    """
    stated = []
    for opened, whole in _FORMS:
        found = whole.findall(text)
        if len(found) != len(opened.findall(text)):
            return math.nan
        stated += map(float, found)
    return stated[0] if len(set(stated)) == 1 and low <= stated[0] <= high else math.nan


def one_list(text: str) -> list[Any]:
    """The JSON list that a text holds, [] where it holds none, a broken one, or several that differ."""
    try:
        found = [json.loads(part) for part in re.findall(r"\[[^\[\]]*\]", text)]
    except ValueError:
        return []
    return found[0] if found and all(one == found[0] for one in found) else []


def scores(numbers: Sequence[Any], n: int, low: float, high: float) -> Tensor:
    """[n] numbers / high; NaN for all unless they are n numbers in low .. high."""
    plain = all(type(one) in (int, float) and low <= one <= high for one in numbers)
    return torch.tensor(numbers) / high if plain and len(numbers) == n else torch.full((n,), math.nan)


def places(numbers: Sequence[Any], n: int) -> Tensor:
    """[n] 1 for the member named first, 0 for the last; NaN for all unless the numbers are a permutation of 1 .. n."""
    values = torch.full((n,), math.nan)
    if n > 1 and all(type(one) is int for one in numbers) and sorted(numbers) == [*range(1, n + 1)]:
        values[torch.tensor(numbers) - 1] = torch.linspace(1, 0, n)
    return values


def tell_unread(values: Tensor, texts: Sequence[str | None] = ()) -> None:
    """Log how many answers [n] hold no verdict, and the first of them."""
    lost = values.isnan().nonzero().flatten().tolist()
    if lost:
        example = f", such as {reprlib.repr(texts[lost[0]])}" if texts else ""
        log.warning("%d of %d answers of the judge hold no verdict%s", len(lost), len(values), example)
