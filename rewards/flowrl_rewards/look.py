"""The probes of `flowrl.watch` as rewards: easy to raise without drawing anything better, so good for testing a watch.

Optimised, a number no longer says whether a run was hacked: leave it out of the watched ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl import watch
from flowrl.rewards import Gold, Media
from flowrl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Look(ABC):
    """A number of the pixels alone; `known` are its values for `drawn`."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    known: ClassVar[tuple[float, float, float]]

    @abstractmethod
    def probe(self, images: Tensor) -> Tensor:
        """[N] of images [N, 3, H, W] uint8."""

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return self.probe(media.images)

    def gold(self) -> Gold:
        known = torch.tensor(self.known)[:, None]
        prompts = [Prompt(row, "") for row in range(len(known))]
        return Gold(drawn(), prompts, known - 1e-3, known + 1e-3)


def drawn() -> Media:
    """Black, pure red, and a chess board of black and white pixels."""
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    images[1, 0] = 255
    images[2, :, ::2, ::2] = images[2, :, 1::2, 1::2] = 255
    return Media(images)


class Sharpness(Look):
    """Root mean square of the grey Laplacian, in 8-bit levels."""

    known = (0.0, 0.0, 4 * 255.0)

    def probe(self, images: Tensor) -> Tensor:
        return watch.sharpness(images)


class ColourEntropy(Look):
    """Entropy of the colours in bits, 8 levels a channel."""

    known = (0.0, 0.0, 1.0)

    def probe(self, images: Tensor) -> Tensor:
        return watch.colour_entropy(images)


class Saturation(Look):
    """Mean of (max - min over RGB), in [0, 1]."""

    known = (0.0, 1.0, 0.0)

    def probe(self, images: Tensor) -> Tensor:
        return watch.saturation(images)


class Brightness(Look):
    """Mean grey level, in [0, 1]."""

    known = (0.0, 1 / 3, 1 / 2)

    def probe(self, images: Tensor) -> Tensor:
        return watch.brightness(images)


class Darkness(Look):
    """1 - brightness."""

    known = (1.0, 2 / 3, 1 / 2)

    def probe(self, images: Tensor) -> Tensor:
        return 1 - watch.brightness(images)
