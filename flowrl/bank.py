"""The bank that runs the scorers of a run.

Shape letters: N samples, R reward columns in all, C columns of one scorer.

A scorer runs in a thread of this process, on a copy of the images, in inference mode and under a deadline, and the
global random states are put back afterwards. A scorer that kills the process ends the run; the last checkpoint is good.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from flowrl.registry import REWARDS
from flowrl.rewards import FunctionReward, Media, Reward, Scope, reward
from flowrl.types import Prompt
from flowrl.verdicts import RewardError, Verdicts, is_constant, judge, random_states_kept

log = logging.getLogger(__name__)


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RewardSpec:
    """One row of the `rewards` block of a config."""

    name: str
    weight: FiniteFloat = 1.0
    on_failure: Literal["fail", "drop_sample", "drop_group"] = "fail"  # without a verdict: end the run, or lose what?
    timeout: Annotated[float, Field(gt=0, le=86400)] = 300.0  # seconds a call; one that first loads weights, too
    retries: NonNegativeInt = 1  # further calls after one that failed
    batch: PositiveInt = 64  # samples a call; a scorer of scope "group" gets one group a call
    options: dict[str, Any] = Field(default_factory=dict)  # the scorer's own


class RewardBank:
    """The scorers of a run, built at once: `columns` [R] are named "reward", or "reward/column" where it has several.

    ValueError: a reward that is unknown, cannot be built, or is given twice.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        _refuse_repeats(specs)
        self.scorers = [(spec, _build(spec)) for spec in specs]
        self.columns = tuple(
            spec.name if len(scorer.columns) == 1 else f"{spec.name}/{column}"
            for spec, scorer in self.scorers
            for column in scorer.columns
        )
        self.weights = tuple(spec.weight for spec, scorer in self.scorers for _ in scorer.columns)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """ValueError naming the prompts that lack metadata which a scorer needs."""
        for spec, scorer in self.scorers:
            for key in sorted(scorer.needs):
                lacking = [p.id for p in prompts if key not in p.metadata]
                if lacking:
                    raise ValueError(
                        f"reward {spec.name!r} needs the metadata key {key!r}, which {len(lacking)} of {len(prompts)} "
                        f"prompts lack (ids {reprlib.repr(lacking)}); add it to the prompts or take another reward"
                    )

    def __call__(self, media: Media, prompts: Sequence[Prompt], groups: Tensor) -> Verdicts:
        """Judge N samples of the groups [N]; a lost sample is NaN in every column. RewardError under "fail"."""
        groups = groups.cpu()
        samples = [f"sample {row} (prompt {prompt.id})" for row, prompt in enumerate(prompts)]
        parts, failures = [], {}
        lost = torch.zeros(len(prompts), dtype=torch.bool)
        for spec, scorer in self.scorers:
            with random_states_kept():
                scores, errors = judge(
                    lambda rows, scorer=scorer: scorer(media[rows], [prompts[row] for row in rows]),
                    _calls(scorer.scope, spec.batch, groups),
                    samples,
                    scorer.columns,
                    timeout=spec.timeout,
                    retries=spec.retries,
                    split=scorer.scope == "sample",
                    stop=spec.on_failure == "fail",
                )
            parts.append(scores)
            failures[spec.name] = len(errors)
            if errors:
                lost |= _lost(spec, errors, groups)
        scores = torch.cat(parts, 1)
        scores[lost] = math.nan
        constant = [name for name, column in zip(self.columns, scores.T, strict=True) if is_constant(column)]
        return Verdicts(scores, failures, tuple(constant))


def _refuse_repeats(specs: Sequence[RewardSpec]) -> None:
    for name in dict.fromkeys(spec.name for spec in specs):
        weights = [spec.weight for spec in specs if spec.name == name]
        if len(weights) > 1:
            total = math.fsum(weights)
            fix = f"give it once, with weight {total:g}" if total else "they cancel, which is no signal: remove it"
            raise ValueError(f"reward {name!r} is given {len(weights)} times, with weights {weights}; {fix}")


def _build(spec: RewardSpec) -> Reward:
    found = REWARDS[spec.name]
    if not isinstance(found, type | FunctionReward):
        found = reward(found)
    build = found if isinstance(found, type) else found.bind
    try:
        scorer: Any = build(**spec.options)
    except (ImportError, TypeError) as error:
        raise ValueError(f"reward {spec.name!r} cannot be built with options {spec.options}: {error}") from error
    if not isinstance(scorer, Reward):
        raise ValueError(f"reward {spec.name!r} is no Reward: its class lacks columns, needs, scope or __call__")
    return scorer


def _calls(scope: Scope, batch: int, groups: Tensor) -> list[list[int]]:
    """The rows of each call of a scorer."""
    if scope == "group":
        return [(groups == group).nonzero().flatten().tolist() for group in groups.unique()]
    return [rows.tolist() for rows in torch.arange(len(groups)).split(batch)]


def _lost(spec: RewardSpec, errors: Mapping[int, RewardError], groups: Tensor) -> Tensor:
    """[N] which samples the failure policy gives up. RewardError: the policy is "fail"."""
    error = next(iter(errors.values()))
    message = f"reward {spec.name!r} {error}"
    if spec.on_failure == "fail":
        raise RewardError(message) from error
    log.warning("%s; %s for %d of %d samples", message, spec.on_failure, len(errors), len(groups))
    rows = torch.tensor(list(errors))
    unit = groups if spec.on_failure == "drop_group" else torch.arange(len(groups))
    return torch.isin(unit, unit[rows])
