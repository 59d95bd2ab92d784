"""`shapes`: 64x64 scenes of coloured shapes, a prompt grammar, and splits by held-out combinations.

A scene is what a prompt asks for: {"objects": [[colour, shape, count], ...], "relation": None or one of RELATIONS}.
Its split is a hash of the whole combination, so validation and held-out prompts name combinations that neither the
pre-training nor the reward has seen.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from flowrl.types import Prompt

SIZE = 64
COLOURS = {
    "red": (222, 38, 38),
    "yellow": (232, 200, 28),
    "green": (34, 178, 62),
    "cyan": (34, 192, 206),
    "blue": (38, 78, 226),
    "purple": (166, 52, 206),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("a", "two", "three", "four")
SPLITS = ("train", "validation", "heldout")
KINDS = {"single": 0.08, "count": 0.26, "pair": 0.2, "relation": 0.28, "counted pair": 0.18}  # share in pre-training
GAP = 5  # pixels between two objects' boxes
_OVERSAMPLE = 4

Scene = dict[str, Any]


def text(scene: Scene) -> str:
    """The prompt of a scene: "two red circles and a blue square", "a red circle left of a blue square"."""
    names = [f"{NUMBERS[n - 1]} {colour} {shape}{'s' * (n > 1)}" for colour, shape, n in scene["objects"]]
    return f" {scene['relation'] or 'and'} ".join(names)


def _all(kind: str) -> Iterator[Scene]:
    things = list(itertools.product(COLOURS, SHAPES))
    pairs = list(itertools.permutations(things, 2))
    if kind == "single":
        yield from ({"objects": [[*a, 1]], "relation": None} for a in things)
    elif kind == "count":
        yield from ({"objects": [[*a, n]], "relation": None} for a in things for n in (2, 3, 4))
    elif kind == "pair":
        yield from ({"objects": [[*a, 1], [*b, 1]], "relation": None} for a, b in pairs)
    elif kind == "relation":
        yield from ({"objects": [[*a, 1], [*b, 1]], "relation": r} for a, b in pairs for r in RELATIONS)
    else:
        yield from ({"objects": [[*a, n], [*b, 1]], "relation": None} for a, b in pairs for n in (2, 3))


@cache
def scenes(split: str) -> dict[str, list[Scene]]:
    """All combinations of a split by kind: 70 % train, 12 % validation, 18 % held out, by a hash of the combination."""
    chosen: dict[str, list[Scene]] = {kind: [] for kind in KINDS}
    for kind, mine in chosen.items():
        for scene in _all(kind):
            # "a and b" and "b and a" show the same pictures: they share a split
            same = text(scene) if scene["relation"] else " and ".join(sorted(text(scene).split(" and ")))
            byte = hashlib.sha256(same.encode()).digest()[0] / 256
            if SPLITS[(byte >= 0.70) + (byte >= 0.82)] == split:
                mine.append(scene)
    return chosen


def prompts(split: str, total: int | None = None) -> list[Prompt]:
    """The prompts of a split, mixed over kinds as far as there are any: 387 train, 72 validation, 98 held out."""
    if split not in SPLITS:
        raise ValueError(f"unknown split 'shapes/{split}': choose one of {', '.join(f'shapes/{s}' for s in SPLITS)}")
    total = total or {"train": 512, "validation": 96, "heldout": 128}[split]
    rng = np.random.default_rng(SPLITS.index(split))
    chosen = []
    for kind, some in scenes(split).items():
        quota = min(len(some), round(total * KINDS[kind]))
        chosen += [(kind, some[i]) for i in sorted(rng.permutation(len(some))[:quota])]
    order = rng.permutation(len(chosen))
    rows = [chosen[i] for i in order]
    return [Prompt(i, text(scene), {"scene": scene, "tag": kind}) for i, (kind, scene) in enumerate(rows)]


def draw_scene(rng: np.random.Generator, split: str = "train") -> Scene:
    """A random scene of a split, kinds by their share."""
    some = scenes(split)
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    return some[kind][rng.integers(len(some[kind]))]


def inside(shape: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Which points (u right, v down) of the box [-1, 1]^2 a shape covers."""
    if shape == "circle":
        return u**2 + v**2 <= 1
    if shape == "square":
        return (abs(u) <= 1) & (abs(v) <= 1)
    return (abs(u) <= (v + 1) / 2) & (abs(v) <= 1)


def layout(scene: Scene, rng: np.random.Generator) -> list[tuple[str, str, float, float, float]]:
    """Random (colour, shape, x, y, half size) of a scene's objects: apart, inside the picture, in their relation."""
    wanted = [(colour, shape) for colour, shape, n in scene["objects"] for _ in range(n)]
    low, high = {1: (9, 13), 2: (7.5, 11)}.get(len(wanted), (6.5, 8.5))
    while True:
        r = rng.uniform(low, high, len(wanted))
        x, y = rng.uniform(r + 3, SIZE - r - 3), rng.uniform(r + 3, SIZE - r - 3)
        apart = all(
            max(abs(x[i] - x[j]), abs(y[i] - y[j])) >= r[i] + r[j] + GAP
            for i, j in itertools.combinations(range(len(r)), 2)
        )
        if apart and (scene["relation"] is None or related(scene["relation"], x[1] - x[0], y[1] - y[0], slack=1.3)):
            return [(*thing, *place) for thing, place in zip(wanted, zip(x, y, r, strict=True), strict=True)]


def related(relation: str, dx: float, dy: float, slack: float = 1.0) -> bool:
    """Does the first object stand in `relation` to the second, which is (dx right, dy down) of it?"""
    along, across = {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation]
    return along >= slack * max(abs(across), 6.0)


def render(objects: list[tuple[str, str, float, float, float]], background: float) -> np.ndarray:
    """[64, 64, 3] uint8 picture of (colour, shape, x, y, half size) objects, later ones on top, anti-aliased."""
    fine = (np.arange(SIZE * _OVERSAMPLE) + 0.5) / _OVERSAMPLE
    canvas = np.full((fine.size, fine.size, 3), background * 255)
    for colour, shape, x, y, r in objects:
        u, v = (fine[None, :] - x) / r, (fine[:, None] - y) / r
        canvas[np.broadcast_to(inside(shape, u, v), canvas.shape[:2])] = COLOURS[colour]
    blocks = canvas.reshape(SIZE, _OVERSAMPLE, SIZE, _OVERSAMPLE, 3)
    return blocks.mean((1, 3)).round().astype(np.uint8)


def picture(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """[64, 64, 3] uint8, a random true picture of a scene."""
    return render(layout(scene, rng), rng.uniform(0.72, 0.95))
