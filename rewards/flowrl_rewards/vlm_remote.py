"""A judge behind a server that speaks the OpenAI chat API, such as vLLM or SGLang.

POST {url}/chat/completions {"model", "messages": [pictures as PNG data URIs, text], "temperature": 0, ...}

Shape letters: n asks, A answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from flowrl.daemon import in_parallel
from flowrl.png import png_base64
from flowrl.verdicts import Unavailable
from flowrl.wire import show
from flowrl_rewards._judge import Ask, Asker, Questionnaire
from flowrl_rewards._weights import absent_packages


@dataclass(frozen=True, kw_only=True)
class RemoteJudge(Asker):
    """A model that a server has. ValueError: an option that cannot be, or an answer without what was asked for."""

    url: str  # up to and with /v1
    model: str  # as the server calls it
    token_env: str | None = None  # the environment variable that holds the token
    size: int | None = None  # pixels a side, bilinear; null = as they are
    parallel: int = 8  # requests at a time
    deadline: float = 120.0  # seconds a request, its repetitions included
    top_logprobs: int = 20  # tokens listed; one that is not listed counts as impossible
    max_tokens: int = 512  # of a written answer
    structured: bool = False  # hold a written answer to its JSON schema

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} is no address; give one such as http://127.0.0.1:8000/v1")
        for option in ("size", "parallel", "deadline", "top_logprobs", "max_tokens"):
            value = vars(self)[option]
            if value is not None and not value > 0:
                raise ValueError(f"{option} = {value} is too small; give a positive number")

    def missing(self) -> Sequence[str]:
        unset = self.token_env is not None and self.token_env not in os.environ
        told = [f"token_env = {self.token_env} is not set: export {self.token_env}=..."] if unset else []
        return [*absent_packages("httpx", "tenacity", extra="serve"), *told]

    def weigh(self, asks: Sequence[Ask], answers: Sequence[Sequence[str]]) -> Tensor:
        choices = self._choices(asks, max_tokens=1, logprobs=True, top_logprobs=self.top_logprobs)
        return torch.stack([_weights(self._listed(choice), answers) for choice in choices])

    def write(self, asks: Sequence[Ask], schema: Mapping[str, Any]) -> list[str | None]:
        held = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        how = {"response_format": held} if self.structured else {}
        return [self._text(choice) for choice in self._choices(asks, max_tokens=self.max_tokens, **how)]

    def _choices(self, asks: Sequence[Ask], **how: Any) -> list[Mapping[str, Any]]:
        """The answers by position; after one that failed, those not begun are given up."""
        return in_parallel(partial(self._choice, self._client, how), asks, self.parallel)

    def _choice(self, client: Any, how: Mapping[str, Any], ask: Ask) -> Mapping[str, Any]:
        from flowrl.http import Unreachable

        pictures = [f"data:image/png;base64,{png_base64(picture)}" for picture in ask.shown(self.size)]
        content = [{"type": "image_url", "image_url": {"url": uri}} for uri in pictures]
        message = {"role": "user", "content": [*content, {"type": "text", "text": ask.text}]}
        body = {"model": self.model, "messages": [message], "temperature": 0, **how}
        try:
            answer = client.post("/chat/completions", body)
        except Unreachable as error:
            if error.status in (None, 200, 429, 503):
                raise Unavailable(str(error)) from error
            raise
        match answer:
            case {"choices": [{} as choice, *_]}:
                return choice
        raise ValueError(f"{self.url} answers without a choice: {show(answer)}; see what that server logs")

    def _listed(self, choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The likeliest first tokens, {"token", "logprob"} each."""
        match choice:
            case {"logprobs": {"content": [{"top_logprobs": [_, *_] as listed}, *_]}}:
                return listed
        raise ValueError(
            f"{self.url} answers without the top_logprobs it was asked for; "
            "take a server that gives them, or method = 'text'"
        )

    def _text(self, choice: Mapping[str, Any]) -> str | None:
        match choice:
            case {"finish_reason": "length"}:
                return None
            case {"message": {"content": str(text)}}:
                return text
        raise ValueError(f"{self.url} answers without a text: {show(choice)}; see that {self.model} is a chat model")

    @cached_property
    def _client(self) -> Any:
        from flowrl.http import Client

        token = None if self.token_env is None else os.environ[self.token_env]
        return Client(self.url, token=token, deadline=self.deadline)


def _weights(listed: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[str]]) -> Tensor:
    """[A] log of the summed probabilities of the listed tokens that spell each answer."""
    logps = [[row["logprob"] for row in listed if row["token"] in spellings] for spellings in answers]
    return torch.stack([torch.tensor(found, dtype=torch.float32).logsumexp(0) for found in logps])


@dataclass(frozen=True, kw_only=True)
class RemoteVLM(RemoteJudge, Questionnaire):
    """A remote judge's answers to questions about each picture: v in [0, 1], see `_judge`."""

    def __post_init__(self) -> None:
        RemoteJudge.__post_init__(self)
        Questionnaire.__post_init__(self)
