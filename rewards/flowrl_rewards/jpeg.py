"""The size of an image as a JPEG: a reward without a model, which shows whether a run learns (2305.13301, section 5).

jpeg_incompressible = bytes at quality 95 / 1000 / 500,  in units of 500 kB        jpeg_size = -jpeg_incompressible
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import torch
from PIL import Image

from flowrl.rewards import Gold, Media, reward
from flowrl.types import Prompt


def known(sign: int) -> Gold:
    """A flat picture, which is about 1 kB, and one of noise, about 5 kB."""
    images = torch.full((2, 3, 64, 64), 128, dtype=torch.uint8)
    images[1] = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    bounds = sign * torch.tensor([[0.4, 2.0], [4.0, 8.0]]) / 500
    return Gold(Media(images), [Prompt(0, "flat"), Prompt(1, "noise")], *(b[:, None] for b in bounds.sort(1)[0].T))


@reward(case=partial(known, -1))
def jpeg_size(images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list:
    """Small files are good: minus the size in kB / 500."""
    return [-_kilobytes(image) / 500 for image in images]


@reward(case=partial(known, 1))
def jpeg_incompressible(
    images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list:
    """Large files are good: the size in kB / 500."""
    return [_kilobytes(image) / 500 for image in images]


def _kilobytes(image: Image.Image) -> float:
    file = BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.tell() / 1000
