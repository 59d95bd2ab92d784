"""The bank that runs the scorers of a run.

Shape letters: N samples, R reward columns in all, C columns of one scorer.

A scorer runs in a thread of this process, on a copy of the images, in inference mode and under a deadline, and the
global random states are put back afterwards. A scorer that kills the process ends the run; the last checkpoint is good.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from flowrl.rewards import Media, Provisioned
from flowrl.scorers import RewardSpec, build, judging, off_gold, refuse_repeats
from flowrl.types import Prompt
from flowrl.verdicts import Hung, Judged, RewardError, Verdicts, is_constant, random_states_kept, scoring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """Samples whose scorers are at work; `answers` gives the scores and errors of each scorer, in their order."""

    prompts: Sequence[Prompt]
    groups: Tensor  # [N]
    answers: Sequence[Future[Judged]]


class RewardBank:
    """The scorers of a run, built at once: `columns` [R] are named "reward", or "reward/column" where it has several.

    ValueError: a reward that is unknown, cannot be built, lacks a package or a file, or is given twice.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        refuse_repeats(specs)
        self.scorers = [(spec, build(spec)) for spec in specs]
        lacking = [
            f"reward {spec.label!r}: {sentence}"
            for spec, scorer in self.scorers
            if isinstance(scorer, Provisioned)
            for sentence in scorer.missing()
        ]
        if lacking:
            raise ValueError("; ".join(lacking))
        self.columns = tuple(
            spec.label if len(scorer.columns) == 1 else f"{spec.label}/{column}"
            for spec, scorer in self.scorers
            for column in scorer.columns
        )
        self.weights = tuple(spec.weight for spec, scorer in self.scorers for _ in scorer.columns)
        self._turns = [Turn() for _ in specs]
        self._told: set[str] = set()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """ValueError: prompts that lack metadata which a scorer needs, or a scorer that is wrong on its gold case."""
        for spec, scorer in self.scorers:
            for key in sorted(scorer.needs):
                lacking = [p.id for p in prompts if key not in p.metadata]
                if lacking:
                    raise ValueError(
                        f"reward {spec.label!r} needs the metadata key {key!r}, which {len(lacking)} of {len(prompts)} "
                        f"prompts lack (ids {reprlib.repr(lacking)}); add it to the prompts or take another reward"
                    )
        for spec, scorer in self.scorers:
            if wrong := off_gold(spec, scorer):
                raise ValueError(f"reward {spec.label!r} fails its own check: {wrong}; see flowrl rewards check")

    def __call__(self, media: Media, prompts: Sequence[Prompt], groups: Tensor) -> Verdicts:
        """Judge N samples of the groups [N]; see `verdicts`."""
        with random_states_kept():
            return self.verdicts([self.ask(media, prompts, groups.cpu())])

    def ask(self, media: Media, prompts: Sequence[Prompt], groups: Tensor, total: int | None = None) -> Asked:
        """Set all scorers to work on N samples of whole groups [N], of `total` in all, and return at once.

        Until they are done, `random_states_kept` is for the caller to enter: scorers may draw from the global states.
        """
        answers = []
        for turn, (spec, scorer) in zip(self._turns, self.scorers, strict=True):
            work = judging(spec, scorer, media, prompts, groups, total or len(prompts))
            answers.append(scoring(partial(turn.take, work, len(prompts), len(scorer.columns))))
        return Asked(prompts, groups, answers)

    def verdicts(self, asked: Sequence[Asked]) -> Verdicts:
        """What the scorers say of all that was asked; a sample that a failure cost is NaN in the scorer's columns.

        RewardError: a failure under "fail", or more of them than the scorer's budget.
        """
        groups = torch.cat([one.groups for one in asked])
        parts, failures = [], {}
        for i, (spec, _) in enumerate(self.scorers):
            scores, errors = _rejoined([one.answers[i].result() for one in asked])
            failures[spec.label] = len(errors)
            if errors:
                scores[_lost(spec, errors, groups)] = math.nan
            parts.append(scores)
        scores = torch.cat(parts, 1)
        constant = [name for name, column in zip(self.columns, scores.T, strict=True) if is_constant(column)]
        for name in set(constant) - self._told:
            log.warning("reward %r gave all of %d samples one score, which is no signal", name, len(groups))
        self._told.update(constant)
        return Verdicts(scores, failures, tuple(constant))


class Turn:
    """A scorer is asked one thing at a time, and nothing while a call that was given up is still inside it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._late: Hung | None = None

    def take(self, work: Callable[[], Judged], samples: int, columns: int) -> Judged:
        with self._lock:
            if self._late and self._late.call and not self._late.call.done():
                return torch.full((samples, columns), math.nan), dict.fromkeys(range(samples), self._late)
            scores, errors = work()
            self._late = next((error for error in errors.values() if isinstance(error, Hung)), None)
            return scores, errors


def _rejoined(answers: Sequence[Judged]) -> Judged:
    """Scores and errors of several portions, rows numbered through."""
    errors, first = {}, 0
    for scores, wrong in answers:
        errors |= {first + row: error for row, error in wrong.items()}
        first += len(scores)
    return torch.cat([scores for scores, _ in answers]), errors


def _lost(spec: RewardSpec, errors: Mapping[int, RewardError], groups: Tensor) -> Tensor:
    """[N] which samples the failure policy gives up. RewardError: the policy is "fail"."""
    error = next(iter(errors.values()))
    message = f"reward {spec.label!r} {error}"
    if spec.on_failure == "fail":
        raise RewardError(message) from error
    if len(errors) > spec.budget * len(groups):
        raise RewardError(
            f"{message}; that is {len(errors)} of {len(groups)} samples, over budget = {spec.budget:g}"
        ) from error
    log.warning("%s; %s for %d of %d samples", message, spec.on_failure, len(errors), len(groups))
    rows = torch.tensor(list(errors))
    unit = groups if spec.on_failure == "drop_group" else torch.arange(len(groups))
    return torch.isin(unit, unit[rows])
