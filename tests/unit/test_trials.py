"""`flowrl rewards check` passes what is sound, and finds scorers that depend on order or company, or raise."""

import re

import pytest
import torch

from flowrl import trials
from flowrl.rewards import Gold
from flowrl.scorers import RewardSpec


class Sound:
    """The mean grey level; with an option it is wrong in one way."""

    columns, needs, scope = ("score",), frozenset(), "sample"

    def __init__(self, fault="", absent=()):
        self.fault, self.absent, self.calls = fault, absent, 0

    def __call__(self, media, prompts):
        scores = media.images.float().mean((1, 2, 3))
        self.calls += 1
        if self.fault == "place":
            scores = scores + torch.arange(len(scores))
        if self.fault == "company":
            scores = scores - scores.mean()
        if self.fault == "memory":
            scores = scores + self.calls
        if self.fault == "raises":
            raise RuntimeError("no such module")
        if self.fault == "no verdict alone":
            scores = scores if len(scores) > 1 else scores * torch.nan
        return scores

    def missing(self):
        return self.absent

    def gold(self):
        media, prompts = trials.noise()
        wanted = media.images.float().mean((1, 2, 3))[:, None] + (self.fault == "gold")
        return Gold(media, prompts, wanted - 0.1, wanted + 0.1)


@pytest.fixture
def tried(monkeypatch):
    def run(scorer, **options):
        monkeypatch.setattr("flowrl.scorers.REWARDS", {"one": scorer})
        return trials.trial(RewardSpec(name="one", options=options))

    return run


def test_a_sound_scorer_passes(tried):
    result = tried(Sound)
    assert result.tried and not result.failures and result.ms >= 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("place", "in the opposite order, its scores differ by"),
        ("company", "one by one, its scores differ by"),
        ("memory", "called again, its scores differ by"),
        ("no verdict alone", "one by one, it returned nan"),
        ("raises", "raised RuntimeError: no such module"),
        ("gold", "its gold sample 0 is .*, wanted"),
    ],
)
def test_what_is_unsound_is_found(tried, fault, said):
    failures = tried(Sound, fault=fault).failures
    assert any(re.search(said, failure) for failure in failures), failures


def test_what_lacks_something_is_not_tried(tried):
    result = tried(Sound, absent=["no weights"])
    assert not result.tried and not result.failures and result.note == "no weights"


def test_a_function_that_raises_fails(tried):
    def broken(images, prompts, metadata):
        raise ImportError("no mmcv")

    assert "raised ImportError: no mmcv" in tried(broken).failures[0]


def test_a_function_is_tried_on_noise(tried):
    def zero(images, prompts, metadata):
        return [0.0] * len(images)

    result = tried(zero)
    assert result.tried and result.note == "no gold case: tried on noise"
