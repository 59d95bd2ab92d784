"""JSON over HTTP to a server that may fail: bounded retries, a deadline, and one error that says what happened.

The wait before try k + 1 is u 2^(k - 1) / 2 seconds, u uniform in [0.5, 1], at most `LONGEST`, and at least what the
server asks for in Retry-After (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_before_delay

log = logging.getLogger(__name__)

FIRST, LONGEST = 0.5, 30.0  # seconds of a wait
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")  # no proxy
SHOWN = 200  # bytes or characters of an answer in a message


class Unreachable(ValueError):
    """A server gave no usable answer; `status` is that of its last one, None where there was none."""

    def __init__(self, told: str, status: int | None = None) -> None:
        super().__init__(told)
        self.status = status


class _Passing(Exception):
    """A failure that may pass; `after` are the seconds that the server asks to wait."""

    def __init__(self, told: str, status: int | None = None, after: float = 0.0) -> None:
        super().__init__(told)
        self.status, self.after = status, after


class Client:
    """Asks the server at `url`, whose paths are appended; may be shared by threads.

    `deadline` are the seconds of one call, retries included, `max_mb` what an answer may have. A `patient` client tries
    again: until the deadline where a connection fails or an answer breaks off, until `attempts` answers where they are
    429, 5xx or no JSON object. Any other status but 2xx is final. Proxies of the environment are used except for this
    machine.
    ValueError: url is no http address, or no header can hold the token.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadline: float,
        attempts: int = 6,
        patient: bool = True,
        max_mb: float = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        _check(url, token)
        self.url, self.deadline, self.attempts, self.max_mb = url.rstrip("/"), deadline, attempts, max_mb
        self.patient = patient
        bearer = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(headers={**bearer, **(headers or {})}, mounts=dict.fromkeys(LOOPBACK))
        self._random = random.Random()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object with which the server answers to one. Unreachable: it does not."""
        return self._ask("POST", path, json.dumps(body, allow_nan=False).encode(), self.attempts)

    def get(self, path: str, attempts: int | None = None) -> dict[str, Any]:
        """The JSON object at a path. Unreachable: there is none."""
        return self._ask("GET", path, None, self.attempts if attempts is None else attempts)

    def _ask(self, method: str, path: str, content: bytes | None, attempts: int) -> dict[str, Any]:
        answered, late = 0, stop_before_delay(self.deadline)

        def enough(state: RetryCallState) -> bool:
            nonlocal answered
            answered += _passing(state).status is not None
            return answered >= attempts or not self.patient or late(state)

        retrying = Retrying(
            stop=enough,
            wait=self._pause,
            retry=retry_if_exception_type(_Passing),
            before_sleep=partial(_log_wait, self.url + path),
            reraise=True,
        )
        start = time.monotonic()
        try:
            return retrying(self._once, method, self.url + path, content, start + self.deadline)
        except _Passing as error:
            tries, seconds = retrying.statistics["attempt_number"], time.monotonic() - start
            fix = "see that the server runs, or allow it more time" if error.status is None else "see what it logs"
            raise Unreachable(
                f"{self.url}{path} {error} ({tries} tries in {seconds:.1f} s of {self.deadline:g}); {fix}", error.status
            ) from error

    def _pause(self, state: RetryCallState) -> float:
        backoff = min(LONGEST, FIRST * 2.0 ** min(state.attempt_number - 1, 10)) * self._random.uniform(0.5, 1)
        return max(backoff, _passing(state).after)

    def _once(self, method: str, url: str, content: bytes | None, end: float) -> dict[str, Any]:
        left = max(end - time.monotonic(), 0.001)
        try:
            with self._http.stream(
                method, url, content=content, headers={"Content-Type": "application/json"}, timeout=left
            ) as answer:
                body = self._read(answer, end)
        except httpx.TimeoutException as error:
            raise _Passing("did not answer in time") from error
        except httpx.RequestError as error:
            raise _Passing(f"cannot be reached or breaks off: {error}") from error
        status = answer.status_code
        if status == 429 or status >= 500:
            raise _Passing(f"answers {status}, {_told(body)}", status, _seconds(answer.headers.get("Retry-After", "")))
        if not answer.is_success:
            raise Unreachable(f"{url} refuses with {status}, {_told(body)}; see to the url and its token", status)
        return _object(body, status)

    def _read(self, answer: httpx.Response, end: float) -> bytes:
        body = bytearray()
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > self.max_mb * 2**20:
                raise Unreachable(
                    f"{answer.url} sends more than {self.max_mb:g} MiB, which is no answer of a few numbers; "
                    "see that it is the right server",
                    answer.status_code,
                )
            if time.monotonic() > end:
                raise _Passing("was still sending at the deadline")
        return bytes(body)


def _check(url: str, token: str | None) -> None:
    try:
        known = httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host
    except httpx.InvalidURL:
        known = False
    if not known:
        raise ValueError(f"url = {url!r} is no address of a server; give one like http://127.0.0.1:8123")
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise ValueError(f"the token for {url} is empty or has characters that no header holds; set it again")


def _passing(state: RetryCallState) -> _Passing:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, _Passing)
    return failure


def _object(body: bytes, status: int) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Passing(f"answers what is not JSON: {body[:SHOWN]!r}", status) from error
    if not isinstance(answer, dict):
        raise _Passing(f"answers what is no JSON object: {body[:SHOWN]!r}", status)
    return answer


def _told(body: bytes) -> str:
    """The server's own sentence, escaped."""
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"error": str(text)} | {"error": {"message": str(text)}}:
                return repr(text[:SHOWN])
    return repr(body[:SHOWN])


def _seconds(retry_after: str) -> float:
    """Seconds from now of a Retry-After, which is a number or a date; 0 for anything else."""
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError, TypeError):  # TypeError: a date without a time zone
        return (parsedate_to_datetime(retry_after) - datetime.now(timezone.utc)).total_seconds()
    return 0.0


def _log_wait(url: str, state: RetryCallState) -> None:
    log.warning("%s %s; again in %.1f s", url, _passing(state), state.upcoming_sleep)
