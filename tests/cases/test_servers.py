"""The reward server that misbehaves: what each of its modes gives behind a URL, by the rows in expect.json."""

import importlib.util
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from flowrl import http
from flowrl.bank import RewardBank
from flowrl.http import Client
from flowrl.png import png_base64
from flowrl.remote import Remote
from flowrl.rewards import Media
from flowrl.scorers import RewardSpec
from flowrl.session import start
from flowrl.train import train_step
from flowrl.types import Prompt
from flowrl.verdicts import RewardError, Unavailable
from tests.tiny import NFT, config, tiny_sd3

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
GROUPS = torch.tensor([0, 0, 1, 1])
PROMPTS = [Prompt(10 + i, f"prompt {i}", {"target": i}) for i in range(4)]
MEDIA = Media(torch.tensor([0, 51, 102, 255], dtype=torch.uint8)[:, None, None, None].expand(4, 3, 8, 8).contiguous())

RECOVERS = {  # mode: requests it takes, and the seconds between the first and the last at least
    "ok": (1, 0), "fail500": (3, 0.028), "ratelimit": (2, 0.95), "slow": (1, 0), "reordered": (1, 0),
    "drop": (2, 0.008),
}  # fmt: skip
FAILS = {  # mode: (what is said, requests it takes)
    "garbage": (r"answers what is not JSON: b'}{ <<not json>> [0-9a-f]{16}' \(6 tries", 6),
    "non_utf8": (r"answers what is not JSON: b'.*\\xff\\xfe\\xe9", 6),
    "wrong_length": (r"gave 3 scores for 4 items, none for the ids \[3\]", 1),
    "no_logprobs": (r"answered {'result': .*wanted {\"scores\"", 1),
    "error_in_200": (r"answered {'error': {'code': 503, 'message': 'model not loaded'}}", 1),
}
ELSEWHERE = {"nan", "huge", "close_after", "all_zero"}


@pytest.fixture(scope="module")
def faulty():
    spec = importlib.util.spec_from_file_location("faulty_server", CASES / "servers" / "faulty_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def at(faulty, monkeypatch):
    """The URL of a mode on a server of its own, with parameters; nothing waits longer than it has to."""
    monkeypatch.setattr(http, "FIRST", 0.02)
    servers = []

    def start(mode, **parameters):
        faulty.COUNT.clear(), faulty.LOG.clear()
        for name, value in parameters.items():
            monkeypatch.setenv(f"FAULTY_{name.upper()}", str(value))
        servers.append(faulty.listen(0, mode))
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    start.servers = servers
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def undisturbed(faulty):
    """[4] scores by the server's own definition."""
    texts = [png_base64(image) for image in MEDIA.pil()]
    scores = [faulty.true_score(prompt.text, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    return torch.tensor(scores, dtype=torch.float64)


def remote(url, timeout=10.0):
    return Remote.connect(url, timeout=timeout)


def bank(url, **rules):
    return RewardBank([RewardSpec(name="far", url=url, **{"budget": 1.0, "retries": 0, **rules})])


def test_every_mode_is_here(faulty):
    rows = json.loads((CASES / "expect.json").read_text("utf-8"))["files"]
    assert any(row["file"] == "servers/faulty_server.py" for row in rows)
    assert set(faulty.MODES) == set(RECOVERS) | set(FAILS) | ELSEWHERE


@pytest.mark.parametrize("mode", RECOVERS)
def test_a_server_that_recovers_gives_what_an_undisturbed_one_gives_bit_for_bit(faulty, at, undisturbed, mode):
    scores = remote(at(mode, seconds={"ratelimit": 1}.get(mode, 0.2)))(MEDIA, PROMPTS)
    assert torch.equal(scores[:, 0], undisturbed)
    requests, seconds = RECOVERS[mode]
    assert len(faulty.LOG) == requests and faulty.LOG[-1]["t"] - faulty.LOG[0]["t"] >= seconds


@pytest.mark.parametrize("mode", FAILS)
def test_a_server_that_does_not_recover_is_bounded_and_named(faulty, at, mode):
    said, requests = FAILS[mode]
    with pytest.raises((ValueError, Unavailable), match=said):
        remote(at(mode))(MEDIA, PROMPTS)
    assert len(faulty.LOG) == requests


def test_a_failure_reaches_the_policy_with_its_samples(at):
    url = at("error_in_200")
    with pytest.raises(RewardError, match=r"'far' raised ValueError: .*model not loaded.*, for sample 0 \(prompt 10\)"):
        bank(url)(MEDIA, PROMPTS, GROUPS)
    verdicts = bank(url, on_failure="drop_sample")(MEDIA, PROMPTS, GROUPS)
    assert verdicts.scores.isnan().all() and verdicts.failures == {"far": 4}


def test_a_slow_server_meets_its_deadline(faulty, at):
    judges = bank(at("slow", seconds=2), timeout=0.4, batch=1, retries=3)
    start = time.perf_counter()
    with pytest.raises(RewardError, match=r"'far' .*did not answer in time \(1 tries.*, for sample 0 \(prompt 10\)"):
        judges(MEDIA, PROMPTS, GROUPS)
    assert time.perf_counter() - start < 1.3 and len(faulty.LOG) == 1  # neither again nor further


def test_nan_costs_its_own_sample(at, undisturbed):
    url = at("nan")
    verdicts = bank(url, on_failure="drop_sample")(MEDIA, PROMPTS, GROUPS)
    assert verdicts.scores[:, 0].isnan().tolist() == [False, True, False, False]
    assert torch.equal(verdicts.scores[[0, 2, 3], 0], undisturbed[[0, 2, 3]].float())
    with pytest.raises(RewardError, match=r"'far' returned \[nan\] \(list\) for sample 1 \(prompt 11\)"):
        bank(url)(MEDIA, PROMPTS, GROUPS)


def test_an_answer_beyond_the_limit_is_not_read(at):
    with pytest.raises(Unavailable, match="sends more than 1 MiB"):
        Remote(client=Client(at("huge", mb=8), deadline=10, max_mb=1))(MEDIA, PROMPTS)


def test_scores_from_before_the_port_closed_are_kept(at, undisturbed):
    judges = bank(at("close_after", n=2), batch=1, on_failure="drop_sample", timeout=1)
    verdicts = judges(MEDIA, PROMPTS, GROUPS)
    assert torch.equal(verdicts.scores[:2, 0], undisturbed[:2].float())
    assert verdicts.scores[2:].isnan().all() and verdicts.failures == {"far": 2}


def test_equal_scores_are_flagged(at):
    verdicts = bank(at("all_zero"))(MEDIA, PROMPTS, GROUPS)
    assert verdicts.constant == ("far",) and verdicts.scores.flatten().tolist() == [0.0] * 4


def test_a_server_that_is_started_again_is_waited_for(faulty, at, monkeypatch, undisturbed):
    monkeypatch.setattr(http, "FIRST", 0.1)
    scorer = remote(at("ok"))
    before = scorer(MEDIA, PROMPTS)
    faulty.stop_listening(at.servers[0], again_after=0.3)
    with pytest.raises(ConnectionRefusedError):
        while True:
            socket.create_connection(at.servers[0].server_address).close()
            time.sleep(0.01)
    assert torch.equal(before, scorer(MEDIA, PROMPTS)) and torch.equal(before[:, 0], undisturbed)


def test_what_knows_no_info_gives_one_score_a_sample(at):
    scorer = remote(at("ok"))
    assert (scorer.columns, scorer.needs, scorer.scope) == (("score",), frozenset(), "sample")
    assert not math.isnan(scorer(MEDIA, PROMPTS)[0, 0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_sd3(tmp_path_factory.mktemp("tiny") / "sd3")


@pytest.mark.parametrize("mode", ["fail500", "ratelimit", "drop", "reordered"])
def test_a_run_that_recovers_is_the_undisturbed_one_bit_by_bit(at, tiny, tmp_path, mode):
    """Metrics, losses and weights, with a server that fails at first."""

    def trained(mode, **parameters):
        rewards = json.dumps([{"name": "judge", "url": at(mode, **parameters)}])
        s = start(config(tmp_path, tiny, f"rewards={rewards}", *NFT))
        rows = [train_step(s, step) for step in range(2)]
        kept = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
        return kept, s.policy.state()[0]["current"]

    (rows, weights), (calm, theirs) = trained(mode, n=1, seconds=0.1), trained("ok")
    assert rows == calm and calm[0]["reward/judge/std"] > 0
    assert all(torch.equal(value, theirs[name]) for name, value in weights.items())
