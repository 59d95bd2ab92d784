"""The LAION aesthetic predictor V2 (of the authors of 2210.08402): an MLP on the direction of CLIP's picture embedding.

Aesthetic = MLP(f(picture) / |f(picture)|),   trained on ratings from 1 to 10; the text is not read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._towers import HubTowers, bicubic
from flowrl_rewards._weights import absent_file, device_of, exactly, located

FILE = "aesthetic-model.pth"


@dataclass(frozen=True, kw_only=True)
class Aesthetic:
    """How beautiful people find the picture, whatever was asked for."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    weights: str = "trl-lib/ddpo-aesthetic-predictor"  # or a local file, or a folder with aesthetic-model.pth
    model: str = "openai/clip-vit-large-patch14"  # or a local folder
    device: str = "auto"

    def missing(self) -> Sequence[str]:
        return [*absent_file("weights", self.weights, FILE), *absent_file("model", self.model)]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        towers, head = self._networks
        return head(normalize(towers.pictures(media)))

    @cached_property
    def _networks(self) -> tuple[HubTowers, Head]:
        device = device_of(self.device)
        towers = HubTowers(self.model, self.model, bicubic(self.model), device)
        path = located(self.weights, FILE) or hf_hub_download(self.weights, FILE)
        state = torch.load(path, map_location="cpu", weights_only=True)
        return towers, read(state, towers.network.config.projection_dim, str(path)).to(device)


class Head(nn.Module):
    """Unit embeddings [N, D] -> scores [N]; no activation between the layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, 1024), nn.Identity()),  # the authors' dropout
            *(nn.Linear(1024, 128), nn.Identity()),
            *(nn.Linear(128, 64), nn.Identity()),
            *(nn.Linear(64, 16), nn.Linear(16, 1)),
        )

    def forward(self, embeds: Tensor) -> Tensor:
        return self.layers(embeds)[:, 0]


def read(state: Mapping[str, Tensor], width: int, source: str) -> Head:
    """The MLP of a published state for embeddings of a width. ValueError: its keys or shapes are others."""
    head = Head(width)
    exactly(state, head.state_dict(), source)
    head.load_state_dict(state)
    return head
