"""Yes/no questions about `shapes` pictures, half of them with the answer Yes.

match   Does this image match the caption "two red circles"?      exactly that, and nothing else
there   Is there a red circle?  Are there two red circles?        at least one; exactly two, whatever else there is
where   Is a red circle left of a blue square?                    some red circle, some blue square

A question asks about a scene of the grammar and belongs to the split of this scene.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.zoo import captions
from flowrl.zoo.shapes import RELATIONS, SPLITS, Scene, text
from flowrl.zoo.verifier import Seen

KINDS = ("match", "there", "where")


@dataclass(frozen=True)
class Question:
    kind: str
    scene: Scene

    @property
    def text(self) -> str:
        words = text(self.scene)
        if self.kind == "match":
            asked = f'Does this image match the caption "{words}"?'
        elif self.kind == "there":
            asked = f"{'Is' if self.scene['objects'][0][2] == 1 else 'Are'} there {words}?"
        else:
            asked = f"Is {words}?"
        return f"{asked} Answer Yes or No."

    def answer(self, seen: Sequence[Seen], junk: int) -> bool:
        things = [(s.colour, s.shape) for s in seen]
        (*first, n), *second = self.scene["objects"]
        if self.kind == "match":
            return captions.true(self.scene, seen, junk)
        if self.kind == "there":
            found = things.count(tuple(first))
            return found >= 1 if n == 1 else found == n
        pairs = captions.stands(self.scene["relation"], seen)
        return [*first, *second[0][:2]] in [[a.colour, a.shape, b.colour, b.shape] for a, b in pairs]


def true(kind: str, seen: Sequence[Seen], junk: int) -> list[Question]:
    """The questions of a kind to which a picture says Yes."""
    if kind == "match":
        return [Question(kind, scene) for scene in captions.described(seen, junk)]
    if kind == "there":
        counted = Counter((s.colour, s.shape) for s in seen)
        one = [{"objects": [[*thing, 1]], "relation": None} for thing in counted]
        many = [{"objects": [[*thing, n]], "relation": None} for thing, n in counted.items() if 1 < n < 5]
        return [Question(kind, scene) for scene in one + many]
    pairs = [(relation, pair) for relation in RELATIONS for pair in captions.stands(relation, seen)]
    asked = [
        {"objects": [[a.colour, a.shape, 1], [b.colour, b.shape, 1]], "relation": relation}
        for relation, (a, b) in pairs
    ]
    return [Question(kind, scene) for scene in asked if text(scene) in captions.split_of()]


def draw(
    kind: str, seen: Sequence[Seen], junk: int, rng: np.random.Generator, splits: Collection[str] = SPLITS
) -> tuple[Question, bool] | None:
    """A question of a kind and its answer, Yes or No by a coin; None where the picture gives no ground for one.

    No is the answer to a question one attribute away from one with the answer Yes.
    """
    yes = true(kind, seen, junk)
    if not yes:
        return None
    truth = yes[rng.integers(len(yes))]
    if rng.random() < 0.5:
        inside = [q for q in yes if captions.split_of()[text(q.scene)] in splits]
        return (inside[rng.integers(len(inside))], True) if inside else None
    families = [
        [q for q in (Question(kind, scene) for scene in some)
         if captions.split_of()[text(q.scene)] in splits and not q.answer(seen, junk)]
        for some in captions.altered(truth.scene).values()
    ]  # fmt: skip
    families = [some for some in families if some]
    if not families:
        return None
    some = families[rng.integers(len(families))]
    return some[rng.integers(len(some))], False
