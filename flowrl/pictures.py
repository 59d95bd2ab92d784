"""Picture files: found, decoded and checked by one set of rules, and fitted to a model's size.

The upright first frame in sRGB numbers of 8 bits: EXIF orientation is applied, transparency lies on white, 16 bits are
scaled, and a colour profile is not looked at. Limits: Pillow's on pixels, 16 pixels a side.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError

from flowrl.prompt_source import named, shown

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 256 * 2**20
MIN_SIDE = 16
DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of 16-bit grey


class Unfit(ValueError):
    """Why a picture, or a pair of them, cannot be used."""


@dataclass(frozen=True)
class Picture:
    """A picture that was found good: `size` (width, height) upright, and what the user should be told of it."""

    path: Path
    size: tuple[int, int]
    notes: tuple[str, ...]
    digest: bytes

    def __str__(self) -> str:
        return f"{named(self.path)}, {by(*self.size)}"

    def fitted(self, width: int, height: int) -> np.ndarray:
        """[3, height, width] uint8: scaled until it covers the size, and its middle cut out.

        Raises Unfit where the file is no longer what was checked.
        """
        data = self.path.read_bytes()
        if hashlib.sha256(data).digest() != self.digest:
            raise Unfit(f"{named(self.path)} has changed since the run began: put it back and resume")
        fitted = ImageOps.fit(_upright(_opened(data)), (width, height), Image.Resampling.LANCZOS)
        return np.array(fitted).transpose(2, 0, 1)


def examine(folder: Path, names: Iterable[str]) -> dict[str, Picture | Unfit]:
    """Each named picture below a folder, or why it is none; nothing outside the folder is opened."""
    names = list(dict.fromkeys(names))
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return dict(zip(names, pool.map(lambda name: _examined(folder, name), names), strict=True))


def _examined(folder: Path, name: str) -> Picture | Unfit:
    try:
        path = _inside(folder, name)
        data = path.read_bytes()
        image = _opened(data)
        upright = _upright(image)
        return Picture(path, upright.size, tuple(_notes(image, upright)), hashlib.sha256(data).digest())
    except Unfit as error:
        return error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return Unfit("too large: " + str(error).partition(",")[0])
    except OSError as error:
        return Unfit(error.strerror or f"damaged or incomplete: {error}")
    except Exception as error:  # what a decoder raises on damaged data is its own choice
        return Unfit(f"damaged: {shown(str(error))}")


def _inside(folder: Path, name: str) -> Path:
    """The regular file of a name below a folder, wherever links lead."""
    scheme, colon, _ = name.partition(":")
    if colon and len(scheme) > 1 and scheme.isalpha():
        raise Unfit("an address, only files are read: save the picture beside the file of pairs")
    if not name or "\0" in name:
        raise Unfit("no name of a file")
    try:
        path, root = (folder / name).resolve(), folder.resolve()
        if not path.is_relative_to(root):
            raise Unfit(f"outside of {named(root)}, where nothing is opened")
        if not path.exists():
            raise Unfit("there is no such file")
        if not path.is_file():
            raise Unfit("no regular file")
    except RuntimeError as error:
        raise Unfit("a link that leads to itself") from error
    if path.stat().st_size > MAX_BYTES:
        raise Unfit(f"over {MAX_BYTES // 2**20} MiB")
    return path


def _opened(data: bytes) -> Image.Image:
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        if not data:
            raise Unfit("the file is empty") from error
        page = ", it starts with '<' like a page or a drawing" if data.lstrip().startswith(b"<") else ""
        raise Unfit(f"no picture of a kind that is read ({', '.join(FORMATS)}){page}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The first frame in RGB."""
    image.seek(0)
    deep = image.mode in DEEP or image.mode == "I" and image.format == "PNG"
    image = ImageOps.exif_transpose(image)
    if min(image.size) < MIN_SIDE:
        raise Unfit(f"{by(*image.size)} pixels, at least {MIN_SIDE} a side are wanted")
    if deep:
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unfit(f"numbers of no stated range (mode {image.mode}): save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _notes(image: Image.Image, upright: Image.Image) -> Iterable[str]:
    if image.has_transparency_data:
        yield "transparent, put on white"
    if (np.asarray(upright) == upright.getpixel((0, 0))).all():
        yield "blank, of one colour"
    if frames := sum(1 for _ in ImageSequence.Iterator(image)) - 1:
        yield f"{frames + 1} frames, the first is used"


def by(width: int, height: int) -> str:
    return f"{width} x {height}"
