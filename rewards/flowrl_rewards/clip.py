"""How well a picture fits its text by a CLIP model (2103.00020).

open_clip    scale cos(f(picture), g(text))
clip_score   scale exp(log_scale) cos(f(picture), g(text)),   exp(log_scale) = 100 as published
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._towers import HubTowers, OpenTowers, bilinear, check_scale
from flowrl_rewards._weights import absent_file, absent_packages, device_of, resolved


@dataclass(frozen=True, kw_only=True)
class OpenCLIP:
    """Cosine of a model of open_clip, pictures prepared as its configuration says."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    path: str = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"  # or a folder of open_clip's, a weight file, an embedded model
    model: str = ""  # open_clip's name of the architecture of a weight file, such as ViT-B-32
    scale: float = 1.0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_scale("open_clip", self.scale)
        is_file = self._place.is_file()
        if is_file and not self.model:
            raise ValueError(f"reward open_clip: path = {self.path} is a weight file; add model, its architecture")
        if self.model and not is_file:
            raise ValueError(
                f"reward open_clip: model = {self.model!r} is of a weight file, and path = {self.path} is none; "
                "correct path or remove model"
            )

    def missing(self) -> Sequence[str]:
        return [
            *absent_packages("open_clip", extra="rewards"),
            *absent_file("path", self.path, "open_clip_config.json"),
        ]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return self.scale * self._towers.cosines(media, prompts)

    @property
    def _place(self) -> Path:
        return Path(resolved(self.path))

    @cached_property
    def _towers(self) -> OpenTowers:
        import open_clip

        folder = f"local-dir:{self._place}" if self._place.is_dir() else f"hf-hub:{self.path}"
        name, weights = (self.model, str(self._place)) if self.model else (folder, None)
        loaded: Any = open_clip.create_model_from_pretrained(name, weights)
        network, prepare = loaded
        return OpenTowers(
            network,
            open_clip.get_tokenizer(name),
            lambda media: torch.stack([prepare(picture) for picture in media.pil()]),
            device_of(self.device),
        )


@dataclass(frozen=True, kw_only=True)
class CLIPScore:
    """CLIP's own logit of a picture and its text: about 20 to 35 for a fitting text of ViT-L/14."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    model: str = "openai/clip-vit-large-patch14"  # or a local folder
    scale: float = 1.0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_scale("clip_score", self.scale)

    def missing(self) -> Sequence[str]:
        return [*absent_packages("torchvision", extra="rewards"), *absent_file("model", self.model)]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return self.scale * self._towers.logits(media, prompts)

    @cached_property
    def _towers(self) -> HubTowers:
        return HubTowers(self.model, self.model, bilinear(self.model), device_of(self.device))
