"""What is tried again and how long, what is final, and what the error says; the server follows a script."""

import json
import logging
import random
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer

import pytest

from flowrl import http
from flowrl.http import Client, Unreachable

OK = (200, b'{"a": [1, null]}')


class Scripted(BaseHTTPRequestHandler):
    """Answers a request with the next (status, body, headers) of the script, the last one again and again."""

    def do_GET(self):
        server, length = self.server, int(self.headers.get("Content-Length") or 0)
        server.seen.append((time.monotonic(), self.command, self.path, dict(self.headers), self.rfile.read(length)))
        step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        if callable(step):
            return step(self)
        status, body, *headers = step
        self.answer(status, {"Content-Length": len(body), **(headers[0] if headers else {})})
        self.wfile.write(body)

    do_POST = do_GET

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    """Start a server with a script; its `url` and the requests `seen` (time, method, path, headers, body)."""
    monkeypatch.setattr(http, "FIRST", 0.02)
    servers = []

    def start(*script, port=0):
        server = ThreadingHTTPServer(("127.0.0.1", port), Scripted)
        server.daemon_threads, server.script, server.seen = True, list(script), []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def waits(server):
    times = [one[0] for one in server.seen]
    return [b - a for a, b in zip(times, times[1:], strict=False)]


def test_what_is_sent_and_what_comes_back(serve):
    server = serve(OK)
    client = Client(server.url + "/base/", token="sesame", deadline=5, headers={"X-Mine": "1"})
    assert client.post("/path?q=1", {"b": "ü"}) == {"a": [1, None]} == client.get("/other")
    (_, method, path, headers, body), (_, *second, _, _) = server.seen
    assert (method, path, json.loads(body)) == ("POST", "/base/path?q=1", {"b": "ü"}) and second == [
        "GET",
        "/base/other",
    ]
    assert headers["Authorization"] == "Bearer sesame" and headers["X-Mine"] == "1"
    assert headers["Content-Type"] == "application/json"


def breaks_off(handler):
    handler.answer(200, {"Content-Length": 100})
    handler.wfile.write(OK[1])
    handler.close_connection = True


def hangs_up(handler):
    handler.close_connection = True


@pytest.mark.parametrize(
    "failure",
    [(500, b"no"), (503, b'{"error": "busy"}'), (429, b""), (200, b"}{"), (200, b"[1]"), (200, b'{"a": "\xff"}'),
     (200, b"[" * 100_000), breaks_off, hangs_up],
    ids=["500", "503", "429", "no JSON", "no object", "no UTF-8", "too deep", "half a body", "no answer"],
)  # fmt: skip
def test_what_may_pass_is_tried_again(serve, failure, caplog):
    server = serve(failure, failure, OK)
    with caplog.at_level(logging.WARNING, "flowrl.http"):
        assert Client(server.url, deadline=5).post("/p", {}) == {"a": [1, None]}
    assert len(server.seen) == 3 and len(caplog.records) == 2 and "again in" in caplog.text


@pytest.mark.parametrize("attempts", [1, 4])
def test_tries_are_bounded_and_their_waits_grow(serve, attempts):
    server = serve((500, b'{"error": {"message": "worker \\u001b[31m lost"}}'))
    with pytest.raises(Unreachable) as caught:
        Client(server.url, deadline=5, attempts=attempts).post("/score", {})
    assert caught.value.status == 500 and len(server.seen) == attempts
    message = str(caught.value)
    assert f"{server.url}/score answers 500, 'worker \\x1b[31m lost' ({attempts} tries in" in message
    for k, wait in enumerate(waits(server)):
        assert 0.5 * 0.02 * 2**k <= wait < 0.02 * 2**k + 0.2


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b'{"error": "no such model"}', "refuses with 404, 'no such model'"),
        (401, b"<html>\x00", r"refuses with 401, b'<html>\x00'"),
        (307, b"", "refuses with 307, b''"),
    ],
    ids=["404", "401", "redirect"],
)
def test_any_other_status_is_final(serve, status, body, said):
    server = serve((status, body, {"Location": "/elsewhere"}), OK)
    with pytest.raises(Unreachable) as caught:
        Client(server.url, deadline=5).get("/p")
    assert said in str(caught.value) and caught.value.status == status and len(server.seen) == 1


def date(**ahead):
    return format_datetime(datetime.now(timezone.utc) + timedelta(**ahead), usegmt=True)


@pytest.mark.parametrize(
    ("status", "value", "least", "most"),
    [
        (429, lambda: "0.4", 0.4, 1.2),
        (503, lambda: "0.4", 0.4, 1.2),
        (429, lambda: date(seconds=2), 0.9, 2.5),
        (429, lambda: date(hours=-1), 0, 0.6),
        (429, lambda: "-5", 0, 0.6),
        (429, lambda: "soon", 0, 0.6),
    ],
    ids=["seconds", "seconds of a 503", "date", "past date", "negative", "neither"],
)
def test_retry_after_is_waited_for(serve, status, value, least, most):
    server = serve(lambda handler: handler.answer(status, {"Content-Length": 0, "Retry-After": value()}), OK)
    Client(server.url, deadline=5).post("/p", {})
    (wait,) = waits(server)
    assert least <= wait < most


def test_no_wait_passes_the_deadline(serve):
    server = serve((429, b"", {"Retry-After": "30"}))
    start = time.monotonic()
    with pytest.raises(Unreachable, match=r"answers 429, b'' \(1 tries in 0\.\d s of 5\); see what it logs"):
        Client(server.url, deadline=5).post("/p", {})
    assert time.monotonic() - start < 1


def drips(handler):
    handler.answer(200, {"Content-Length": 100})
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda _: time.sleep(1.5), "did not answer in time"),
        (drips, "was still sending at the deadline"),
        ((500, b""), "answers 500, b''"),
    ],
    ids=["silent", "dripping", "failing"],
)
def test_the_deadline_is_of_all_tries(serve, step, said):
    server = serve(step)
    start = time.monotonic()
    with pytest.raises(Unreachable, match=rf"{said} \(.* of 0.4\); see"):
        Client(server.url, deadline=0.4, attempts=10**9).post("/p", {})
    assert time.monotonic() - start < 1


def test_reading_stops_at_the_limit(serve):
    sent = []

    def floods(handler):
        handler.answer(200, {"Content-Length": 64 * 2**20})
        for _ in range(64):
            handler.wfile.write(b" " * 2**20)
            sent.append(1)

    with pytest.raises(Unreachable, match="sends more than 0.5 MiB"):
        Client(serve(floods).url, deadline=5, max_mb=0.5).get("/p")
    time.sleep(0.05)
    assert len(sent) < 64


def test_a_server_that_is_not_there_is_named(serve):
    server = serve(OK)
    server.shutdown()
    server.server_close()
    with pytest.raises(
        Unreachable, match=rf"^{server.url}/p cannot be reached.*\(1 tries.*see that the server runs"
    ) as caught:
        Client(server.url, deadline=5, patient=False).get("/p")
    assert caught.value.status is None


def test_a_server_that_is_away_is_waited_for_until_the_deadline(serve, monkeypatch):
    monkeypatch.setattr(http, "LONGEST", 0.05)
    server = serve(OK)
    server.shutdown()
    server.server_close()
    client, start = Client(server.url, deadline=1, attempts=2), time.monotonic()
    with pytest.raises(Unreachable, match="cannot be reached"):
        client.get("/p")
    assert 0.9 < time.monotonic() - start < 1.5
    Timer(0.4, serve, [OK], {"port": server.server_address[1]}).start()
    assert client.get("/p") == {"a": [1, None]}


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://", "", "http://[::1", "host"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="^url = .* is no address of a server; give one like"):
        Client(url, deadline=1)


@pytest.mark.parametrize("token", ["", "sesamé", "two words", "line\n"])
def test_a_token_that_no_header_holds_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="the token for http://host is empty or has characters") as caught:
        Client("http://host", token=token, deadline=1)
    assert not token or token not in str(caught.value)


def test_no_proxy_stands_before_this_machine(serve, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert Client(serve(OK).url, deadline=2, attempts=1).get("/p") == {"a": [1, None]}


def test_jitter_leaves_the_global_state_alone(serve):
    state = random.getstate()
    Client(serve((500, b""), OK).url, deadline=5).get("/p")
    assert random.getstate() == state
