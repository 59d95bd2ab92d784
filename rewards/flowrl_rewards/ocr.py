"""Does the picture show the text that was asked for? (the task "visual text rendering" of Flow-GRPO, 2505.05470)

OCR = 1 - d / |target|,   d = min(Levenshtein(target, read), |target|), or 0 where `read` contains the target

Both without white space and in lower case; `read` is every line that was recognised, joined.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.rewards import Gold, Media
from flowrl.types import Prompt
from flowrl_rewards._weights import absent_packages

log = logging.getLogger(__name__)

QUOTED = re.compile('"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»')


class Recogniser(Protocol):
    """Reads a picture: the text and the confidence in [0, 1] of each line, from the top down."""

    def __call__(self, picture: Image.Image) -> Sequence[tuple[str, float]]: ...


class RapidOCR:
    """PP-OCRv4 on the CPU; the weights are in the package."""

    @cached_property
    def _engine(self) -> Any:
        import rapidocr_onnxruntime

        return rapidocr_onnxruntime.RapidOCR(text_score=0.0)  # confidence is for `OCR` to judge

    def __call__(self, picture: Image.Image) -> list[tuple[str, float]]:
        lines, _ = self._engine(picture, use_cls=False)
        return [(text, float(confidence)) for _, text, confidence in lines or ()]


@dataclass(frozen=True, kw_only=True)
class OCR:
    """Closeness in [0, 1] of the text in the picture to the metadata key "target", else to what the prompt quotes.

    NaN: no target, or the recogniser raised.
    """

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    substring: bool = True  # further text around the target costs nothing
    min_confidence: float = 0.5  # of a line, below which it is not read
    recogniser: Recogniser = field(default_factory=RapidOCR)

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"reward ocr: min_confidence is {self.min_confidence}; give a number in [0, 1]")
        if not callable(self.recogniser):
            raise ValueError(f"reward ocr: recogniser is {self.recogniser!r}; leave it out, a config cannot give one")

    def missing(self) -> Sequence[str]:
        return [*absent_packages("rapidocr_onnxruntime", extra="rewards")]

    def gold(self) -> Gold:
        """The text, another one, and none."""
        pictures = [np.asarray(written(text)) for text in ("Blue Lantern", "Stop", "")]
        media = Media(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous())
        prompts = [Prompt(row, 'a sign that says "Blue Lantern"') for row in range(3)]
        return Gold(media, prompts, torch.tensor([[0.9], [0.0], [0.0]]), torch.tensor([[1.0], [0.4], [0.0]]))

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return torch.tensor([self._score(*pair) for pair in zip(media.pil(), prompts, strict=True)])

    def _score(self, picture: Image.Image, prompt: Prompt) -> float:
        target = plain(target_of(prompt))
        if not target:
            log.warning("prompt %s has no text for ocr: quote it, or give the metadata key 'target'", prompt.id)
            return math.nan
        try:
            lines = self.recogniser(picture)
        except Exception:
            log.warning("ocr could not read a picture of prompt %s", prompt.id, exc_info=True)
            return math.nan
        read = plain("".join(text for text, confidence in lines if confidence >= self.min_confidence))
        if self.substring and target in read:
            return 1.0
        return 1 - min(levenshtein(target, read), len(target)) / len(target)


def target_of(prompt: Prompt) -> str:
    """The text that the picture should show, "" where the prompt names none."""
    quoted = QUOTED.search(prompt.text)
    return prompt.metadata.get("target") or (quoted[quoted.lastindex or 0] if quoted else "")


def plain(text: str) -> str:
    """The text without white space, in lower case."""
    return "".join(text.split()).lower()


def levenshtein(a: str, b: str) -> int:
    """The fewest insertions, deletions and replacements of a character that turn `a` into `b`."""
    costs = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        diagonal, costs[0] = costs[0], i
        for j, y in enumerate(b, 1):
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, diagonal + (x != y))
    return costs[-1]


def written(text: str) -> Image.Image:
    """White text on black."""
    picture = Image.new("RGB", (288, 288))
    ImageDraw.Draw(picture).text((16, 120), text, "white", ImageFont.load_default(40))
    return picture
