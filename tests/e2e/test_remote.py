"""Rewards behind a URL and in another interpreter give what they give in this process, and fail as they fail there."""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

from flowrl import http, serve
from flowrl.bank import RewardBank
from flowrl.http import Unreachable
from flowrl.isolated import Ended, Isolated
from flowrl.remote import Remote
from flowrl.rewards import Media
from flowrl.scorers import RewardSpec
from flowrl.served import Scorer, find
from flowrl.types import Prompt
from flowrl.verdicts import Unavailable
from flowrl.wire import Item, encode_request

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
GROUPS = torch.tensor([7, 2, 7, 2])
SOURCES = [Image.fromarray(np.full((2, 3, 3), 40 * i, np.uint8)) for i in range(4)]
PROMPTS = [Prompt(10 + i, f"prompt {i}", {"target": [i, {"x": 0.1}], "source": SOURCES[i]}) for i in range(4)]
MEDIA = Media(torch.randint(0, 256, (4, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))


def exact(items):
    """[n, 2] numbers that depend on each picture, prompt, target and source; no verdict on b for the target 2."""
    rows = []
    for item in items:
        a = np.asarray(item.image).astype(float) @ [0.1, 0.2, 0.3]
        b = len(item.prompt) / 7 + item.metadata["target"][0] + np.asarray(item.metadata["source"]).mean() / 3
        rows.append([float(a.mean()), float("nan") if item.metadata["target"][0] == 2 else b])
    return rows


EXACT = Scorer("exact", exact, ("a", "b"), frozenset({"target", "source"}))


def items(groups=(None,) * 4, media=MEDIA):
    rows = zip(media.pil(), PROMPTS, groups, strict=True)
    return [Item(i, p.text, image, p.metadata, group) for i, (image, p, group) in enumerate(rows)]


@contextmanager
def listening(api):
    """Its URL, while the application runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(api, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def at(monkeypatch):
    """The URL of a scorer."""
    monkeypatch.setattr(http, "FIRST", 0.005)
    entered = []

    def start(scorer, token=None, **limits):
        entered.append(listening(serve.app(scorer, token, **limits)))
        return entered[-1].__enter__()

    yield start
    for one in entered:
        one.__exit__(None, None, None)


def bank(url, **rules):
    return RewardBank([RewardSpec(name="far", url=url, **{"budget": 1.0, "retries": 0, **rules})])


# behind a URL


def test_scores_are_those_of_this_process_bit_for_bit(at):
    scorer = Remote.connect(at(EXACT), timeout=10)
    assert (scorer.columns, scorer.needs, scorer.scope) == (("a", "b"), {"target", "source"}, "sample")
    here = torch.tensor(exact(items()), dtype=torch.float64)
    assert torch.equal(scorer(MEDIA, PROMPTS).nan_to_num(-1), here.nan_to_num(-1))
    turned = [3, 1, 0, 2]
    assert torch.equal(scorer(MEDIA[turned], [PROMPTS[i] for i in turned]).nan_to_num(-1), here[turned].nan_to_num(-1))


def test_a_bank_takes_columns_and_missing_verdicts_from_far(at):
    judges = bank(at(EXACT), on_failure="drop_sample", batch=3)
    assert judges.columns == ("far/a", "far/b")
    verdicts = judges(MEDIA, PROMPTS, GROUPS)
    assert verdicts.failures == {"far": 1} and verdicts.scores[2].isnan().all()
    assert torch.equal(verdicts.scores[[0, 1, 3]], torch.tensor(exact(items())).float()[[0, 1, 3]])
    with pytest.raises(ValueError, match="needs the metadata key 'source'"):
        judges.check([Prompt(0, "p", {"target": [0]})])


def test_a_scorer_of_groups_gets_whole_groups(at):
    calls = []
    url = at(Scorer("groups", lambda members: calls.append([m.prompt[-1] for m in members]) or [0.5] * len(members),
                    scope="group"))  # fmt: skip
    bank(url)(MEDIA, PROMPTS, GROUPS)
    assert sorted(calls) == [["0", "2"], ["1", "3"]]
    calls.clear()
    answer = httpx.post(f"{url}/score", json=encode_request(items(groups=(5, 6, 6, 5)))).json()
    assert calls == [["0", "3"], ["1", "2"]] and {row["id"] for row in answer["scores"]} == {0, 1, 2, 3}
    refused = httpx.post(f"{url}/score", json=encode_request(items(groups=(5, None, None, 5))))
    assert refused.status_code == 400 and "the items [1, 2] have no `group`" in refused.json()["error"]


@pytest.mark.parametrize("token", [None, "other"], ids=["none", "another"])
def test_a_wrong_token_is_refused_at_once(at, token):
    url = at(EXACT, token="sesame")
    with pytest.raises(Unreachable, match="/ready refuses with 401, 'the token is missing or wrong"):
        Remote.connect(url, token=token, timeout=10)
    assert httpx.get(f"{url}/health").json() == {"status": "alive"}
    assert [httpx.get(url + path).status_code for path in ("/info", "/ready", "/docs")] == [401, 401, 404]
    assert httpx.post(f"{url}/score", content=b"{").status_code == 401


def test_the_right_token_comes_from_the_environment(at, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sesame")
    judges = bank(at(EXACT, token="sesame"), token_env="MY_TOKEN", on_failure="drop_sample")
    assert judges(MEDIA, PROMPTS, GROUPS).failures == {"far": 1}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "Expecting property name"),
        (b"[" * 100_000, 400, "recursion"),
        (b'{"version": 1, "items": [{"id": 0}]}', 400, "an item is {'id': 0}"),
        (json.dumps(encode_request(items())).encode(), 413, "has 4 items, 3 are taken at once"),
        (b" " * 2**20, 413, "more than 0.5 MiB"),
    ],
    ids=["no JSON", "too deep", "no item", "too many items", "too large"],
)
def test_a_wrong_request_is_refused_with_a_sentence(at, body, status, said):
    answer = httpx.post(at(EXACT, max_items=3, max_mb=0.5) + "/score", content=body)
    assert answer.status_code == status and said in answer.json()["error"]


@pytest.mark.parametrize("raises", [False, True], ids=["returns text", "raises"])
def test_a_scorer_that_fails_on_one_sample_costs_that_sample(at, raises):
    def picky(members):
        bad = [m.metadata["target"][0] == 2 for m in members]
        if raises and any(bad):
            raise ValueError("no target for 2")
        return ["bad" if b else 0.25 for b in bad]

    url = at(Scorer("picky", picky))
    said = "ValueError: no target for 2" if raises else r"returned \'bad\' .str. for item 2"
    with pytest.raises(Unreachable) as caught:
        Remote.connect(url, timeout=10)(MEDIA, PROMPTS)
    assert re.search(f"refuses with 422, .*{said}", str(caught.value))
    verdicts = bank(url, on_failure="drop_sample")(MEDIA, PROMPTS, GROUPS)
    assert verdicts.scores.flatten().nan_to_num(-1).tolist() == [0.25, 0.25, -1, 0.25]


def test_nothing_follows_a_call_that_hangs_until_it_is_back(at):
    release, calls = threading.Event(), []
    url = at(Scorer("hangs", lambda members: calls.append(1) or release.wait(10) and [0.5] * 4), timeout=0.2)
    request = encode_request(items())
    first, second = (httpx.post(f"{url}/score", json=request) for _ in range(2))
    assert (first.status_code, first.json()["error"]) == (
        504, "the scorer did not answer within 0.2 s; raise the server's timeout",
    )  # fmt: skip
    assert second.status_code == httpx.get(f"{url}/ready").status_code == 503 and len(calls) == 1
    assert "was given up" in second.json()["error"]
    release.set()
    assert torch.equal(Remote.connect(url, timeout=5)(MEDIA, PROMPTS), torch.full((4, 1), 0.5))


def test_a_server_that_hangs_is_asked_no_further(at):
    release = threading.Event()
    judges = bank(at(Scorer("hangs", lambda _: release.wait(10))), timeout=0.4, retries=3, on_failure="drop_sample")
    start = time.perf_counter()
    assert judges(MEDIA, PROMPTS, GROUPS).failures == {"far": 4}
    assert time.perf_counter() - start < 1.3  # one deadline, not four
    release.set()


def test_a_scorer_is_in_one_call_at_a_time(at):
    inside, most = [], []

    def slow(members):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return [0.5] * len(members)

    scorer = Remote.connect(at(Scorer("slow", slow)), timeout=10)
    threads = [threading.Thread(target=scorer, args=(MEDIA, PROMPTS)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


@pytest.mark.parametrize(
    "told",
    [{}, {"version": 2, "columns": ["a"], "needs": [], "scope": "sample"},
     {"version": 1, "columns": [], "needs": [], "scope": "sample"},
     {"version": 1, "columns": [1], "needs": [], "scope": "sample"},
     {"version": 1, "columns": ["a"], "needs": [], "scope": "all"}],
    ids=["nothing", "version 2", "no column", "a number", "scope"],
)  # fmt: skip
def test_a_server_that_describes_no_reward_is_refused(told):
    from fastapi import FastAPI

    api = FastAPI()
    api.get("/info")(lambda: told)
    with listening(api) as url, pytest.raises(ValueError, match="/info is .*describes no reward of version 1"):
        Remote.connect(url, timeout=5)


# what can be served


def test_a_name_gives_what_is_registered():
    scorer, plain = find("shapes_strict"), find("jpeg_size")
    assert (scorer.columns, scorer.needs, scorer.scope) == (("score",), {"scene"}, "sample")
    here = RewardBank([RewardSpec(name="jpeg_size")])(MEDIA, PROMPTS, GROUPS).scores
    scores = [row["score"] for row in plain.answer(items())["scores"]]
    assert torch.equal(torch.tensor(scores)[:, None], here)


def test_a_class_is_asked_as_in_a_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine:\n"
        "    columns, needs, scope = ('mean', 'id'), frozenset(), 'group'\n"
        "    def __call__(self, media, prompts):\n"
        "        assert torch.is_inference_mode_enabled()\n"
        "        lengths = torch.tensor([len(p.text) for p in prompts])\n"
        "        return torch.stack([media.images.float().mean((1, 2, 3)), lengths], 1)\n"
    )
    scorer = find(f"{tmp_path}/mine.py:Mine")
    assert (scorer.columns, scorer.scope) == (("mean", "id"), "group")
    scores = [row["score"] for row in scorer.answer(items(groups=(1,) * 4))["scores"]]
    assert [row["mean"] for row in scores] == MEDIA.images.float().mean((1, 2, 3)).tolist()
    assert [row["id"] for row in scores] == [8] * 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def score(images): ...", "cannot be asked: .*'prompts'"),
        ("class score: ...", "is no Reward"),
        ("class score:\n    columns, needs, scope = ('a',), (), 'sample'\n    def __call__(self, m, p): ...\n"
         "    def missing(self): return ['weights are missing: give path']", "weights are missing: give path"),
    ],
    ids=["another signature", "no reward", "without its weights"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(tmp_path, source, said):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ValueError, match=said):
        find(f"{tmp_path}/bad.py:score")


def test_only_this_machine_comes_in_without_a_token():
    with pytest.raises(ValueError, match="host = 0.0.0.0 lets others in without a token; give one"):
        serve.serve("jpeg_size", host="0.0.0.0")


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        with pytest.raises(ValueError, match=f"port = {port}: .*take another, or port 0"):
            serve.serve(f"{CASES}/rewards/ok_brightness.py:score", port=port)


# in another interpreter


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """An interpreter that has the packages of a server, but neither flowrl nor torch."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("torch", "flowrl"):
        (folder / f"{name}.py").write_text(f"raise ImportError('there is no {name} here')")
    python = folder / "python"
    path = f"{folder}:{sysconfig.get_path('purelib')}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def case(name):
    return f"{CASES}/rewards/{name}.py:score"


@pytest.fixture
def mine(tmp_path):
    """Write a scorer; its target."""

    def write(body):
        (tmp_path / "mine.py").write_text(f"import os, sys, time\ndef score(images, prompts, metadata):\n{body}")
        return f"{tmp_path}/mine.py:score"

    return write


def test_options_travel_and_none_is_no_verdict(foreign, tmp_path):
    (tmp_path / "scaled.py").write_text(
        "def score(images, prompts, metadata, scale=1.0):\n"
        "    return [None] + [scale * i for i in range(1, len(images))]\n"
    )
    scores = Isolated(foreign, f"{tmp_path}/scaled.py:score", {"scale": 0.5}, timeout=10)(MEDIA, PROMPTS)
    assert scores.flatten().nan_to_num(-1).tolist() == [-1, 0.5, 1, 1.5]
    with pytest.raises(ValueError, match="cannot be asked: .*unexpected keyword argument 'scales'"):
        find(f"{tmp_path}/scaled.py:score", {"scales": 1})


def test_a_plain_function_needs_neither_flowrl_nor_torch(foreign, mine):
    target = mine(
        "    assert 'torch' not in sys.modules\n"
        "    try: import torch\n"
        "    except ImportError: pass\n"
        "    else: raise AssertionError\n"
        "    return [i.getpixel((0, 0))[0] + m['source'].getpixel((0, 0))[0] / 7 for i, m in zip(images, metadata)]\n"
    )
    scorer = Isolated(foreign, target, timeout=10)
    here = [
        image.getpixel((0, 0))[0] + s.getpixel((0, 0))[0] / 7 for image, s in zip(MEDIA.pil(), SOURCES, strict=True)
    ]
    assert scorer(MEDIA, PROMPTS).flatten().tolist() == here


def test_megabytes_of_print_are_in_nobodys_way(foreign):
    scorer = Isolated(foreign, case("prints_megabytes"), timeout=10)
    for _ in range(2):
        assert scorer(MEDIA, PROMPTS).flatten().tolist() == pytest.approx([0.5, 0.51, 0.52, 0.53])


def test_a_process_that_always_ends_is_started_again_once(foreign, tmp_path):
    text = (CASES / "rewards" / "os_exit.py").read_text("utf-8")
    words = f"import os; os.write(2, b'my last words'); open({str(tmp_path / 'calls')!r}, 'a').write('x')"
    (tmp_path / "os_exit.py").write_text(text.replace("import os", words), "utf-8")
    scorer = Isolated(foreign, f"{tmp_path}/os_exit.py:score", timeout=10)
    with pytest.raises(Ended, match="^scorer process ended with status 3; its stderr ends with 'my last words'$"):
        scorer(MEDIA, PROMPTS)
    assert (tmp_path / "calls").read_text() == "xx"


def test_a_process_that_ended_once_costs_nothing(foreign, mine, tmp_path):
    flag = str(tmp_path / "flag")
    target = mine(f"    if not os.path.exists({flag!r}): open({flag!r}, 'w'); os._exit(9)\n    return [0.25] * 4\n")
    assert Isolated(foreign, target, timeout=10)(MEDIA, PROMPTS).flatten().tolist() == [0.25] * 4


def test_a_process_that_hangs_is_ended_and_the_next_call_has_another(foreign, monkeypatch):
    monkeypatch.setenv("CASE_HANG_S", "600")
    scorer = Isolated(foreign, case("hangs"), timeout=0.8)
    with pytest.raises(Unavailable, match="did not answer within 0.8 s and was ended; raise `timeout`"):
        scorer(MEDIA, PROMPTS)
    monkeypatch.setenv("CASE_HANG_S", "0")
    assert scorer(MEDIA, PROMPTS).flatten().tolist() == [0.5] * 4


def test_a_scorer_that_raises_keeps_its_process_and_its_words(foreign, mine):
    scorer = Isolated(foreign, mine("    raise KeyError(os.getpid())\n"), timeout=10)
    words = []
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"refuses with 422, 'KeyError: \d+'") as caught:
            scorer(MEDIA, PROMPTS)
        words.append(str(caught.value).split("'")[1])
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (case("import_fails"), "^python = .*cannot be imported: .*surely_not_installed_kettle_package"),
        (case("no_score_function"), "has no 'score'; it has: rate"),
        ("no_such_reward", "unknown reward 'no_such_reward'"),
    ],
    ids=["import fails", "no function", "no name"],
)
def test_what_cannot_be_loaded_there_is_refused_with_its_sentence(foreign, target, said):
    with pytest.raises(ValueError, match=said):
        Isolated(foreign, target, timeout=10)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/no/such/python", "^python = /no/such/python cannot be run: .*give the path of an interpreter"),
        ("/bin/echo", "^python = /bin/echo did not serve .*give the path of an interpreter"),
        (f"{sys.executable}x", "cannot be run"),
    ],
    ids=["no file", "another program", "misspelt"],
)
def test_what_is_no_interpreter_is_refused(python, said):
    with pytest.raises(ValueError, match=said):
        Isolated(python, case("ok_brightness"), timeout=10)


def test_missing_packages_are_named_with_the_line_that_installs_them(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(
        ValueError, match=r"No module named '\w+'; .*python\S* -m pip install 'flowrl-posttrain.serve.'"
    ):
        Isolated(str(python), case("ok_brightness"), timeout=10)


def test_the_process_ends_with_one_that_is_killed(foreign):
    parent = (
        "import os, signal, subprocess, sys\n"
        f"child = subprocess.Popen([{foreign!r}, {serve.__file__!r}, {case('ok_brightness')!r}, '--attached'],\n"
        "                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "child.stdin.write('sesame\\n'), child.stdin.flush()\n"
        "print(child.stdout.readline(), flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.Popen([sys.executable, "-S", "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    address = "127.0.0.1", json.loads(run.stdout.readline())["port"]
    socket.create_connection(address).close()
    run.communicate()
    end = time.monotonic() + 5
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < end:
            socket.create_connection(address).close()
            time.sleep(0.01)
