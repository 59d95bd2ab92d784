"""What a scorer has to pass before its scores are worth anything: `flowrl rewards check`.

Scores must lie in the bounds of its gold case, follow their samples when a batch is permuted and stay what they are
when it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from flowrl.registry import REWARDS
from flowrl.rewards import Media, Provisioned, Reward
from flowrl.scorers import RewardSpec, build, gold_of, judging, off_gold
from flowrl.types import Prompt
from flowrl.verdicts import RewardError

WITHIN = 1e-4  # relative to scores above 1: a batch of another shape may round otherwise


@dataclass(frozen=True)
class Trial:
    """How a scorer did; `failures` are sentences, `note` says why it was not tried, or not on gold."""

    name: str
    failures: Sequence[str]
    note: str = ""
    ms: float | None = None  # a picture, after the first call

    @property
    def tried(self) -> bool:
        return self.ms is not None


def trial(spec: RewardSpec) -> Trial:
    """All that can be checked of the scorer of a row. ValueError: it cannot be built."""
    scorer = build(spec)
    lacking = list(scorer.missing()) if isinstance(scorer, Provisioned) else []
    if lacking:
        return Trial(spec.label, [], "; ".join(lacking))
    if gold := gold_of(scorer):
        failures = [wrong] if (wrong := off_gold(spec, scorer)) else []
        more, ms = consistent(spec, scorer, gold.media, gold.prompts)
        return Trial(spec.label, [*failures, *more], "", ms)
    if scorer.needs:
        return Trial(spec.label, [], f"no gold case, and it needs {', '.join(sorted(scorer.needs))}")
    failures, ms = consistent(spec, scorer, *noise())
    return Trial(spec.label, failures, "no gold case: tried on noise", ms)


def consistent(spec: RewardSpec, scorer: Reward, media: Media, prompts: Sequence[Prompt]) -> tuple[list[str], float]:
    """(what is wrong, milliseconds a picture) of a scorer on one group of samples."""
    n = len(prompts)
    turned = [*range(n - 1, -1, -1)]
    try:
        whole, begun = _scores(spec, scorer, media, prompts), perf_counter()
        again = _scores(spec, scorer, media, prompts)
    except RewardError as error:
        return [str(error)], 0.0
    ms = (perf_counter() - begun) * 1000 / n
    others = {
        "in the opposite order": lambda: _scores(spec, scorer, media[turned], [prompts[r] for r in turned])[turned]
    }
    if scorer.scope == "sample":
        others["one by one"] = lambda: torch.cat([_scores(spec, scorer, media[[r]], [prompts[r]]) for r in range(n)])
    wrong = [] if (off := _apart(again, whole)) <= WITHIN else [f"called again, its scores differ by {off:.2g}"]
    for how, asked in others.items():
        try:
            off = _apart(asked(), whole)
        except RewardError as error:
            wrong.append(f"{how}, it {error}")
        else:
            wrong += [f"{how}, its scores differ by {off:.2g}"] * (off > WITHIN)
    return wrong, ms


def noise(n: int = 4) -> tuple[Media, list[Prompt]]:
    """n pictures of noise, each with a prompt."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 64, 64), generator=generator, dtype=torch.uint8)
    return Media(images), [Prompt(row, f"picture {row}") for row in range(n)]


def names() -> tuple[str, ...]:
    """The rewards that have a name here."""
    return REWARDS.names()


def described(name: str) -> tuple[str, str, str, str, str]:
    """(columns, needs, scope, extra, state) of a named reward with its default options."""
    extra = REWARDS.extras(name)
    try:
        scorer = build(RewardSpec(name=name))
    except ValueError as error:
        return "", "", "", extra, str(error)
    lacking = list(scorer.missing()) if isinstance(scorer, Provisioned) else []
    state = "; ".join(lacking) or "ready"
    return ", ".join(scorer.columns), ", ".join(sorted(scorer.needs)), scorer.scope, extra, state


def _scores(spec: RewardSpec, scorer: Reward, media: Media, prompts: Sequence[Prompt]) -> Tensor:
    scores, errors = judging(spec, scorer, media, prompts, torch.zeros(len(prompts), dtype=torch.long), len(prompts))()
    if errors:
        raise next(iter(errors.values()))
    return scores


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to scores above 1."""
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())
