"""Objects in a picture and their colours: what GenEval's rules are told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.rewards import Media
from flowrl_rewards._pretrained import pretrained
from flowrl_rewards._towers import HubTowers, bicubic

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels, inside the picture


@dataclass(frozen=True)
class Found:
    """An object in a picture."""

    name: str
    score: float
    box: Box


class Detector(Protocol):
    """Finds the objects of N pictures; `names` are the classes that it knows."""

    names: frozenset[str]

    def __call__(self, media: Media) -> Sequence[Sequence[Found]]: ...


class Painter(Protocol):
    """Names the colour of each of some objects of one class in one picture."""

    def __call__(self, picture: Media, boxes: Sequence[Box], name: str) -> Sequence[str]: ...


class Detr:
    """Boxes of a detector of transformers, cut at the borders of the picture."""

    def __init__(self, source: str, device: torch.device) -> None:
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        self.prepare = AutoImageProcessor.from_pretrained(source)
        self.network = pretrained(AutoModelForObjectDetection, source, "detector").to(device)
        self.labels = self.network.config.id2label
        self.names = frozenset(self.labels.values())

    def __call__(self, media: Media) -> list[list[Found]]:
        *_, height, width = media.images.shape
        inputs = self.prepare(images=media.pil(), return_tensors="pt").to(self.network.device)
        sizes = [(height, width)] * len(media.images)
        results = self.prepare.post_process_object_detection(self.network(**inputs), 0.0, sizes)
        edges = torch.tensor([width, height, width, height], device=self.network.device)
        return [self._found(result, edges) for result in results]

    def _found(self, result: Mapping[str, Tensor], edges: Tensor) -> list[Found]:
        boxes = result["boxes"].clamp(min=0).minimum(edges).tolist()
        rows = zip(result["labels"].tolist(), result["scores"].tolist(), boxes, strict=True)
        return [
            Found(self.labels[label], score, (left, top, right, bottom))
            for label, score, (left, top, right, bottom) in rows
            if left < right and top < bottom
        ]


class ClipPainter:
    """The colour whose description CLIP finds nearest to the cut-out of an object."""

    def __init__(self, source: str, device: torch.device) -> None:
        self.towers = HubTowers(source, source, bicubic(source), device)
        self.colours: dict[str, Tensor] = {}  # [10, D] of each class

    def __call__(self, picture: Media, boxes: Sequence[Box], name: str) -> list[str]:
        seen = torch.cat([self.towers.pictures(_cut_out(picture, box)) for box in boxes])
        if name not in self.colours:
            self.colours[name] = self._described(name)
        return [COLOURS[best] for best in (normalize(seen) @ self.colours[name].T).argmax(1).tolist()]

    def _described(self, name: str) -> Tensor:
        """[10, D]: the mean direction of the descriptions of each colour."""
        texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
        tokens = self.towers.tokens(texts, self.towers.context).to(self.towers.device)
        return normalize(normalize(self.towers.read(tokens)).view(len(COLOURS), len(TEMPLATES), -1).mean(1))


def _cut_out(picture: Media, box: Box) -> Media:
    """Every pixel that a box touches."""
    left, top, right, bottom = box
    return Media(picture.images[..., math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)])
