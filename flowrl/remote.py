"""A reward that lives behind a URL; see `flowrl.wire` for what is said and `flowrl.serve` for the other side."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl import wire
from flowrl.rewards import Media, Scope
from flowrl.types import Prompt
from flowrl.verdicts import Unavailable

if TYPE_CHECKING:
    from flowrl.http import Client

OF_THE_ITEMS = (400, 413, 422, 500)  # statuses with which a server may mean what it was asked, and not itself


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Asks `client`, one request a call, in which the ids are the rows; scores [N, C] float64.

    Unavailable: the server cannot be had. ValueError: it refuses these samples, or answers for others.
    """

    client: Client
    columns: tuple[str, ...] = ("score",)
    needs: Set[str] = frozenset()
    scope: Scope = "sample"

    @classmethod
    def connect(cls, url: str, *, token: str | None = None, timeout: float, patient: bool = True) -> Remote:
        """The scorer at `url`, which says itself what it is; waits until it is ready, `timeout` seconds at most.

        A server that knows neither GET /ready nor GET /info gives one score for each sample. A call takes `timeout`
        seconds at most, and one try if the client is not `patient`. ValueError: a package is missing, the server is
        not reached, or is none.
        """
        try:
            from flowrl.http import Client
        except ImportError as error:
            raise ValueError(f"{error}; a reward behind a url needs: pip install 'flowrl-posttrain[serve]'") from error
        client = Client(url, token=token, deadline=timeout, patient=patient)
        _if_known(client, "/ready", sys.maxsize)
        told = _if_known(client, "/info")
        return cls(client=client) if told is None else cls(client=client, **_description(client.url, told))

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        from flowrl.http import Unreachable

        group = 0 if self.scope == "group" else None
        pairs = zip(media.pil(), prompts, strict=True)
        items = [
            wire.Item(row, prompt.text, image, prompt.metadata, group) for row, (image, prompt) in enumerate(pairs)
        ]
        try:
            answer = self.client.post("/score", wire.encode_request(items))
        except Unreachable as error:
            if error.status in OF_THE_ITEMS:
                raise
            raise Unavailable(str(error)) from error
        return torch.tensor(wire.decode_scores(answer, range(len(items)), self.columns), dtype=torch.float64)


def _if_known(client: Client, path: str, attempts: int | None = None) -> dict[str, Any] | None:
    """What the server has at a path, None where it knows no such path."""
    from flowrl.http import Unreachable

    try:
        return client.get(path, attempts)
    except Unreachable as error:
        if error.status != 404:
            raise
        return None


def _description(url: str, told: dict[str, Any]) -> dict[str, Any]:
    match told:
        case {"version": 1, "columns": [_, *_] as columns, "needs": [*needs], "scope": "sample" | "group" as scope}:
            if all(isinstance(key, str) for key in [*columns, *needs]):
                return {"columns": tuple(columns), "needs": frozenset(needs), "scope": scope}
    raise ValueError(f"{url}/info is {wire.show(told)}, which describes no reward of version 1; see that it serves one")
