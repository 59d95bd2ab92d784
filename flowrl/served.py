"""What a server serves: a scorer by its name, from items to the answer, in turns; torch only where it needs it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.daemon import background
from flowrl.registry import REWARDS
from flowrl.wire import Item, decode_request, encode_scores

if TYPE_CHECKING:
    from flowrl.rewards import Reward


@dataclass(frozen=True)
class Scorer:
    """What is served: `score` gets items, those of one group where the scope is "group", and returns their scores."""

    name: str
    score: Callable[[Sequence[Item]], Any]
    columns: tuple[str, ...] = ("score",)
    needs: Set[str] = frozenset()
    scope: str = "sample"

    def items(self, body: Any) -> list[Item]:
        """What a request asks for. ValueError: it is not what the format says, or an item lacks its group."""
        items = decode_request(body)
        lacking = [item.id for item in items if item.group is None]
        if self.scope == "group" and lacking:
            raise ValueError(f"{self.name} judges whole groups, and the items {lacking} have no `group`; give it")
        return items

    def answer(self, items: Sequence[Item]) -> dict[str, Any]:
        """The answer to a request. ValueError: the scorer returned something else than finite numbers and NaN."""
        calls: dict[int | None, list[Item]] = {}
        for item in items:
            calls.setdefault(item.group if self.scope == "group" else None, []).append(item)
        scores = []
        for call in calls.values():
            with _without_gradients():
                value = self.score(call)
            scores += encode_scores([item.id for item in call], value, self.columns)["scores"]
        return {"scores": scores}


class Refusal(Exception):
    """The status and the sentence of an error."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Turns:
    """One call at a time, in a thread that a deadline of `seconds` leaves behind; then none until that one is back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._late: Future[Any] | None = None

    def refuse_while_late(self) -> None:
        """Refusal: a call that was given up is not back."""
        if self._late is not None and not self._late.done():
            raise Refusal(503, "the scorer is still in a call that was given up; wait, or start the server again")

    async def take(self, call: Callable[[], Any]) -> Any:
        """The value of `call`. Refusal: it raises, or is not back in time."""
        async with self._lock:
            self.refuse_while_late()
            answer = background(call)
            done, _ = await asyncio.wait([asyncio.wrap_future(answer)], timeout=self._seconds)
            if not done:
                self._late = answer
                raise Refusal(504, f"the scorer did not answer within {self._seconds:g} s; raise the server's timeout")
        if error := answer.exception():
            raise Refusal(422, f"{type(error).__name__}: {error}") from error
        return answer.result()


def find(target: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """The scorer of path/file.py:function, package.module:function or, where there is torch, any name of a reward.

    ValueError: it cannot be loaded, is no scorer, or lacks a package or a file.
    """
    found = REWARDS[target]
    if inspect.isfunction(found):
        try:
            inspect.signature(found).bind(images=[], prompts=[], metadata=[], **(options or {}))
        except TypeError as error:
            raise ValueError(f"{target} cannot be asked: {error}; it gets images, prompts, metadata") from error
        return Scorer(target, partial(_ask_function, partial(found, **(options or {}))))
    try:
        from flowrl.rewards import Provisioned
        from flowrl.scorers import RewardSpec, build
    except ImportError as error:
        raise ValueError(f"{target} is no plain function, and {sys.executable} cannot run others: {error}") from error
    scorer = build(RewardSpec(name=target, options=dict(options or {})))
    if isinstance(scorer, Provisioned) and (lacking := "; ".join(scorer.missing())):
        raise ValueError(f"reward {target!r}: {lacking}")
    return Scorer(target, partial(_ask_reward, scorer), scorer.columns, scorer.needs, scorer.scope)


def _ask_function(function: Callable[..., Any], items: Sequence[Item]) -> Any:
    images, prompts = [item.image for item in items], [item.prompt for item in items]
    return function(images=images, prompts=prompts, metadata=[dict(item.metadata) for item in items])


def _ask_reward(scorer: Reward, items: Sequence[Item]) -> Any:
    import torch

    from flowrl.rewards import Media
    from flowrl.types import Prompt

    images = torch.from_numpy(np.stack([np.asarray(item.image) for item in items])).permute(0, 3, 1, 2)
    prompts = [Prompt(row, item.prompt, item.metadata) for row, item in enumerate(items)]
    return scorer(Media(images.contiguous()), prompts)


def _without_gradients() -> AbstractContextManager[Any]:
    """Inference mode, where the scorer has brought torch in."""
    return sys.modules["torch"].inference_mode() if "torch" in sys.modules else nullcontext()
