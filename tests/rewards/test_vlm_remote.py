"""The remote judge against the server that misbehaves on purpose, and against scripted answers."""

import importlib.util
import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.png import from_png_base64, png_base64
from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl.verdicts import Unavailable
from flowrl_rewards._judge import Ask
from flowrl_rewards.vlm_remote import RemoteJudge, RemoteVLM

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
N = 4


@pytest.fixture(scope="module")
def faulty():
    """The module of the server, listening."""
    spec = importlib.util.spec_from_file_location("faulty_server", CASES / "servers" / "faulty_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.listen(0, "ok")
    module.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield module
    server.shutdown()


def judge(faulty, mode, request, **options):
    """A judge that meets one fault, whose counters are those of one test."""
    key = abs(hash(request.node.name))
    return RemoteVLM(url=f"{faulty.address}/m/{mode}@{key}/v1", model="faulty", **{"deadline": 20, **options})


def samples(n=N):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 6, 5), generator=generator, dtype=torch.uint8)
    return Media(images), [Prompt(row, f"picture {row}") for row in range(n)]


def shown(row):
    """The question and the picture of a sample, as they reach the server."""
    media, _ = samples()
    text = f'Does this image match the caption "picture {row}"? Answer Yes or No.'
    return text, f"data:image/png;base64,{png_base64(media.pil()[row])}"


def truth(faulty):
    return torch.tensor([faulty.true_score(*shown(row)) for row in range(N)])


@pytest.mark.parametrize("mode", ["ok", "reordered", "fail500", "drop"])
def test_yes_no_is_what_an_undisturbed_server_says(faulty, mode, request):
    remote = judge(faulty, mode, request)
    torch.testing.assert_close(remote(*samples()), truth(faulty), rtol=0, atol=1e-6)


@pytest.mark.parametrize("high", [5, 9])
def test_digits_are_the_expectation_over_the_scale(faulty, high, request):
    question = "How sharp is {prompt}?"
    media, prompts = samples()
    expected = []
    for image, prompt in zip(media.pil(), prompts, strict=True):
        s = faulty.true_score(f"How sharp is {prompt.text}?", f"data:image/png;base64,{png_base64(image)}")
        weights = [math.exp(-((digit - 9 * s) ** 2)) for digit in range(high + 1)]
        expected.append(sum(d * w for d, w in enumerate(weights)) / sum(weights) / high)
    remote = judge(faulty, "reordered", request, method="digits", high=high, questions=[question])
    torch.testing.assert_close(remote(media, prompts), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_an_edit_is_shown_after_its_source(faulty, request):
    media, prompts = samples()
    source = Image.new("RGBA", (4, 4), (9, 8, 7, 255))
    edits = [Prompt(p.id, p.text, {"source": source}) for p in prompts]
    before = f"data:image/png;base64,{png_base64(source.convert('RGB'))}"
    texts = [f'yes or no: "{p.text}"?' for p in prompts]
    expected = [faulty.true_score(text, f"{before}|{shown(row)[1]}") for row, text in enumerate(texts)]
    remote = judge(faulty, "ok", request, questions=['yes or no: "{instruction}"?'], source=True)
    torch.testing.assert_close(remote(media, edits), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("no_logprobs", {}, "answers without the top_logprobs it was asked for; .* or method = 'text'"),
        ("wrong_length", {}, r"answers without a choice: \{.*'choices': \[\]"),
        ("error_in_200", {}, "answers without a choice: .*model not loaded"),
        ("garbage", {"deadline": 1.5}, "answers what is not JSON"),
        ("non_utf8", {"deadline": 1.5}, "answers what is not JSON"),
    ],
)
def test_a_server_without_an_answer_is_an_error_that_says_so(faulty, mode, options, said, request):
    with pytest.raises((ValueError, Unavailable), match=said):
        judge(faulty, mode, request, parallel=1, **options)(*samples(1))


def test_without_logprobs_the_written_answer_is_read_only_where_it_was_asked_for(faulty, request):
    rate = {"method": "text", "high": 9, "questions": ["How sharp is {prompt}?"]}
    likeliest = judge(faulty, "ok", request, **{**rate, "method": "digits"})(*samples()) * 9
    written = judge(faulty, "no_logprobs", request, **rate)(*samples()) * 9
    assert torch.equal(written, written.round())
    assert (written - likeliest).abs().max() < 0.51
    with pytest.raises(ValueError, match="top_logprobs"):
        judge(faulty, "no_logprobs", request, **{**rate, "method": "digits"})(*samples())


@pytest.mark.parametrize("method", ["yes_no", "digits", "text"])
def test_nan_is_no_verdict(faulty, method, request, caplog):
    assert judge(faulty, "nan", request, method=method)(*samples()).isnan().all()
    assert f"{N} of {N} answers of the judge hold no verdict" in caplog.text


def test_a_server_that_is_certain_of_0_gives_every_sample_the_same(faulty, request):
    rated = judge(faulty, "all_zero", request, method="digits", questions=["How sharp?"])(*samples())
    assert (rated < 0.1).all() and len(set(rated.tolist())) == 1  # the bank tells the user of a constant column


class Scripted:
    """A server that gives what `answer` says of a body."""

    def __init__(self, answer):
        self.answer, self.bodies = answer, []

    def post(self, path, body):
        assert path == "/chat/completions"
        self.bodies.append(json.loads(json.dumps(body)))
        return self.answer(body)


@pytest.fixture
def scripted(monkeypatch):
    def make(answer, **options):
        server = Scripted(answer)
        monkeypatch.setattr("flowrl.http.Client", lambda *args, **named: server)
        return server, RemoteVLM(url="http://127.0.0.1:1/v1", model="m", **options)

    return make


def listed(**logps):
    """An answer whose first token has these log-probabilities; _ stands for a space."""
    top = [{"token": token.replace("_", " "), "logprob": logp} for token, logp in logps.items()]
    return {"choices": [{"logprobs": {"content": [{"token": "x", "top_logprobs": top}]}}]}


def said(text, reason="stop"):
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("logps", "expected"),
    [
        ({"Yes": math.log(0.3), "No": math.log(0.1)}, 0.75),
        ({"No": math.log(0.2), "_yes": math.log(0.1), "Maybe": math.log(0.4), "YES": math.log(0.1)}, 0.5),
        ({"Yes": -0.1, "Sure": -3.0}, 1),
        ({"No": -0.1, "Nope": -3.0}, 0),
        ({"Perhaps": -0.1, "yesterday": -3.0}, math.nan),
    ],
    ids=["two", "spellings", "no is not listed", "yes is not listed", "neither"],
)
def test_the_spellings_of_an_answer_add_up(scripted, logps, expected):
    _, remote = scripted(lambda body: listed(**logps))
    torch.testing.assert_close(remote(*samples(1)), torch.tensor([float(expected)]), equal_nan=True)


def test_what_is_sent(scripted):
    server, remote = scripted(lambda body: listed(Yes=0.0, No=0.0), size=3, top_logprobs=7)
    media, prompts = samples(1)
    remote(media, prompts)
    (body,) = server.bodies
    (message,) = body.pop("messages")
    assert body == {"model": "m", "temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 7}
    picture, text = message["content"]
    assert message["role"] == "user" and text == {"type": "text", "text": shown(0)[0]}
    head, data = picture["image_url"]["url"].split(",")
    wanted = media.pil()[0].resize((3, 3), Image.Resampling.BILINEAR)
    assert head == "data:image/png;base64" and from_png_base64(data).tobytes() == wanted.tobytes()


def test_a_written_answer_is_held_to_its_schema_where_that_was_asked_for(scripted):
    server, remote = scripted(lambda body: said('{"score": 4}'), method="text", structured=True, max_tokens=99)
    assert remote(*samples(1)).tolist() == pytest.approx([0.8])
    (body,) = server.bodies
    assert body["max_tokens"] == 99 and "logprobs" not in body
    schema = body["response_format"]["json_schema"]["schema"]
    assert body["response_format"]["type"] == "json_schema" and schema["required"] == ["score"]
    assert schema["properties"] == {"score": {"type": "number", "minimum": 0, "maximum": 5}}
    server, remote = scripted(lambda body: said("4"), method="text")
    remote(*samples(1))
    assert "response_format" not in server.bodies[0]


@pytest.mark.parametrize("answer", [said("4", "length"), said("I like it"), said("4 or 5")])
def test_an_answer_that_is_cut_or_vague_is_no_verdict(scripted, answer):
    _, remote = scripted(lambda body: answer, method="text")
    assert remote(*samples(2)).isnan().all()


def test_an_answer_without_a_text_is_an_error(scripted):
    _, remote = scripted(lambda body: {"choices": [{"message": {"content": None}}]}, method="text")
    with pytest.raises(ValueError, match="answers without a text: .*; see that m is a chat model"):
        remote(*samples(1))


def test_answers_belong_to_their_samples_whichever_comes_first_and_so_many_are_asked_at_a_time(scripted):
    lock, inside, most = threading.Lock(), [], []

    def answer(body):
        row = int(body["messages"][0]["content"][-1]["text"].split()[-1])
        with lock:
            inside.append(row)
            most.append(len(inside))
        time.sleep(0.05 - 0.005 * row)
        with lock:
            inside.remove(row)
        return listed(Yes=math.log(0.1 + row / 10), No=math.log(0.9 - row / 10))

    _, remote = scripted(answer, parallel=3, questions=["{prompt}"])
    media, prompts = samples(8)
    torch.testing.assert_close(remote(media, prompts), torch.arange(8) / 10 + 0.1)
    assert 1 < max(most) <= 3


def test_after_an_answer_that_failed_no_more_are_asked_for(scripted):
    def answer(body):
        if "picture 1?" in body["messages"][0]["content"][-1]["text"]:
            raise ValueError("the server is gone")
        time.sleep(0.01)
        return listed(Yes=0.0)

    server, remote = scripted(answer, parallel=1, questions=["{prompt}?"])
    with pytest.raises(ValueError, match="the server is gone"):
        remote(*samples(60))
    assert len(server.bodies) < 60


def test_the_token_comes_from_the_environment(monkeypatch):
    given = {}
    monkeypatch.setattr("flowrl.http.Client", lambda url, **named: given.update(named, url=url) or Scripted(listed))
    remote = RemoteJudge(url="http://127.0.0.1:1/v1", model="m", token_env="JUDGE_TOKEN", deadline=7)
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    assert list(remote.missing()) == ["token_env = JUDGE_TOKEN is not set: export JUDGE_TOKEN=..."]
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    assert list(remote.missing()) == [] and "s3cret" not in repr(remote)
    with pytest.raises(TypeError):  # the scripted answer is none
        remote.write([Ask((), "?")], {})
    assert given == {"url": "http://127.0.0.1:1/v1", "token": "s3cret", "deadline": 7}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"url": "127.0.0.1:8000/v1"}, "url = '127.0.0.1:8000/v1' is no address"),
        ({"parallel": 0}, "parallel = 0 is too small"),
        ({"deadline": math.nan}, "deadline = nan is too small"),
        ({"size": -1}, "size = -1 is too small"),
        ({"top_logprobs": 0}, "top_logprobs = 0 is too small"),
        ({"max_tokens": 0}, "max_tokens = 0 is too small"),
        ({"low": 3, "high": 2}, "is no scale of digits"),
    ],
    ids=["url", "parallel", "deadline", "size", "top_logprobs", "max_tokens", "a question's"],
)
def test_a_wrong_option_is_refused(option, message):
    with pytest.raises(ValueError) as caught:
        RemoteVLM(**{"url": "http://127.0.0.1:1/v1", "model": "m", **option})
    assert message in str(caught.value)
