"""GenEval (2310.11513): a detector finds the objects of a picture, rules compare them with what the prompt asked for.

credit of a class    1 - |n - n*| / n*, at least 0         n found, n* asked for
credit of a colour   n_c / n*                              n_c of that colour; 0 unless n = n*
credit of a relation 1 if it holds between all pairs, else 0; 0 unless n = n* for both classes
score = mean of the credits,   strict = 1 if all that was asked for is there and nothing excluded is, else 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.rewards import Gold, Media
from flowrl.types import Prompt
from flowrl_rewards._objects import COLOURS, Box, ClipPainter, Detector, Detr, Found, Painter
from flowrl_rewards._weights import absent_file, absent_packages, device_of

ALIASES = {"computer mouse": "mouse", "computer keyboard": "keyboard", "tv remote": "remote"}  # GenEval: COCO
MOST = 16  # objects of one class
SLACK = 0.1  # of the sizes of two objects, by which their centres may be apart and in no relation
Colours = Callable[[Sequence[Box], str], Sequence[str]]  # boxes of one class -> the colour of each


@dataclass(frozen=True, kw_only=True)
class GenEval:
    """Whether the objects, counts, colours and relations of the prompt are in the picture."""

    columns: ClassVar[tuple[str, ...]] = ("score", "strict")
    needs: ClassVar[frozenset[str]] = frozenset({"tag", "include"})
    scope: ClassVar[str] = "sample"
    detector: str = "facebook/detr-resnet-101"  # for object detection with transformers, or a local folder
    clip: str = "openai/clip-vit-large-patch14"  # names colours, or a local folder
    threshold: float = 0.3  # an object is one above this score
    counting_threshold: float = 0.9  # the same where the tag is "counting"
    device: str = "auto"

    def __post_init__(self) -> None:
        for key, value in (("threshold", self.threshold), ("counting_threshold", self.counting_threshold)):
            if not 0 <= value <= 1:
                raise ValueError(f"reward geneval: {key} is {value}, a score in [0, 1]; 0.3 and 0.9 are GenEval's")

    def missing(self) -> Sequence[str]:
        return [
            *absent_packages("timm", "torchvision", extra="rewards"),
            *absent_file("detector", self.detector),
            *absent_file("clip", self.clip),
        ]

    def gold(self) -> Gold:
        """A grey canvas, on which there is no dog."""
        asked = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
        canvas = Media(torch.full((1, 3, 256, 256), 127, dtype=torch.uint8))
        return Gold(canvas, [Prompt(0, "a photo of a dog", asked)], torch.zeros(1, 2), torch.zeros(1, 2))

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        for prompt in prompts:
            refuse(prompt, self._detector.names)
        rows = []
        for row, (seen, prompt) in enumerate(zip(self._detector(media), prompts, strict=True)):
            threshold = self.counting_threshold if prompt.metadata["tag"] == "counting" else self.threshold
            rows.append(judged(kept(seen, threshold), prompt.metadata, partial(self._painter, media[[row]])))
        return torch.tensor(rows)

    @cached_property
    def _detector(self) -> Detector:
        return Detr(self.detector, device_of(self.device))

    @cached_property
    def _painter(self) -> Painter:
        return ClipPainter(self.clip, device_of(self.device))


def coco(name: str) -> str:
    """What the detector calls a class of GenEval."""
    return ALIASES.get(name, name)


def refuse(prompt: Prompt, names: frozenset[str]) -> None:
    """ValueError: a prompt asks for nothing, or for what the detector or the list of colours does not know."""
    wanted = prompt.metadata["include"]
    if not wanted or any(want["count"] < 1 for want in wanted):
        raise ValueError(f"prompt {prompt.id} has include = {wanted}; write at least one class, each with a count > 0")
    for want in (*wanted, *(prompt.metadata.get("exclude") or ())):
        for key, value, known in (("class", coco(want["class"]), names), ("color", want.get("color", "red"), COLOURS)):
            if value not in known:
                near = " or ".join(get_close_matches(value, known)) or f"one of {', '.join(sorted(known))}"
                raise ValueError(f"prompt {prompt.id} asks for the {key} {value!r}, which is unknown; write {near}")


def kept(seen: Sequence[Found], threshold: float) -> dict[str, list[Box]]:
    """The boxes of each class above the threshold, the surest first."""
    boxes: dict[str, list[Box]] = {}
    for one in sorted(seen, key=lambda one: -one.score):
        if one.score > threshold:
            boxes.setdefault(one.name, []).append(one.box)
    return {name: found[:MOST] for name, found in boxes.items()}


def judged(found: Mapping[str, Sequence[Box]], asked: Mapping[str, Any], colours: Colours) -> tuple[float, float]:
    """(score, strict) of the boxes of one picture; `asked` is GenEval's metadata.

    {"include": [{"class", "count", "color"?, "position"? [relation, index of an earlier one]}], "exclude"?: [...]}
    """
    credits: list[float] = []
    groups: list[Sequence[Box]] = []  # of each class asked for: the surest n* if they are as wanted, else none
    exact: list[bool] = []  # whether they are as wanted and no more were found
    for want in asked["include"]:
        boxes, count = found.get(coco(want["class"]), ()), want["count"]
        group = boxes[:count]
        fits, alone = len(group) == count, len(boxes) == count
        credits.append(max(0.0, 1 - abs(len(boxes) - count) / count))
        if "color" in want:
            right = list(colours(group, want["class"])).count(want["color"]) if fits else 0
            credits.append(right / count if alone else 0.0)
            fits &= right == count
        if "position" in want:
            relation, other = want["position"]
            fits &= bool(groups[other]) and all(relation in relations(a, b) for a in group for b in groups[other])
            credits.append(float(fits and alone and exact[other]))
        groups.append(group if fits else ())
        exact.append(fits and alone)
    excluded = any(len(found.get(coco(bar["class"]), ())) >= bar["count"] for bar in (asked.get("exclude") or ()))
    return math.fsum(credits) / len(credits), float(all(groups) and not excluded)


def relations(a: Box, b: Box) -> set[str]:
    """Where a lies relative to b: those of left of, right of, above, below.

    d = centre a - centre b, shrunk towards 0 by SLACK (size a + size b) on each axis; a relation holds where its
    share of |centre a - centre b| is above 1/2.
    """
    d = [(a[k] + a[k + 2] - b[k] - b[k + 2]) / 2 for k in (0, 1)]
    slack = [SLACK * (a[k + 2] - a[k] + b[k + 2] - b[k]) for k in (0, 1)]
    x, y = (math.copysign(max(abs(one) - free, 0), one) for one, free in zip(d, slack, strict=True))
    half = math.hypot(*d) / 2
    holds = {"left of": x < -half, "right of": x > half, "above": y < -half, "below": y > half}
    return {relation for relation, true in holds.items() if true}
