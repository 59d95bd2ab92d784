"""A reward in a process of its own, in any interpreter: `flowrl.serve` there, a `Remote` here.

The process gets its token through stdin and ends when stdin ends, so with this process, however that ends.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import IO, Any

from torch import Tensor

from flowrl.remote import Remote
from flowrl.rewards import Media, Scope
from flowrl.types import Prompt
from flowrl.verdicts import Unavailable

START = 300.0  # seconds for an interpreter to load the scorer
SHOWN = 500  # last characters of stderr in a message


class Ended(ValueError):
    """The process of a scorer has ended."""


class Isolated:
    """The scorer `name` in the interpreter `python`, which needs fastapi, uvicorn, pillow and numpy, but no flowrl.

    A call takes `timeout` seconds at most. A process that has ended is started again, once a call; one that does not
    answer is ended. ValueError: `python` is no interpreter, or cannot load the scorer.
    """

    def __init__(self, python: str, name: str, options: Mapping[str, Any] | None = None, *, timeout: float) -> None:
        self._start = partial(_Worker, python, name, options or {}, timeout)
        self._worker = self._start()
        self._turn = Lock()
        remote = self._worker.remote
        self.columns, self.needs = remote.columns, remote.needs
        self.scope: Scope = remote.scope

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        """[N, C] float64. Unavailable: there was no answer in time. Ended: twice. ValueError: the scorer raised."""
        with self._turn:
            try:
                return self._worker(media, prompts)
            except Ended:
                self._worker = self._start()
                return self._worker(media, prompts)


class _Worker:
    """One process and its scorer."""

    def __init__(self, python: str, name: str, options: Mapping[str, Any], timeout: float) -> None:
        token = secrets.token_urlsafe()
        script = Path(__file__).with_name("serve.py")
        command = [python, str(script), name, "--attached", "--timeout", str(timeout), "--options", json.dumps(options)]
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        except OSError as error:
            raise ValueError(f"python = {python} cannot be run: {error}; give the path of an interpreter") from error
        weakref.finalize(self, _end, self._process)
        self._tail = _Tail(self._process.stderr)
        self._timeout = timeout
        port = self._port(python, name, token)
        self.remote = Remote.connect(f"http://127.0.0.1:{port}", token=token, timeout=timeout, patient=False)

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        if self._process.poll() is None:
            try:
                return self.remote(media, prompts)
            except Unavailable as error:
                self._see_why(error)
        raise Ended(f"scorer process ended with status {self._process.returncode}{self._tail.told()}")

    def _see_why(self, error: Unavailable) -> None:
        """Return if the process ends by itself; end one that hangs. Unavailable: it did."""
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            _end(self._process)
            raise Unavailable(
                f"scorer process did not answer within {self._timeout:g} s and was ended; raise `timeout` if it is "
                f"only slow{self._tail.told()}"
            ) from error

    def _port(self, python: str, name: str, token: str) -> int:
        """The port that the process says it listens on."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, and says no port
            stdin.write(token + "\n")
            stdin.flush()
        timer = Timer(START, self._process.kill)
        timer.start()
        line = stdout.readline()
        timer.cancel()
        match _parsed(line):
            case {"port": int(port)}:
                return port
            case {"error": str(sentence)}:
                raise ValueError(f"python = {python}: {sentence}")
        _end(self._process)
        raise ValueError(
            f"python = {python} did not serve {name!r} within {START:g} s; give the path of an interpreter"
            + self._tail.told()
        )


class _Tail:
    """The end of a stream, which is read all along, so that its writer never waits."""

    def __init__(self, stream: Any) -> None:
        self._text = ""
        self._thread = Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        while text := stream.read(8192):
            self._text = (self._text + text)[-SHOWN:]

    def told(self) -> str:
        self._thread.join(1)  # a process that has ended leaves the rest of it; its children may hold it open
        return f"; its stderr ends with {self._text!r}" if self._text else ""


def _parsed(line: str) -> Any:
    with suppress(ValueError):
        return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
