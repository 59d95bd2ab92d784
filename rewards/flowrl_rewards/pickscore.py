"""PickScore (2305.01569): a CLIP-H that was trained on which of two pictures people picked.

PickScore = exp(log_scale) cos(f(picture), g(text)),   about 18 to 24
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._towers import HubTowers, bicubic, check_scale
from flowrl_rewards._weights import absent_file, device_of


@dataclass(frozen=True, kw_only=True)
class PickScore:
    """How likely people are to pick the picture for its prompt."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    model: str = "yuvalkirstain/PickScore_v1"  # or a local folder
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # of the model it was trained from, or a local folder
    scale: float = 1.0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_scale("pickscore", self.scale)

    def missing(self) -> Sequence[str]:
        return [
            *absent_file("model", self.model),
            *absent_file("processor", self.processor, "preprocessor_config.json"),
        ]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return self.scale * self._towers.logits(media, prompts)

    @cached_property
    def _towers(self) -> HubTowers:
        return HubTowers(self.model, self.processor, bicubic(self.processor), device_of(self.device))
