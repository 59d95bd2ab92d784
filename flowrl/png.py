"""Pictures as text; no torch, since reward servers may have none."""

from __future__ import annotations

import base64
import reprlib
from io import BytesIO

from PIL import Image


def png_base64(image: Image.Image) -> str:
    """The picture as a PNG in base64; equal pictures give equal texts."""
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def from_png_base64(text: str) -> Image.Image:
    """The picture of a base64 PNG. ValueError: it is none, is damaged, or has more pixels than Pillow's limit."""
    try:
        image = Image.open(BytesIO(base64.b64decode(text, validate=True)), formats=("PNG",))
        if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are over the limit of {Image.MAX_IMAGE_PIXELS}")
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a wrong checksum
        raise ValueError(f"{reprlib.repr(text)} is no picture in base64 PNG: {error}") from error
    return image
