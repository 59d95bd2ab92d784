"""The rule-based judge of `shapes`, in GenEval's manner (2310.11513): it looks at pixels only.

Everything coloured is foreground; a connected region is an object if it has one colour, fits a shape's template and a
plausible size, and does not touch the border; any other region is junk. Objects that touch form one region of no known
shape or of two colours: junk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from flowrl.zoo.shapes import COLOURS, SHAPES, SIZE, Scene, inside, related

SATURATION = 0.28  # of max - min over RGB in [0, 1]: half way between the palest colour and grey
PURITY = 0.85  # share of an object's pixels in its colour
FIT = 0.68
SPECK = 12  # pixels: smaller regions are dust
DUST = 24  # pixels of dust in all that are overlooked
SIDE = (9, 30)  # pixels


@dataclass(frozen=True)
class Seen:
    colour: str
    shape: str
    x: float
    y: float


def _hue(rgb: np.ndarray) -> np.ndarray:
    """[...] hue in turns of [..., 3] RGB."""
    r, g, b = np.moveaxis(rgb, -1, 0)
    return np.arctan2(np.sqrt(3) * (g - b), 2 * r - g - b) / (2 * np.pi) % 1


_HUES = _hue(np.array(list(COLOURS.values())) / 255)


def _shape(mask: np.ndarray) -> str | None:
    """The shape whose template in the mask's own box overlaps it best, None if none does well."""
    h, w = mask.shape
    v, u = (np.arange(h)[:, None] + 0.5) * 2 / h - 1, (np.arange(w)[None, :] + 0.5) * 2 / w - 1
    fits = {}
    for shape in SHAPES:
        template = np.broadcast_to(inside(shape, u, v), mask.shape)
        fits[shape] = (template & mask).sum() / (template | mask).sum()
    best = max(fits, key=fits.__getitem__)
    return best if fits[best] >= FIT else None


def look(image: np.ndarray) -> tuple[list[Seen], int]:
    """The objects of a [H, W, 3] uint8 picture and the number of junk regions."""
    rgb = image / 255.0
    foreground = rgb.max(-1) - rgb.min(-1) > SATURATION
    away = abs(_hue(rgb)[..., None] - _HUES)
    colour = np.minimum(away, 1 - away).argmin(-1)
    regions: np.ndarray = ndimage.label(foreground, structure=np.ones((3, 3)))[0]  # type: ignore[index]
    seen, junk, dust = [], 0, 0
    for number, box in enumerate(ndimage.find_objects(regions), start=1):
        mask = regions[box] == number
        area = int(mask.sum())
        if area < SPECK:
            dust += area
            continue
        rows, columns = box
        h, w = mask.shape
        shares = np.bincount(colour[box][mask], minlength=len(COLOURS)) / area
        shape = _shape(mask)
        whole = min(rows.start, columns.start) > 0 and max(rows.stop, columns.stop) < SIZE
        plausible = SIDE[0] <= min(h, w) and max(h, w) <= min(SIDE[1], 1.35 * min(h, w))
        if shape and whole and plausible and shares.max() >= PURITY:
            y, x = ndimage.center_of_mass(mask)
            seen.append(Seen(list(COLOURS)[shares.argmax()], shape, columns.start + x, rows.start + y))
        else:
            junk += 1
    return seen, junk + (dust > DUST)


def _overlap(a: Sequence, b: Sequence) -> int:
    return sum((Counter(a) & Counter(b)).values())


def judge(image: np.ndarray, scene: Scene) -> tuple[float, float]:
    """(partial, strict) of one [H, W, 3] uint8 picture.

    strict is 1 if exactly the asked objects are there, in their relation, and nothing else. partial is the mean of the
    credits for count, shapes, colours, whole objects and (where asked) relation; each overlap is divided by the larger
    of what is asked and all that is there, so clutter never pays.
    """
    seen, junk = look(image)
    asked = [(colour, shape) for colour, shape, n in scene["objects"] for _ in range(n)]
    found = [(s.colour, s.shape) for s in seen]
    there = len(found) + junk
    most = max(there, len(asked))
    objects = _overlap(asked, found) / most
    count = max(0.0, 1 - abs(there - len(asked)) / len(asked)) * len(found) / most
    shapes = _overlap([s for _, s in asked], [s for _, s in found]) / most
    colours = _overlap([c for c, _ in asked], [c for c, _ in found]) / most
    credits = [count, shapes, colours, objects]
    if scene["relation"]:
        credits.append(_holds(scene["relation"], asked, seen) * 2 / max(there, 2))
    strict = objects == 1 and credits[-1] == 1
    return float(np.mean(credits)), float(strict)


def _holds(relation: str, asked: list[tuple[str, str]], seen: list[Seen]) -> bool:
    first, second = ([s for s in seen if (s.colour, s.shape) == thing] for thing in asked)
    return any(related(relation, b.x - a.x, b.y - a.y) for a in first for b in second)


def verify(images: Tensor, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """(partial [N], strict [N]) in [0, 1] of [N, 3, 64, 64] uint8 pictures against their scenes."""
    if tuple(images.shape[1:]) != (3, SIZE, SIZE):
        raise ValueError(f"the shapes verifier reads {SIZE}x{SIZE} RGB pictures, got {tuple(images.shape[1:])}")
    pictures = images.permute(0, 2, 3, 1).numpy()
    scores = torch.tensor([judge(p, s) for p, s in zip(pictures, scenes, strict=True)])
    return scores[:, 0], scores[:, 1]
