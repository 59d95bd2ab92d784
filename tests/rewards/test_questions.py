"""Templates, readers of answers, and what a questionnaire makes of them."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowrl.rewards import Media, Reward
from flowrl.types import Prompt
from flowrl_rewards import questions as q
from flowrl_rewards._judge import Questionnaire

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 4}', 4),
        ('```json\n{"reason": "sharp", "score": 3.5}\n```', 3.5),
        ('{"score":\n 0 }', 0),
        ('{"score": 4, "reason": "the score: 4 of 5"}', 4),
        ("It fits. <Score>2</Score>", 2),
        ("<score> 2.25 </score>", 2.25),
        ("Alignment Score: 3\nFinal Score: 4.5", 4.5),
        ("**Final Score: 4.**", NAN),
        ("**Final Score:** 4.", 4),
        ("**Final Score: 4**", 4),
        ("Final Score: 5.\n", 5),
        (" 3 \n", 3),
        ("1.0", 1),
        ('<Score>4</Score> Final Score: 4.0 {"score": 4}', 4),
    ],
)
def test_a_score_that_is_stated_is_read(text, value):
    assert q.number(text, 0, 5) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "good", "NaN", "four", "4/5", "4,5", "4.5.1", "４", "٤", "4½", "−1", "1e1", "inf", "4 5", "Score: 4",
        "6", "-1", "5.01", "9" * 400,
        '{"score": 4', '{"score": "4"}', '{"score": true}', '{"score": 4, "score": 5}', '{"score": 6}',
        '{"score": 4,5}', '{"score": 4/5}', '{“score”: 4}', '{"Score ": 4}',
        "<Score>4", "<Score>4/5</Score>", "<Score>4 5</Score>", "<Score>4</Score><Score>3</Score>", "<Score>٣</Score>",
        "<Score></Score>", "<Score>4</Score> <Score>?</Score>",
        "Final Score: 4,5", "Final Score: 4/5", "Final Score: 4.5.1", "Final Score: ４", "Final Score：4",
        "Final Score: 4 ... Final Score: 3", "Final Score: between 3 and 4", "Final Score: 4-5", "Note finale : 4",
        'Final Score: 4 {"score": 3}', 'Final Score: good {"score": 3}',
    ],
)  # fmt: skip
def test_what_is_no_plain_score_is_no_verdict(text):
    assert math.isnan(q.number(text, 0, 5))


@given(st.text(max_size=40))
def test_no_text_makes_a_score_outside_the_scale(text):
    for value in (q.number(text, 1, 5), q.number(f"<Score>{text}</Score>", 1, 5)):
        assert math.isnan(value) or 1 <= value <= 5


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[3, 1, 2]", [3, 1, 2]),
        ('Here: {"list": [0.5, 4, 2]}.', [0.5, 4, 2]),
        ("[1, 2] ... so [1, 2]", [1, 2]),
        ("[1, 2] or [2, 1]", []),
        ("[1, 2", []),
        ("[1; 2]", []),
        ("[１, 2]", []),
        ("1, 2, 3", []),
        ("", []),
    ],
)
def test_the_one_list_of_a_text(text, numbers):
    assert q.one_list(text) == numbers


@pytest.mark.parametrize(
    ("numbers", "values"),
    [
        ([2, 3, 1], [0, 1, 0.5]),
        ([1, 2, 3], [1, 0.5, 0]),
        ([1, 2], None), ([1, 2, 2], None), ([0, 1, 2], None), ([1, 2, 3, 4], None), ([1.0, 2.0, 3.0], None),
        ([True, 2, 3], None), (["1", "2", "3"], None), ([], None), ([1, 2, None], None),
    ],
)  # fmt: skip
def test_a_ranking_is_a_permutation_or_nothing(numbers, values):
    torch.testing.assert_close(q.places(numbers, 3), torch.tensor(values or [NAN] * 3).float(), equal_nan=True)


@pytest.mark.parametrize(
    ("numbers", "values"),
    [
        ([0, 2.5, 5], [0, 0.5, 1]),
        ([5, 5, 5], [1, 1, 1]),
        ([0, 1], None), ([0, 1, 2, 3], None), ([0, 1, 6], None), ([0, 1, -1], None), ([0, 1, "2"], None),
        ([0, 1, True], None), ([0, 1, None], None), ([0, 1, NAN], None), ([0, 1, INF], None), ([], None),
    ],
)  # fmt: skip
def test_a_list_of_scores_is_whole_or_nothing(numbers, values):
    torch.testing.assert_close(q.scores(numbers, 3, 0, 5), torch.tensor(values or [NAN] * 3).float(), equal_nan=True)


def test_weights_of_answers_become_probabilities_and_expectations():
    log = torch.tensor([[0.2, 0.6], [0.5, 0.0], [0.0, 0.5], [0.0, 0.0], [NAN, 0.5]]).log()
    torch.testing.assert_close(q.yes_no(log), torch.tensor([0.25, 1, 0, NAN, NAN]), equal_nan=True)
    log = torch.tensor([[0.1, 0.0, 0.3], [0.0, 0.2, 0.0], [0.0, 0.0, 0.0]]).log()
    torch.testing.assert_close(q.digits(log, 1), torch.tensor([2.5, 2, NAN]), equal_nan=True)


def test_the_squash_is_the_published_one():
    score = torch.tensor([0.0, 2.5, 5.0])
    expected = [1 / (1 + math.exp(5)), 0.5, 1 / (1 + math.exp(-5))]
    torch.testing.assert_close(q.squashed(score), torch.tensor(expected))


@pytest.mark.parametrize(
    ("text", "names"),
    [("Is it {prompt}?", {"prompt"}), ("{place} {{x}} {place} {era}", {"place", "era"}), ("Is it sharp?", set())],
)
def test_the_names_of_a_template(text, names):
    assert q.placeholders(text) == names


@pytest.mark.parametrize("text", ['{"score": 3}', "{prompt", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}"])
def test_what_is_no_template_is_refused_with_the_way_out(text):
    with pytest.raises(ValueError, match=r"write .*\{\{ and \}\} for braces"):
        q.Question(text)


def test_a_template_takes_text_and_metadata_literally():
    prompt = Prompt(0, "a {brace} %s {0}", {"era": 1920, "prompt": "another"})
    assert q.filled("{prompt}|{instruction}|{era}|{{x}}", prompt) == f"{prompt.text}|{prompt.text}|1920|{{x}}"


# a questionnaire, asked of an oracle that answers by the colour of a picture


class Oracle(Questionnaire):
    """p(yes) = red / 255, the digit red / 51, the text of `said` or the digit in JSON."""

    seen = ()

    def weigh(self, asks, answers):
        red = torch.tensor([ask.pictures[-1].getpixel((0, 0))[0] for ask in asks]) / 255
        type(self).seen = asks
        if len(answers) == 2:
            return torch.stack([red, 1 - red], 1).log()
        return -1e4 * (torch.arange(self.low, self.high + 1) - 5 * red[:, None]).abs()

    def write(self, asks, schema):
        assert schema["properties"]["score"]["maximum"] == self.high
        digits = [ask.pictures[-1].getpixel((0, 0))[0] // 51 for ask in asks]
        said = [f'{{"score": {digit}}}' for digit in digits]
        vague = {0: None, 1: "no idea"}
        return [vague.get(d, s) if "vague" in a.text else s for a, d, s in zip(asks, digits, said, strict=True)]

    def missing(self):
        return ()


def batch(n=6):
    red = torch.arange(n).mul(51).to(torch.uint8)
    images = torch.zeros(n, 3, 2, 2, dtype=torch.uint8)
    images[:, 0] = red[:, None, None]
    source = Image.new("RGB", (3, 3), "white")
    return Media(images), [Prompt(i, f"thing {i}", {"era": i, "source": source}) for i in range(n)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ({"questions": [{"text": "Is it wrong?", "positive": "no"}]}, [1, 0.8, 0.6, 0.4, 0.2, 0]),
        (
            {"questions": ["Is it {era}?", {"text": "Is it wrong?", "positive": "no", "weight": 3}]},
            [0.75, 0.65, 0.55, 0.45, 0.35, 0.25],
        ),
        ({"method": "digits"}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ({"method": "digits", "low": 1, "high": 5}, [0.2, 0.2, 0.4, 0.6, 0.8, 1]),
        ({"method": "text"}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ({"method": "text", "squash": True}, [1 / (1 + math.exp(5 - 2 * s)) for s in range(6)]),
        ({"method": "text", "questions": ["clear", "vague"]}, [NAN, NAN, 0.4, 0.6, 0.8, 1]),
    ],
    ids=["yes", "no", "two questions", "digits", "digits from 1", "text", "squash", "unread"],
)
def test_a_questionnaire_is_the_weighted_mean_of_its_answers(options, expected):
    asked = Oracle(**options)
    assert isinstance(asked, Reward)
    torch.testing.assert_close(asked(*batch()), torch.tensor(expected).float(), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_answers_without_a_verdict_are_counted_in_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        Oracle(method="text", questions=["vague"])(*batch())
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 6 answers of the judge hold no verdict, such as None"
    ]


def test_each_question_is_put_with_its_own_prompt_and_pictures():
    media, prompts = batch(2)
    Oracle(questions=["Is it {era}?", "Is it {prompt}?"], source=True)(media, prompts)
    assert [ask.text for ask in Oracle.seen] == ["Is it 0?", "Is it 1?", "Is it thing 0?", "Is it thing 1?"]
    for ask, row in zip(Oracle.seen, [0, 1, 0, 1], strict=True):
        source, result = ask.pictures
        assert source is prompts[row].metadata["source"] and result.getpixel((0, 0)) == (51 * row, 0, 0)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"source": True}, {"source"}),
        ({"questions": ["{prompt} {instruction} {era}", "{place}"]}, {"era", "place"}),
        ({"questions": ["{era}"], "source": True}, {"era", "source"}),
    ],
)
def test_the_keys_of_the_questions_are_needed(options, needs):
    assert Oracle(**options).needs == needs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 5, "high": 5}, "low = 5, high = 5 is no scale"),
        ({"high": 10}, "low = 0, high = 10 is no scale"),
        ({"method": "digit"}, "method = 'digit' is unknown; give 'yes_no', 'digits' or 'text'"),
        ({"squash": True}, "squash = True is for scores"),
        ({"questions": "Is it?"}, "questions = 'Is it?' is one text; give a list"),
        ({"questions": [{"text": "Is it?", "weight": 0}]}, "has the weight 0; give a positive number"),
        ({"questions": [{"text": "Is it?", "weight": NAN}]}, "has the weight nan; give a positive number"),
        ({"questions": [{"text": "Is it?", "positive": "No"}]}, "has positive = 'No'; give 'yes' or 'no'"),
        ({"questions": [{"text": "?", "positive": "no"}], "method": "digits"}, "positive = 'no' is for method = 'yes_"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError) as caught:
        Oracle(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("source", [False, True], ids=["picture", "edit"])
@pytest.mark.parametrize("method", ["yes_no", "digits", "text"])
def test_the_usual_question_shows_the_text_and_the_form_of_the_answer(method, source):
    (question,) = Oracle(method=method, source=source, low=1, high=4).questions
    text = q.filled(question.text, Prompt(0, "a kettle"))
    assert '"a kettle"' in text
    assert {"yes_no": "Yes or No", "digits": "one digit from 1 to 4", "text": '{"score": s}'}[method] in text
