"""How well a picture shows the scene of its prompt, by the rules of `flowrl.zoo.verifier`.

shapes = w partial + (1 - w) strict,   all in [0, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards import Gold, Media, reward
from flowrl.types import Prompt


def known() -> Gold:
    """A true scene, and a grey picture in its place."""
    from flowrl.zoo import shapes

    prompt = shapes.prompts("train")[0]
    images = torch.full((2, shapes.SIZE, shapes.SIZE, 3), 128, dtype=torch.uint8)
    images[0] = torch.from_numpy(shapes.picture(prompt.metadata["scene"], np.random.default_rng(0)))
    score = torch.tensor([[1.0], [0.0]])
    return Gold(Media(images.permute(0, 3, 1, 2).contiguous()), [prompt, prompt], score - 1e-3, score + 1e-3)


@dataclass(frozen=True)
class Shapes:
    """A mix of the partial credit, weight `partial`, and the strict one."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset({"scene"})
    scope: ClassVar[str] = "sample"
    partial: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.partial <= 1:
            raise ValueError(f"reward shapes: partial is {self.partial}, a weight in [0, 1]; 0.5 is the default")

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        partial_credit, strict_credit = _verify(media.images, [prompt.metadata for prompt in prompts])
        return self.partial * partial_credit + (1 - self.partial) * strict_credit

    def gold(self) -> Gold:
        return known()


@reward(needs={"scene"}, case=known)
def strict(images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
    """1 for exactly the scene that was asked for, else 0."""
    return _verify(_tensor(images), metadata)[1]


@reward(needs={"scene"}, case=known)
def partial(images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
    """The mean of the credits for count, shapes, colours, objects and relation."""
    return _verify(_tensor(images), metadata)[0]


def _tensor(images: Sequence[Image.Image]) -> Tensor:
    """[N, 3, H, W] uint8"""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


def _verify(images: Tensor, metadata: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    from flowrl.zoo.verifier import verify  # brings scipy, which only these rewards need

    return verify(images, [row["scene"] for row in metadata])
