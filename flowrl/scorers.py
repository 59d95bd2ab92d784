"""One row of the block `rewards:`, the scorer it stands for, and the work of that scorer.

Shape letters: N samples, C columns of one scorer.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from flowrl.isolated import Isolated
from flowrl.registry import REWARDS
from flowrl.remote import Remote
from flowrl.rewards import Checkable, FunctionReward, Gold, Media, Reward, Scope, reward
from flowrl.types import Prompt
from flowrl.verdicts import Judged, judge

SOONER = 0.9  # a client gives up before the bank does, since it knows why


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RewardSpec:
    """One row of the `rewards` block of a config.

    The scorer `name` runs in this process, in the interpreter `python`, or behind `url`, which then says what it is.
    """

    name: str
    label: str = ""  # what its columns are called; "" is `name`
    url: str | None = None
    token_env: str | None = None  # the environment variable that holds the token for `url`
    python: str | None = None
    weight: FiniteFloat = 1.0
    on_failure: Literal["fail", "drop_sample", "drop_group"] = "fail"  # without a verdict: end the run, or lose what?
    budget: Annotated[float, Field(gt=0, le=1)] = 0.5  # the share of a rollout's samples that may go without a verdict
    timeout: Annotated[float, Field(gt=0, le=86400)] = 300.0  # seconds a call; one that first loads weights, too
    retries: NonNegativeInt = 1  # further calls after one that failed
    batch: PositiveInt = 64  # samples a call; a scorer of scope "group" gets one group a call
    options: dict[str, Any] = Field(default_factory=dict)  # the scorer's own

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)
        if self.url and (self.python or self.options):
            raise ValueError(
                f"reward {self.name!r}: url excludes python and options; give them to flowrl rewards serve"
            )
        if self.token_env and not self.url:
            raise ValueError(f"reward {self.name!r}: token_env = {self.token_env} is of a url; add url or remove it")


def refuse_repeats(specs: Sequence[RewardSpec]) -> None:
    """ValueError: two rows have one label."""
    for name in dict.fromkeys(spec.label for spec in specs):
        weights = [spec.weight for spec in specs if spec.label == name]
        if len(weights) > 1:
            total = math.fsum(weights)
            fix = f"give it once, with weight {total:g}" if total else "they cancel, which is no signal: remove it"
            fix += "; where the options differ, give each its own `label`"
            raise ValueError(f"reward {name!r} is given {len(weights)} times, with weights {weights}; {fix}")


def build(spec: RewardSpec) -> Reward:
    """The scorer of a row. ValueError: it cannot be built or reached."""
    if spec.url:
        return Remote.connect(spec.url, token=_token(spec), timeout=SOONER * spec.timeout)
    if spec.python:
        return Isolated(spec.python, spec.name, spec.options, timeout=SOONER * spec.timeout)
    found = REWARDS[spec.name]
    if not callable(found):
        raise ValueError(f"reward {spec.name!r} is {found!r}, not a class or a function")
    if not isinstance(found, type | FunctionReward):
        found = reward(found)
    build = found if isinstance(found, type) else found.bind
    try:
        scorer: Any = build(**spec.options)
    except ImportError as error:
        raise ValueError(f"reward {spec.name!r} cannot be built: {error}") from error
    except TypeError as error:
        takes = inspect.signature(build if isinstance(found, type) else found.function).parameters
        options = ", ".join(name for name in takes if name not in ("images", "prompts", "metadata")) or "none"
        raise ValueError(
            f"reward {spec.name!r} cannot be built with options {spec.options}: {error}; its options: {options}"
        ) from error
    if not isinstance(scorer, Reward):
        raise ValueError(f"reward {spec.name!r} is no Reward: its class lacks columns, needs, scope or __call__")
    return scorer


def _token(spec: RewardSpec) -> str | None:
    if spec.token_env is None:
        return None
    if spec.token_env not in os.environ:
        raise ValueError(f"reward {spec.label!r}: token_env = {spec.token_env} is not set; export {spec.token_env}=...")
    return os.environ[spec.token_env]


def judging(
    spec: RewardSpec, scorer: Reward, media: Media, prompts: Sequence[Prompt], groups: Tensor, total: int
) -> Callable[[], Judged]:
    """The work of one scorer on N samples, of `total` in all; each call has its own copy of what it is shown."""
    return partial(
        judge,
        lambda rows: scorer(media[rows], [deepcopy(prompts[row]) for row in rows]),
        _calls(scorer.scope, spec.batch, groups),
        [f"sample {row} (prompt {prompt.id})" for row, prompt in enumerate(prompts)],
        scorer.columns,
        timeout=spec.timeout,
        retries=spec.retries,
        split=scorer.scope == "sample",
        allowed=0 if spec.on_failure == "fail" else spec.budget * total,
    )


def _calls(scope: Scope, batch: int, groups: Tensor) -> list[list[int]]:
    """The rows of each call of a scorer."""
    if scope == "group":
        return [(groups == group).nonzero().flatten().tolist() for group in groups.unique()]
    return [rows.tolist() for rows in torch.arange(len(groups)).split(batch)]


def gold_of(scorer: Reward) -> Gold | None:
    """The gold case of a scorer that has one."""
    return scorer.gold() if isinstance(scorer, Checkable) else None


def off_gold(spec: RewardSpec, scorer: Reward) -> str:
    """What is wrong with the scores of a scorer's gold case, "" where nothing is, or where it has none."""
    gold = gold_of(scorer)
    if gold is None:
        return ""
    one_group = torch.zeros(len(gold.prompts), dtype=torch.long)
    scores, errors = judging(spec, scorer, gold.media, gold.prompts, one_group, len(one_group))()
    if errors:
        return str(next(iter(errors.values())))
    off = ((scores < gold.lower) | (scores > gold.upper)).nonzero()
    if not len(off):
        return ""
    row, column = off[0].tolist()
    bounds = f"{gold.lower[row, column]:g} to {gold.upper[row, column]:g}"
    return f"{scorer.columns[column]} of its gold sample {row} is {scores[row, column]:g}, wanted {bounds}"
