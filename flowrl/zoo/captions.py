"""What can be said of a `shapes` picture: the captions that are true of it, and near ones that are not.

A picture is what the verifier sees in it, a list of objects and a number of junk regions; a caption is a scene of the
grammar. It is true where the verifier's strict verdict is 1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np

from flowrl.zoo.shapes import COLOURS, NUMBERS, RELATIONS, SHAPES, SPLITS, Scene, related, scenes, text
from flowrl.zoo.verifier import Seen


@cache
def split_of() -> dict[str, str]:
    """The split of each text of the grammar."""
    return {text(scene): split for split in SPLITS for some in scenes(split).values() for scene in some}


def stands(relation: str, seen: Sequence[Seen]) -> list[tuple[Seen, Seen]]:
    """The ordered pairs of objects of which the first is in a relation to the second."""
    return [(a, b) for a, b in itertools.permutations(seen, 2) if related(relation, b.x - a.x, b.y - a.y)]


def true(scene: Scene, seen: Sequence[Seen], junk: int) -> bool:
    """Are exactly the asked objects there, in their relation, and nothing else?"""
    asked = Counter({(colour, shape): n for colour, shape, n in scene["objects"]})
    if junk or asked != Counter((s.colour, s.shape) for s in seen):
        return False
    first = tuple(scene["objects"][0][:2])
    return not scene["relation"] or any((a.colour, a.shape) == first for a, _ in stands(scene["relation"], seen))


def described(seen: Sequence[Seen], junk: int) -> list[Scene]:
    """Every scene of the grammar that is true of a picture."""
    things = [[*thing, n] for thing, n in Counter((s.colour, s.shape) for s in seen).items()]
    if len(things) > 2 or any(n > len(NUMBERS) for *_, n in things):
        return []
    relations = (None, *RELATIONS) if len(things) == 2 else (None,)
    every = [
        {"objects": list(order), "relation": relation}
        for order in itertools.permutations(things)
        for relation in relations
    ]
    return [scene for scene in every if text(scene) in split_of() and true(scene, seen, junk)]


def altered(scene: Scene) -> dict[str, list[Scene]]:
    """The scenes of the grammar that differ from one in a single attribute, by the attribute."""
    objects, relation = scene["objects"], scene["relation"]
    changed: dict[str, list[Scene]] = {name: [] for name in ("colour", "shape", "count", "relation", "order")}
    for i, (colour, shape, n) in enumerate(objects):
        swaps = {
            "colour": [[other, shape, n] for other in COLOURS if other != colour],
            "shape": [[colour, other, n] for other in SHAPES if other != shape],
            "count": [[colour, shape, other] for other in range(1, len(NUMBERS) + 1) if other != n],
        }
        for name, things in swaps.items():
            changed[name] += [{"objects": [*objects[:i], t, *objects[i + 1 :]], "relation": relation} for t in things]
    if relation:
        changed["relation"] = [{"objects": objects, "relation": other} for other in RELATIONS if other != relation]
    if len(objects) == 2:  # the counts stay where they are
        (*a, n), (*b, m) = objects
        changed["order"] = [{"objects": [[*b, n], [*a, m]], "relation": relation}]
    return {name: [s for s in some if text(s) in split_of()] for name, some in changed.items()}


def near(
    scene: Scene, seen: Sequence[Seen], junk: int, rng: np.random.Generator, count: int,
    splits: Collection[str] = SPLITS,
) -> list[Scene]:  # fmt: skip
    """Up to `count` false scenes one attribute away from a scene, the attributes in turn."""
    families = []
    for some in altered(scene).values():
        wrong = [s for s in some if split_of()[text(s)] in splits and not true(s, seen, junk)]
        families.append([wrong[i] for i in rng.permutation(len(wrong))])
    order = [families[i] for i in rng.permutation(len(families))]
    rounds = itertools.zip_longest(*order)
    return [scene for one in rounds for scene in one if scene is not None][:count]
