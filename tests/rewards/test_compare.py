"""Comparisons within a group, put to an oracle that knows how red a picture is and likes what it sees first."""

import logging
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowrl.rewards import Media, Reward
from flowrl.types import Prompt
from flowrl_rewards._judge import Asker
from flowrl_rewards.compare import Listwise, Pairwise, round_robin
from flowrl_rewards.vlm import LocalJudge
from flowrl_rewards.vlm_remote import RemoteJudge

REDS = [0.9, 0.1, 0.5, 0.3, 0.7]
FIRST = 0.8  # how much the oracle likes the first of two, in log-odds


def red(picture):
    return picture.getpixel((0, 0))[0] / 255


@dataclass
class Oracle(Asker):
    """log-odds of A = the difference in red + FIRST; writes down what `say` makes of the reds that it is shown."""

    say: object = None
    asked: list = field(default_factory=list)
    silent: frozenset = frozenset()  # pairs of reds, A before B, for which it gives none

    def weigh(self, asks, answers):
        assert [spellings[0] for spellings in answers] == ["A", "B"]
        self.asked += asks
        pairs = [tuple(red(picture) for picture in ask.pictures[-2:]) for ask in asks]
        odds = torch.tensor([math.nan if _key(p) in self.silent else p[0] - p[1] + FIRST for p in pairs])
        return torch.stack([odds, torch.zeros(len(odds))], 1)

    def write(self, asks, schema):
        (ask,) = asks
        self.asked += asks
        return [self.say([red(picture) for picture in ask.pictures])]

    def missing(self):
        return ["the oracle is not here"]


def _key(pair):
    return tuple(round(one, 1) for one in pair)


def group(reds=REDS, **metadata):
    values = torch.tensor(reds).mul(255).round().to(torch.uint8)
    images = torch.zeros(len(reds), 3, 2, 2, dtype=torch.uint8)
    images[:, 0] = values[:, None, None]
    return Media(images), [Prompt(7, "a kettle", metadata) for _ in reds]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def win(a, b):
    """The share of both orders that a wins against b."""
    a, b = round(a * 255) / 255, round(b * 255) / 255
    return (sigmoid(a - b + FIRST) + 1 - sigmoid(b - a + FIRST)) / 2


def ranking(reds):
    return f"[{', '.join(str(i + 1) for i in sorted(range(len(reds)), key=lambda i: -reds[i]))}]"


def marks(reds):
    return f'{{"list": [{", ".join(f"{5 * r:.6f}" for r in reds)}]}}'


# pairs


def test_a_win_rate_is_the_mean_over_opponents_and_both_orders():
    oracle = Oracle()
    scores = Pairwise(judge=oracle)(*group())
    expected = [sum(win(a, b) for b in REDS if b != a) / 4 for a in REDS]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert scores.mean().item() == pytest.approx(0.5, abs=1e-6)  # what one wins another loses, whatever is liked first
    assert len(oracle.asked) == 20


def test_a_picture_is_worth_one_half_against_its_copy():
    torch.testing.assert_close(Pairwise(judge=Oracle())(*group([0.4, 0.4])), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("n", range(1, 9))
def test_a_round_robin_meets_everyone_once_and_evenly(n):
    pairs = round_robin(n)
    assert {frozenset(pair) for pair in pairs} == {frozenset((i, j)) for i in range(n) for j in range(i)}
    assert len(pairs) == n * (n - 1) // 2
    if n > 1:
        assert {member for pair in pairs[: (n + 1) // 2] for member in pair} == set(range(n))
    for turns in range((n - 1) // 2 + 1):
        met = [member for pair in pairs[: turns * n] for member in pair]
        assert {met.count(member) for member in range(n)} == {2 * turns}


def test_at_most_so_many_pairs_are_asked():
    oracle = Oracle()
    scores = Pairwise(judge=oracle, pairs=5)(*group())
    assert len(oracle.asked) == 10
    met = {red: [] for red in REDS}
    for ask in oracle.asked:
        a, b = _key([red(picture) for picture in ask.pictures])
        met[a].append(b)
    assert all(len(set(others)) == 2 for others in met.values())
    expected = [sum(win(a, b) for b in set(met[a])) / 2 for a in REDS]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_pair_without_an_answer_counts_for_neither(caplog):
    with caplog.at_level(logging.WARNING):
        scores = Pairwise(judge=Oracle(silent=frozenset({(0.9, 0.1), (0.1, 0.3)})))(*group())
    assert "2 of 20 answers of the judge hold no verdict" in caplog.text
    against = {0.9: [0.5, 0.3, 0.7], 0.1: [0.5, 0.7], 0.5: [0.9, 0.1, 0.3, 0.7], 0.3: [0.9, 0.5, 0.7],
               0.7: [0.9, 0.1, 0.5, 0.3]}  # fmt: skip
    expected = [sum(win(a, b) for b in against[a]) / len(against[a]) for a in REDS]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_picture_without_an_opponent_has_no_verdict():
    assert Pairwise(judge=Oracle())(*group([0.4])).isnan().all()
    silent = frozenset({(0.4, 0.2)})
    assert Pairwise(judge=Oracle(silent=silent))(*group([0.4, 0.2])).isnan().all()


# lists


def test_a_list_of_scores_goes_back_to_its_pictures():
    scores = Listwise(judge=Oracle(marks))(*group())
    torch.testing.assert_close(scores, torch.tensor(REDS), rtol=0, atol=2e-3)


def test_a_ranking_becomes_places():
    scores = Listwise(judge=Oracle(ranking), method="ranking")(*group())
    torch.testing.assert_close(scores, torch.tensor([1, 0, 0.5, 0.25, 0.75]))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("scores", "[1, 2, 3]"),
        ("scores", "[1, 2, 3, 4, 6]"),
        ("scores", "1, 2, 3, 4, 5"),
        ("scores", None),
        ("ranking", "[1, 2, 3, 4, 4]"),
        ("ranking", "[0, 1, 2, 3, 4]"),
        ("ranking", "[1, 2, 3, 4]"),
        ("ranking", "[5, 4, 3, 2, 1] or [1, 2, 3, 4, 5]"),
        ("ranking", "5 > 4 > 3 > 2 > 1"),
    ],
)
def test_any_other_answer_costs_the_group_its_verdict(method, text, caplog):
    with caplog.at_level(logging.WARNING):
        assert Listwise(judge=Oracle(lambda reds: text), method=method)(*group()).isnan().all()
    assert caplog.text.count("1 of 1 answers of the judge hold no verdict") == 1


def test_one_picture_can_be_scored_but_not_ranked():
    torch.testing.assert_close(Listwise(judge=Oracle(marks))(*group([0.4])), torch.tensor([0.4]))
    assert Listwise(judge=Oracle(ranking), method="ranking")(*group([0.4])).isnan().all()


# both


def liar(reds):
    """Scores by the place in which a picture is shown."""
    return str(list(range(len(reds))))


@pytest.mark.parametrize(
    "scorer",
    [
        Pairwise(judge=Oracle()),
        Pairwise(judge=Oracle(), pairs=3),
        Listwise(judge=Oracle(marks)),
        Listwise(judge=Oracle(liar)),
        Listwise(judge=Oracle(ranking), method="ranking"),
    ],
    ids=["pairs", "some pairs", "scores", "scores by place", "ranking"],
)
@given(order=st.permutations(range(5)))
def test_permuting_a_group_permutes_its_scores(scorer, order):
    media, prompts = group()
    before = media.images.clone()
    straight = scorer(media, prompts)
    torch.testing.assert_close(scorer(media[order], prompts), straight[order], rtol=0, atol=1e-6)
    assert torch.equal(media.images, before)


@pytest.mark.parametrize("scorer", [Pairwise, Listwise])
def test_an_edit_is_compared_after_its_source(scorer):
    source = Image.new("RGB", (2, 2), (255, 0, 0))
    oracle = Oracle(lambda reds: marks(reds[1:]))
    media, prompts = group(source=source)
    edited = scorer(judge=oracle, source=True)
    assert edited.needs == {"source"} and isinstance(edited, Reward)
    plain = scorer(judge=Oracle(marks))(media, prompts)
    torch.testing.assert_close(edited(media, prompts), plain)
    assert all(ask.pictures[0] is source and source not in ask.pictures[1:] for ask in oracle.asked)
    assert all('"a kettle"' in ask.text and "source" in ask.text for ask in oracle.asked)


@pytest.mark.parametrize(
    ("scorer", "options", "said"),
    [
        (Pairwise, {}, "Answer A or B."),
        (Listwise, {}, 'Answer with {"list": [...]}, 5 scores from 0 to 5, in the order of the images.'),
        (Listwise, {"method": "ranking"}, 'Answer with {"list": [...]}, their 5 numbers, the best image first.'),
        (Pairwise, {"question": "{count} of the {era} for {prompt}"}, "5 of the 1920s for a kettle"),
    ],
    ids=["pairs", "scores", "ranking", "own"],
)
def test_the_question(scorer, options, said):
    oracle = Oracle(marks)
    scorer(judge=oracle, **options)(*group(era="1920s"))
    assert all(ask.text.endswith(said) and "a kettle" in ask.text for ask in oracle.asked)


def test_the_keys_of_the_question_are_needed_and_what_the_judge_lacks_is_told():
    assert Pairwise(judge=Oracle(), question="{count} {prompt} {instruction} {era}").needs == {"era"}
    assert Listwise(judge=Oracle()).missing() == ["the oracle is not here"]


def test_a_judge_is_local_unless_it_has_a_url():
    assert Pairwise(judge={"model": "me/judge", "rows": 2}).judge == LocalJudge(model="me/judge", rows=2)
    remote = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    assert Listwise(judge=remote).judge == RemoteJudge(**remote)
    assert Pairwise().judge == LocalJudge()


@pytest.mark.parametrize(
    ("scorer", "options", "message"),
    [
        (Pairwise, {"pairs": 0}, "pairs = 0 asks nothing"),
        (Pairwise, {"question": "{"}, "is no template"),
        (Pairwise, {"judge": {"model": "m", "rows": 0}}, "rows = 0 is no count"),
        (Listwise, {"method": "order"}, "method = 'order' is unknown; give 'scores' or 'ranking'"),
        (Listwise, {"low": 4, "high": 4}, "is no scale of digits"),
    ],
    ids=["pairs", "question", "judge", "method", "scale"],
)
def test_a_wrong_option_is_refused(scorer, options, message):
    with pytest.raises(ValueError) as caught:
        scorer(**options)
    assert message in str(caught.value)
