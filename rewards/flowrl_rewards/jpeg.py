"""The size of an image as a JPEG: a reward without a model, which shows whether a run learns (2305.13301, section 5).

jpeg_incompressible = bytes at quality 95 / 1000 / 500,  in units of 500 kB        jpeg_size = -jpeg_incompressible
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image


def jpeg_size(images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list:
    """Small files are good: minus the size in kB / 500."""
    return [-_kilobytes(image) / 500 for image in images]


def jpeg_incompressible(
    images: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list:
    """Large files are good: the size in kB / 500."""
    return [_kilobytes(image) / 500 for image in images]


def _kilobytes(image: Image.Image) -> float:
    file = BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.tell() / 1000
