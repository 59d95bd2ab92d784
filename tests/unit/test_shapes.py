"""The embedded world: its splits, its grammar, and a verifier that true scenes satisfy and others do not."""

import itertools

import numpy as np
import pytest
import torch

from flowrl.zoo import shapes
from flowrl.zoo.verifier import judge, look, verify

BACKGROUND = 0.85


def true_scenes(n, seed, split="train"):
    rng = np.random.default_rng(seed)
    scenes = [shapes.draw_scene(rng, split) for _ in range(n)]
    return scenes, [shapes.picture(scene, rng) for scene in scenes]


def scores(pictures, scenes):
    return verify(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), scenes)


def test_splits_are_disjoint_and_complete():
    texts = {split: {shapes.text(s) for some in shapes.scenes(split).values() for s in some} for split in shapes.SPLITS}
    for a, b in itertools.combinations(shapes.SPLITS, 2):
        assert not texts[a] & texts[b]
    things = len(shapes.COLOURS) * len(shapes.SHAPES)
    pairs = things * (things - 1)
    # singles, counts of 2-4, "and" pairs, four relations, counted pairs of 2-3
    assert sum(map(len, texts.values())) == things + 3 * things + pairs + 4 * pairs + 2 * pairs


def test_swapped_pairs_share_a_split():
    train = {shapes.text(s) for s in shapes.scenes("train")["pair"]}
    assert all(" and ".join(reversed(text.split(" and "))) in train for text in train)


@pytest.mark.parametrize("split", shapes.SPLITS)
def test_prompts_carry_their_scene(split):
    prompts = shapes.prompts(split)
    assert len(prompts) >= 64
    assert [p.id for p in prompts] == list(range(len(prompts)))
    assert all(p.text == shapes.text(p.metadata["scene"]) for p in prompts)
    assert len({p.text for p in prompts}) == len(prompts)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="shapes/test.*shapes/heldout"):
        shapes.prompts("test")


@pytest.mark.parametrize("split", shapes.SPLITS)
def test_truth_is_strict(split):
    scenes, pictures = true_scenes(400, 1, split)
    partial, strict = scores(pictures, scenes)
    assert strict.mean() >= 0.98
    assert (partial[strict == 1] == 1).all()


def test_other_combinations_are_not_strict():
    scenes, pictures = true_scenes(500, 2)
    others = scenes[1:] + scenes[:1]
    wrong = [i for i in range(500) if sorted(map(str, others[i]["objects"])) != sorted(map(str, scenes[i]["objects"]))]
    _, strict = scores([pictures[i] for i in wrong], [others[i] for i in wrong])
    assert strict.mean() <= 0.05


def adversaries():
    """240 pictures that no prompt asks for: (what, picture)."""
    rng = np.random.default_rng(3)
    full = list(shapes.COLOURS.values())
    for _ in range(40):
        yield "noise", rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        yield "flat colour", np.tile(np.array(full[rng.integers(6)], np.uint8), (64, 64, 1))
        colour, shape = rng.choice(list(shapes.COLOURS)), rng.choice(shapes.SHAPES)
        tiles = [(colour, shape, x, y, 5.5) for x, y in itertools.product((8, 24, 40, 56), repeat=2)]
        yield "tiled", shapes.render(tiles, BACKGROUND)
        things = itertools.product(shapes.COLOURS, shapes.SHAPES)
        grid = itertools.product((8, 18, 28, 38, 48, 57), (10, 30, 50))
        yield "everything", shapes.render([(*t, *at, 4.8) for t, at in zip(things, grid, strict=True)], BACKGROUND)
        other = rng.choice([c for c in shapes.COLOURS if c != colour])
        dx = rng.uniform(10, 15)
        touching = [(colour, shape, 24, 32, 9), (other, rng.choice(shapes.SHAPES), 24 + dx, 32, 9)]
        yield "touching", shapes.render(touching, BACKGROUND)
        yield "speckle", np.where(rng.random((64, 64, 1)) < 0.3, np.array(full[0], np.uint8), np.uint8(216))


def test_adversaries_earn_nothing():
    pictures = [p for _, p in adversaries()]
    assert len(pictures) >= 200
    prompts = shapes.prompts("train")
    for scene in [p.metadata["scene"] for p in prompts[:20]]:
        partial, strict = scores(pictures, [scene] * len(pictures))
        assert strict.mean() <= 0.02
        assert partial.mean() <= 0.25


@pytest.mark.parametrize("seed", range(4))
def test_clutter_never_pays(seed):
    rng = np.random.default_rng(seed)
    scene = {"objects": [["red", "circle", 1]], "relation": None}
    objects = [("red", "circle", 12.0, 12.0, 8.0)]
    best = judge(shapes.render(objects, BACKGROUND), scene)
    assert best == (1.0, 1.0)
    last = best[0]
    for x, y in ((12, 36), (36, 12), (36, 36), (52, 52)):
        objects.append((rng.choice(list(shapes.COLOURS)), rng.choice(shapes.SHAPES), x, y, 7.0))
        partial, strict = judge(shapes.render(objects, BACKGROUND), scene)
        assert strict == 0
        assert partial < last
        last = partial


@pytest.mark.parametrize(
    ("objects", "relation", "partial"),
    [
        pytest.param([("red", "circle")], None, (1 / 2 * 1 / 2 + 1 / 2 + 1 / 2 + 1 / 2) / 4, id="one of two"),
        pytest.param([("red", "circle"), ("blue", "circle")], None, (1 + 1 / 2 + 1 + 1 / 2) / 4, id="wrong shape"),
        pytest.param([("red", "circle"), ("green", "square")], None, (1 + 1 + 1 / 2 + 1 / 2) / 4, id="wrong colour"),
        pytest.param([("red", "circle"), ("blue", "square")], "right of", (1 + 1 + 1 + 1 + 0) / 5, id="wrong relation"),
    ],
)
def test_partial_credit_by_hand(objects, relation, partial):
    scene = {"objects": [["red", "circle", 1], ["blue", "square", 1]], "relation": relation}
    places = [(16.0, 30.0, 8.0), (44.0, 34.0, 8.0)]
    picture = shapes.render([(*thing, *place) for thing, place in zip(objects, places, strict=False)], BACKGROUND)
    got, strict = judge(picture, scene)
    assert strict == 0
    # "one of two": the count credit 1 - 1/2 is halved again, since half of what is asked is not there
    assert got == pytest.approx(partial)


@pytest.mark.parametrize("relation", shapes.RELATIONS)
def test_relations_have_mirrors(relation):
    mirror = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[relation]
    for dx, dy in ((20, 3), (-20, 3), (3, 20), (3, -20), (4, 4), (15, 15)):
        assert shapes.related(relation, dx, dy) == shapes.related(mirror, -dx, -dy)


def test_objects_are_seen_where_they_are():
    seen, junk = look(shapes.render([("purple", "triangle", 20, 24, 9), ("yellow", "square", 46, 40, 10)], BACKGROUND))
    assert junk == 0
    found = {(s.colour, s.shape): (s.x, s.y) for s in seen}
    assert found["yellow", "square"] == pytest.approx((45.5, 39.5), abs=0.5)
    # the centroid of a triangle lies 1/3 of its height above its base
    assert found["purple", "triangle"] == pytest.approx((19.5, 23.5 + 3), abs=0.8)


def test_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"64x64.*32, 32"):
        verify(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), [{}])
