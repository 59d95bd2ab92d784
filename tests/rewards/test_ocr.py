"""OCR: which text is wanted, how near what was read is to it, and when there is no verdict."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.rewards import Media
from flowrl.scorers import RewardSpec, off_gold
from flowrl.types import Prompt
from flowrl_rewards.ocr import OCR, levenshtein, target_of

words = st.text("ab c", max_size=7)


class Stub:
    """Reads by the grey level of a picture; raises at 0."""

    def __init__(self, lines):
        self.lines = lines

    def __call__(self, picture):
        level = picture.getpixel((0, 0))[0]
        if level == 0:
            raise RuntimeError("cannot read black")
        return self.lines[level - 1]


def score(lines, prompts, **options):
    """Of one picture for each list of lines; None = one that cannot be read."""
    levels = torch.tensor([0 if found is None else i + 1 for i, found in enumerate(lines)], dtype=torch.uint8)
    media = Media(levels[:, None, None, None].expand(-1, 3, 4, 4).contiguous())
    return OCR(recogniser=Stub(lines), **options)(media, prompts)


def one(read, prompt, **options):
    return score([[(read, 1.0)]], [prompt], **options).item()


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        (Prompt(0, 'a sign "Blue Lantern" and "no"'), "Blue Lantern"),
        (Prompt(0, "a sign “Blue Lantern” and “no”"), "Blue Lantern"),
        (Prompt(0, "ein Schild „Blue Lantern“ und „no“"), "Blue Lantern"),
        (Prompt(0, "ein Schild „Blue Lantern” und „no”"), "Blue Lantern"),
        (Prompt(0, "une pancarte « Blue Lantern »"), " Blue Lantern "),
        (Prompt(0, "it's “the 7\" disc” in 'x'"), 'the 7" disc'),
        (Prompt(0, 'no "x"', {"target": "Blue Lantern"}), "Blue Lantern"),
        (Prompt(0, 'an empty "" and "x"'), ""),
        (Prompt(0, 'a 7" disc'), ""),
        (Prompt(0, "a sign"), ""),
    ],
    ids=["straight", "curly", "low-high", "low-curly", "guillemets", "inch inside", "metadata", "empty", "one", "none"],
)
def test_the_target_is_the_metadata_or_the_first_quotation(prompt, target):
    assert target_of(prompt) == target


@pytest.mark.parametrize(
    ("target", "read", "within", "alone"),
    [
        ("Blue Lantern", "BLUE lantern", 1, 1),
        ("  spaced  out ", "spa\tced\nout", 1, 1),
        ("lantern", "see lanterns now", 1, 0),
        ("lantern", "lanterns", 1, 6 / 7),
        ("kitten", "sitting", 0.5, 0.5),
        ("abcd", "abd", 0.75, 0.75),
        ("a", "zzzzzz", 0, 0),
        ("ÉTÉ", "été", 1, 1),
    ],
    ids=["case", "white space", "inside", "one more", "edits", "one less", "capped", "accents"],
)
def test_the_score_is_the_share_of_the_target_that_stands(target, read, within, alone):
    prompt = Prompt(0, "", {"target": target})
    assert one(read, prompt) == pytest.approx(within)
    assert one(read, prompt, substring=False) == pytest.approx(alone)


def test_nothing_read_is_a_score_and_no_verdict_is_none(caplog):
    prompts = [Prompt(i, text) for i, text in enumerate(['"ab"', '"ab"', "no target", '" "', '"ab"'])]
    lines = [[("ab", 1.0)], None, [("ab", 1.0)], [("ab", 1.0)], []]
    scores = score(lines, prompts)
    assert scores.isnan().tolist() == [False, True, True, True, False]
    assert scores[0] == 1 and scores[4] == 0
    assert "cannot read black" in caplog.text and "prompt 2 has no text for ocr" in caplog.text


@pytest.mark.parametrize(("least", "expected"), [(0.0, 1.0), (0.5, 0.5), (0.6, 0.5), (0.9, 0.0)])
def test_lines_below_the_confidence_are_not_read(least, expected):
    lines = [[("ab", 0.6), ("cd", 0.4)]]
    assert score(lines, [Prompt(0, '"abcd"')], min_confidence=least).item() == expected


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_a_confidence_is_between_0_and_1(value):
    with pytest.raises(ValueError, match=r"min_confidence is .*; give a number in \[0, 1\]"):
        OCR(min_confidence=value)


def test_a_recogniser_is_no_option_of_a_config():
    with pytest.raises(ValueError, match="recogniser is 'paddle'; leave it out"):
        OCR(recogniser="paddle")


def test_scores_follow_their_pictures(steady):
    lines = [[(text, 1.0)] for text in ("ab", "b", "", "abc")]
    grey = torch.arange(1, 5, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 4, 4).contiguous()
    steady(OCR(recogniser=Stub(lines)), Media(grey), [Prompt(i, '"ab"') for i in range(4)])


@given(words, words, words)
@settings(max_examples=150)
def test_levenshtein_is_the_metric_of_its_recursion(a, b, c):
    @cache
    def slow(i, j):
        if not i or not j:
            return i + j
        return min(slow(i - 1, j) + 1, slow(i, j - 1) + 1, slow(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    assert levenshtein(a, b) == levenshtein(b, a) == slow(len(a), len(b))
    assert (levenshtein(a, b) == 0) == (a == b)
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)


def test_the_usual_recogniser_reads_its_gold_case():
    assert not OCR().missing()
    assert not off_gold(RewardSpec(name="ocr"), OCR())


def test_an_absent_recogniser_is_told(monkeypatch):
    monkeypatch.setattr("flowrl_rewards._weights.find_spec", lambda name: None)
    (sentence,) = OCR().missing()
    assert "rapidocr_onnxruntime" in sentence and "[rewards]" in sentence
