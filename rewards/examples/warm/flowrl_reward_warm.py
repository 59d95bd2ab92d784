"""A reward plug-in: copy this folder, change the names, `pip install` it, and configs know the new names.

`warm` is a plain function; `WarmOr` a class, which may have options, several columns and a gold case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards import Gold, Media, reward
from flowrl.types import Prompt


@reward
def warm(images, prompts, metadata):
    """Red minus blue, in [-1, 1]."""
    pixels = (np.asarray(image, dtype=float) / 255 for image in images)
    return [(p[..., 0] - p[..., 2]).mean() for p in pixels]


@dataclass(frozen=True, kw_only=True)
class WarmOr:
    """Two columns: red minus blue, and the same for another channel of the option `instead`."""

    columns: ClassVar[tuple[str, ...]] = ("warm", "other")
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    instead: int = 1

    def __post_init__(self) -> None:
        if self.instead not in (0, 1, 2):
            raise ValueError(f"instead = {self.instead}: it is a channel; take 0, 1 or 2")

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        channels = media.images.float().mean((2, 3)) / 255
        return torch.stack([channels[:, 0] - channels[:, 2], channels[:, self.instead] - channels[:, 2]], 1)

    def gold(self) -> Gold:
        red = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
        red[:, 0] = 255
        lower = torch.tensor([[0.99, 0.99 if self.instead == 0 else -0.01]])
        return Gold(Media(red), [Prompt(0, "red")], lower, lower + 0.02)
