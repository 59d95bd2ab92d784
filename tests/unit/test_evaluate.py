"""Comparisons by hand, intervals against the normal law, and probes of pictures whose numbers are known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from flowrl.bank import RewardBank
from flowrl.evaluate import ceiling, compare, interval, score
from flowrl.scorers import RewardSpec
from flowrl.types import Prompt
from flowrl.watch import PROBES, diversity
from flowrl.zoo import shapes

NAN = math.nan
SIDE = 16
RED, GREY, BROWN, BLACK, WHITE = (255, 0, 0), (90, 90, 90), (200, 100, 50), (0, 0, 0), (255, 255, 255)


def flat(colour):
    """[1, 3, SIDE, SIDE]"""
    return torch.tensor(colour, dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, SIDE, SIDE).contiguous()


def stripes(*colours):
    """Vertical stripes of equal width."""
    return torch.cat([flat(colour)[..., : SIDE // len(colours)] for colour in colours], -1)


def checkerboard(a, b):
    even = (torch.arange(SIDE)[:, None] + torch.arange(SIDE)) % 2 == 0
    return torch.where(even, flat(a), flat(b))


def ramp():
    return torch.arange(SIDE, dtype=torch.uint8).mul(10).expand(1, 3, SIDE, SIDE).contiguous()


@pytest.mark.parametrize("seed", range(3))
def test_interval_is_the_normal_one_of_a_mean(seed):
    values = np.random.default_rng(seed).normal(0.4, 0.2, 400)
    error = values.std() / 20
    low, high = interval(values)
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_interval_holds_the_true_mean_19_times_in_20():
    sets = np.random.default_rng(0).exponential(1.0, (400, 60))
    covered = [low <= 1.0 <= high for low, high in (interval(values, resamples=500) for values in sets)]
    assert 0.90 < np.mean(covered) < 0.98  # a skewed law and 60 values: a little less than 0.95


def test_interval_of_equal_values_is_a_point():
    assert interval(np.full(7, 0.25)) == (0.25, 0.25)


def test_compare_by_hand():
    row = compare(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert row == {"base": 0.25, "tuned": 0.75, "diff": 0.5, "ci95": [0.5, 0.5], "n": 2}


def test_compare_is_paired():
    base = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * 100
    low, high = compare(base, base + 0.5)["ci95"]
    assert high - low < 1e-4 and low == pytest.approx(0.5, abs=1e-4)
    shuffled = compare(base, base.flip(0) + 0.5)
    assert shuffled["diff"] == pytest.approx(0.5, abs=1e-4)
    assert shuffled["ci95"][1] - shuffled["ci95"][0] > 10


def test_the_interval_is_over_prompts_not_pictures():
    """Eight pictures of a prompt that agree are one piece of evidence, not eight."""
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(30, 1, generator=generator)
    once, often = (compare(torch.zeros(30, k), change.expand(30, k)) for k in (1, 8))
    assert once["ci95"] == pytest.approx(often["ci95"])


def test_what_has_no_verdict_is_left_out():
    base = torch.tensor([[0.0, NAN], [1.0, 1.0], [NAN, NAN]])
    tuned = torch.tensor([[1.0, 5.0], [2.0, NAN], [7.0, 7.0]])
    row = compare(base, tuned)
    assert (row["diff"], row["ci95"], row["n"]) == (1.0, [1.0, 1.0], 2)
    assert (row["base"], row["tuned"]) == (0.5, 1.5)  # of the two pairs that have a verdict


KNOWN = {
    "flat colour": (flat(BROWN), {"sharpness": 0, "colour_entropy": 0}),
    "red": (flat(RED), {"saturation": 1, "brightness": 1 / 3}),
    "grey": (flat(GREY), {"saturation": 0, "brightness": 90 / 255}),
    "brown": (flat(BROWN), {"saturation": 150 / 255, "brightness": 350 / 765}),
    "half red, half grey": (stripes(RED, GREY), {"saturation": 0.5, "colour_entropy": 1}),
    "four stripes": (stripes(RED, GREY, BROWN, WHITE), {"colour_entropy": 2}),
    "unequal stripes": (stripes(RED, RED, RED, WHITE), {"colour_entropy": 2 - 0.75 * math.log2(3)}),
    "two greys of one level": (stripes((0, 0, 0), (31, 31, 31)), {"colour_entropy": 0}),
    "two greys of two levels": (stripes((31, 31, 31), (32, 32, 32)), {"colour_entropy": 1}),
    # every pixel differs from its four neighbours by 255
    "checkerboard": (checkerboard(BLACK, WHITE), {"sharpness": 4 * 255, "colour_entropy": 1, "brightness": 0.5}),
    "pale checkerboard": (checkerboard((100, 100, 100), (103, 103, 103)), {"sharpness": 4 * 3}),
    "red and black checkerboard": (checkerboard(BLACK, RED), {"sharpness": 4 * 85, "saturation": 0.5}),
    # two of the SIDE - 2 inner columns see the edge
    "edge": (stripes(BLACK, WHITE), {"sharpness": 255 * math.sqrt(2 / (SIDE - 2))}),
    "ramp": (ramp(), {"sharpness": 0}),
}


@pytest.mark.parametrize(
    ("picture", "probe", "value"),
    [
        pytest.param(picture, probe, value, id=f"{probe} of {name}")
        for name, (picture, known) in KNOWN.items()
        for probe, value in known.items()
    ],
)
def test_probe(picture, probe, value):
    assert_close(PROBES[probe](picture), torch.tensor([float(value)]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_judges_each_picture_alone(probe):
    pictures = torch.cat([picture for picture, _ in KNOWN.values()])
    alone = torch.cat([PROBES[probe](picture[None]) for picture in pictures])
    assert_close(PROBES[probe](pictures), alone)


def test_diversity_of_flat_greys_is_their_mean_difference():
    greys = torch.cat([flat((level,) * 3) for level in (0, 10, 30)])
    same = flat(RED).expand(3, 3, SIDE, SIDE)
    assert_close(diversity(torch.stack([greys, same])), torch.tensor([(10 + 20 + 30) / 3, 0.0]))


def test_diversity_is_the_same_in_any_order():
    pictures = torch.randint(256, (2, 6, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert_close(diversity(pictures[:, order]), diversity(pictures))
    assert_close(diversity(pictures.flip(0)), diversity(pictures).flip(0))


def test_diversity_sees_places_not_edges():
    """Detail inside a 4x4 block does not count; moving a block does."""
    fine, coarse = checkerboard(BLACK, WHITE), stripes(BLACK, WHITE)
    assert diversity(torch.stack([fine[0], 255 - fine[0]])[None]).item() == 0
    assert diversity(torch.stack([coarse[0], coarse[0].flip(-1)])[None]).item() == pytest.approx(255)


@pytest.fixture
def greyness(tmp_path):
    """A bank whose reward is the mean grey level."""
    path = tmp_path / "grey.py"
    path.write_text(
        "import numpy as np\ndef grey(images, prompts, metadata):\n    return [np.asarray(i).mean() for i in images]\n"
    )
    return RewardBank([RewardSpec(name=f"{path}:grey")])


def test_score_keeps_prompts_and_seeds_apart(greyness):
    levels = torch.arange(6).mul(40).view(3, 2)
    pictures = levels.to(torch.uint8)[..., None, None, None].expand(3, 2, 3, SIDE, SIDE)
    scores = score(greyness, [Prompt(i, str(i)) for i in range(3)], pictures)
    assert_close(scores.rewards[greyness.columns[0]], levels.float())
    assert_close(scores.probes["brightness"], levels / 255)
    assert_close(scores.probes["diversity"], torch.full((3, 1), 40.0))


def test_one_seed_has_no_diversity(greyness):
    pictures = torch.zeros(2, 1, 3, SIDE, SIDE, dtype=torch.uint8)
    assert set(score(greyness, [Prompt(0, "a"), Prompt(1, "b")], pictures).probes) == set(PROBES)


@pytest.mark.parametrize(
    ("reconstruct", "strict"),
    [(lambda pictures: pictures, 1.0), (lambda pictures: torch.full_like(pictures, 200), 0.0)],
    ids=["perfect autoencoder", "blank autoencoder"],
)
def test_ceiling_is_the_score_of_true_scenes_through_the_autoencoder(reconstruct, strict):
    session = SimpleNamespace(adapter=SimpleNamespace(reconstruct=reconstruct))
    bank = RewardBank([RewardSpec(name="shapes_strict")])
    assert ceiling(session, shapes.prompts("heldout")[:6], bank)["shapes_strict"] == pytest.approx(strict, abs=0.05)


def test_prompts_without_scenes_have_no_ceiling(greyness):
    assert ceiling(SimpleNamespace(), [Prompt(0, "a photo of a cat")], greyness) == {}
