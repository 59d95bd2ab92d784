"""What a scorer has to pass before its scores are worth anything: `flowrl rewards check`.

Scores must lie in the bounds of its gold case, follow their samples when a batch is permuted and stay what they are
when it is split, and the pictures must be left as they were.
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
    before = media.images.clone()
    whole, begun = _scores(spec, scorer, media, prompts), perf_counter()
    again = _scores(spec, scorer, media, prompts)
    ms = (perf_counter() - begun) * 1000 / n
    backwards = _scores(spec, scorer, media[turned], [prompts[row] for row in turned])[turned]
    pairs = [("called again", again), ("in the opposite order", backwards)]
    if scorer.scope == "sample":
        alone = [_scores(spec, scorer, media[[row]], [prompts[row]]) for row in range(n)]
        pairs.append(("one by one", torch.cat(alone)))
    apart = {how: _apart(scores, whole) for how, scores in pairs}
    wrong = [f"{how}, its scores differ by {off:.2g}" for how, off in apart.items() if off > WITHIN]
    if not torch.equal(media.images, before):
        wrong.append("it changes the pictures")
    return wrong, ms


def noise(n: int = 4) -> tuple[Media, list[Prompt]]:
    """n pictures of noise, each with a prompt."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 64, 64), generator=generator, dtype=torch.uint8)
    return Media(images), [Prompt(row, f"picture {row}") for row in range(n)]


def names() -> tuple[str, ...]:
    """The rewards that have a name here."""
    return REWARDS.names()


def described(name: str) -> tuple[str, str, str, str]:
    """(columns, needs, scope, state) of a named reward with its default options."""
    try:
        scorer = build(RewardSpec(name=name))
    except ValueError as error:
        return "", "", "", str(error)
    lacking = list(scorer.missing()) if isinstance(scorer, Provisioned) else []
    return ", ".join(scorer.columns), ", ".join(sorted(scorer.needs)), scorer.scope, "; ".join(lacking) or "ready"


def _scores(spec: RewardSpec, scorer: Reward, media: Media, prompts: Sequence[Prompt]) -> Tensor:
    scores, _ = judging(spec, scorer, media, prompts, torch.zeros(len(prompts), dtype=torch.long))()
    return scores


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to scores above 1; a verdict on one side only counts as infinite."""
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    return float(((a - b).abs() / b.abs().clamp(min=1)).nan_to_num().max())
