"""Serve one reward over HTTP; see `flowrl.wire` for what is said and `flowrl.remote` for the other side.

    POST /score   GET /health (the process lives)   GET /ready (it can take a request)
    GET /info  -> {"version": 1, "name", "columns", "needs", "scope"}

An error is {"error": sentence}: 400 for a wrong request, 401 for a wrong token, 413 for one too large, 422 where the
scorer raises or returns no scores, 504 where it does not answer in time, and 503 while it still does not.

This file also runs by its path, in an interpreter that has neither flowrl nor torch:

    python flowrl/serve.py TARGET --port 0
"""

import os
import sys

if __name__ == "__main__":  # else http.py and types.py of this folder stand in for those of the standard library
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.dirname(os.path.realpath(__file__))]

import argparse
import importlib.util
import ipaddress
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from flowrl.served import Scorer


def app(
    scorer: "Scorer", token: str | None = None, *, max_items: int = 1024, max_mb: float = 512, timeout: float = 300.0
) -> Any:
    """The FastAPI application; a call of the scorer may take `timeout` seconds, a request have `max_mb` MiB."""
    from fastapi import Depends, FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    from flowrl.served import Refusal, Turns
    from flowrl.wire import VERSION

    turns = Turns(timeout)

    def authorise(request: Request) -> None:
        given = request.headers.get("Authorization", "")
        if token is not None and not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refusal(401, "the token is missing or wrong; send the header Authorization: Bearer TOKEN")

    async def read(request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_mb * 2**20:
                raise Refusal(413, f"the request has more than {max_mb:g} MiB; send fewer items at once")
        return bytes(body)

    def items(body: bytes) -> Any:
        try:
            asked = json.loads(body)
            match asked:
                case {"items": [*some]} if len(some) > max_items:
                    raise Refusal(413, f"the request has {len(some)} items, {max_items} are taken at once; send fewer")
            return scorer.items(asked)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, str(error)) from error

    async def refuse(_: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse({"error": str(refusal)}, refusal.status)

    api = FastAPI(openapi_url=None, exception_handlers={Refusal: refuse})
    private = [Depends(authorise)]

    @api.get("/health")
    async def health() -> Any:
        return {"status": "alive"}

    @api.get("/ready", dependencies=private)
    async def ready() -> Any:
        turns.refuse_while_late()
        return {"status": "ready"}

    @api.get("/info", dependencies=private)
    async def info() -> Any:
        told = {"name": scorer.name, "columns": scorer.columns, "needs": sorted(scorer.needs), "scope": scorer.scope}
        return {"version": VERSION, **told}

    @api.post("/score", dependencies=private)
    async def score(request: Request) -> Any:
        turns.refuse_while_late()
        asked = await run_in_threadpool(items, await read(request))
        return await turns.take(partial(scorer.answer, asked))

    return api


def serve(target: str, host: str = "127.0.0.1", port: int = 0, token: str | None = None, *,
          options: Mapping[str, Any] | None = None, timeout: float = 300.0) -> None:  # fmt: skip
    """Serve a reward until the process is ended. The one line on stdout is {"port": its port}, when it listens.

    ValueError: the reward cannot be loaded, a package is missing, the port is taken, or anybody could come in.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(f"host = {host} lets others in without a token; give one (--token-env), or take 127.0.0.1")
    with _stdout_kept() as stdout:
        try:
            import uvicorn

            from flowrl.served import find

            api = app(find(target, options), token, timeout=timeout)
        except ImportError as error:
            pip = f"{sys.executable} -m pip install 'flowrl-posttrain[serve]', or fastapi uvicorn pillow numpy"
            raise ValueError(f"{error}; a reward server needs: {pip}") from error
        listening = _listen(host, port)
        stdout.write(json.dumps({"port": listening.getsockname()[1]}) + "\n")
        stdout.flush()
        how = uvicorn.Config(
            api,
            log_level="warning",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=60,  # longer than any client's, so that none asks on a connection that is being closed
        )
        uvicorn.Server(how).run(sockets=[listening])


@contextmanager
def _stdout_kept() -> Iterator[TextIO]:
    """The real stdout; meanwhile all that is printed in this process, by C libraries too, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        try:
            yield real
        finally:
            sys.stdout.flush()
            os.dup2(real.fileno(), 1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"cannot listen on host = {host}, port = {port}: {error}; take another, or port 0") from error


def _end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(0)


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Serve one reward over HTTP.")
    parser.add_argument("target", help="path/file.py:function, package.module:function, or the name of a reward")
    parser.add_argument("--options", type=json.loads, default={}, help="its options, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="other than loopback needs a token")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a call may take")
    parser.add_argument("--token-env", help="the environment variable with the token to ask for")
    parser.add_argument("--attached", action="store_true", help="take the token from stdin, and end when stdin ends")
    asked = parser.parse_args()
    token = os.environ.get(asked.token_env) if asked.token_env else None
    if asked.token_env and not token:
        parser.error(f"--token-env {asked.token_env}: it is not set; export {asked.token_env}=...")
    if asked.attached:
        token = sys.stdin.readline().strip()
        Thread(target=_end_with_stdin, daemon=True).start()
    try:
        serve(asked.target, asked.host, asked.port, token, options=asked.options, timeout=asked.timeout)
    except ValueError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("flowrl", Path(__file__).with_name("__init__.py"))
    assert spec is not None and spec.loader is not None
    sys.modules["flowrl"] = importlib.util.module_from_spec(spec)  # this folder, whether it is installed here or not
    spec.loader.exec_module(sys.modules["flowrl"])
    sys.exit(main())
