"""One call of a scorer, kept apart from the run, and what it returned -> float32 scores or a sentence on why not.

Shape letters: N samples, n samples of one call, R reward columns in all, C columns of one scorer.
"""

from __future__ import annotations

import math
import random
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.daemon import background
from flowrl.wire import plain

T = TypeVar("T")


class RewardError(ValueError):
    """A scorer gave no usable verdict; the message names the scorer, the sample and the value."""


class Raised(RewardError):
    """The scorer raised."""


class Hung(RewardError):
    """The scorer did not answer before its deadline, so that `call` may still be inside it, or cannot be had."""

    def __init__(self, told: str, call: Future[Any] | None = None) -> None:
        super().__init__(told)
        self.call = call


class Unavailable(Exception):
    """What a scorer raises where asking it again, now or sample by sample, is of no use: its server is down, say."""


@dataclass(frozen=True)
class Verdicts:
    """What the bank says of N samples."""

    scores: Tensor  # [N, R] float32 on the CPU, NaN = no verdict
    failures: Mapping[str, int]  # samples without a verdict of their own, per scorer
    constant: tuple[str, ...]  # columns whose scores are all equal: no signal in them


Judged = tuple[Tensor, dict[int, RewardError]]  # scores [N, C], and why a sample has none


def is_constant(column: Tensor) -> bool:
    """Whether the scores [N] of a reward are all the same, which is no signal."""
    known = column[~column.isnan()]
    return len(known) > 1 and bool((known == known[0]).all())


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the global states of random, numpy and torch back at the end."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def scoring(call: Callable[[], T]) -> Future[T]:
    """The value of `call` to come, from a daemon thread in inference mode."""
    device = _device()

    def work() -> T:
        with torch.inference_mode(), torch.cuda.device(device):  # a new thread has its own of both
            return call()

    return background(work)


def _within(seconds: float, call: Callable[[], Any], samples: str) -> Any:
    """The value of `call`, unless a deadline leaves it behind."""
    answer = scoring(call)
    if not wait([answer], seconds).done:
        told = f"did not answer within {seconds:g} s for {samples}; raise its `timeout` if it is only slow"
        raise Hung(told, answer)
    error = answer.exception()
    if isinstance(error, Unavailable):
        raise Hung(f"{error}, for {samples}") from error
    if error is not None:
        raise Raised(f"raised {type(error).__name__}: {error}, for {samples}") from error
    return answer.result()


def judge(
    score: Callable[[list[int]], Any],
    calls: Iterable[list[int]],
    samples: Sequence[str],
    columns: Sequence[str],
    *,
    timeout: float,
    retries: int,
    split: bool,
    allowed: float,
) -> Judged:
    """Scores [N, C] of N named samples, and an error for each that has no verdict; `calls` are the rows of each call.

    A call that fails is repeated. One that still raises is asked sample by sample, if it may be `split`: one bad sample
    costs only itself. No call follows a hung one, whose thread may still be inside the scorer, nor more errors than are
    `allowed`; the samples that were not asked about then share the last one.
    """
    scores = torch.full((len(samples), len(columns)), math.nan)
    errors: dict[int, RewardError] = {}
    queue = deque((rows, retries) for rows in calls)
    while queue and len(errors) <= allowed:
        rows, left = queue.popleft()
        names = [samples[row] for row in rows]
        try:
            scores[rows], wrong = coerce(_within(timeout, partial(score, rows), _span(names)), names, columns)
            errors |= {rows[i]: error for i, error in wrong.items()}
        except Hung as error:
            errors |= dict.fromkeys(rows, error)
            break
        except RewardError as error:
            if left:
                queue.appendleft((rows, left - 1))
            elif split and len(rows) > 1 and isinstance(error, Raised):
                queue.extendleft(([row], 0) for row in reversed(rows))
            else:
                errors |= dict.fromkeys(rows, error)
    if queue:
        errors |= dict.fromkeys(chain(*(rows for rows, _ in queue)), [*errors.values()][-1])
    return scores, errors


def _row(value: Any, width: int) -> Tensor | None:
    """The finite numbers of one sample as float32 [width], None if `value` is anything else; a bool is no number."""
    cells = value if isinstance(value, list) else [value]
    if len(cells) != width or not all(isinstance(cell, Real) and not isinstance(cell, bool) for cell in cells):
        return None
    row = torch.tensor([float(cell) for cell in cells], dtype=torch.float64).float()
    return row if row.isfinite().all() else None


def coerce(value: Any, samples: Sequence[str], columns: Sequence[str]) -> tuple[Tensor, dict[int, RewardError]]:
    """Scores [n, C] float32 of the n named `samples`, and an error for each NaN row; one column may be [n] or [n, 1].

    RewardError: there is not one row for each sample. Nothing is broadcast, cut or filled in.
    """
    rows = plain(value)
    if not isinstance(rows, list):
        raise RewardError(f"returned {_show(value)} for {_span(samples)}, wanted one score for each sample")
    if len(rows) != len(samples):
        raise RewardError(f"returned {len(rows)} scores for {len(samples)} samples, {_span(samples)}: {_show(value)}")
    scores = torch.full((len(rows), len(columns)), math.nan)
    errors = {}
    wanted = "a finite number" if len(columns) == 1 else f"{len(columns)} finite numbers ({', '.join(columns)})"
    for i, row in enumerate(rows):
        numbers = _row(row, len(columns))
        if numbers is None:
            errors[i] = RewardError(f"returned {_show(row)} for {samples[i]}, wanted {wanted}")
        else:
            scores[i] = numbers
    return scores, errors


def _span(samples: Sequence[str]) -> str:
    return samples[0] if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"


def _show(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
