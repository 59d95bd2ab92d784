"""How near an edited picture is to the one it started from: 1 for the same picture.

dino         cos(f(x), f(y)),   f = the [CLS] state of DINOv2 (2304.07193)
perceptual   1 - sum_l mean_hw sum_c w_lc (a_lc - b_lc)^2,   a, b = features of layer l, unit length (1801.03924)

Without learned weights w = 1 / (2 L), and "perceptual" is the mean cosine over the L layers and their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cosine_similarity

from flowrl.rewards import Gold, Media
from flowrl.types import Prompt
from flowrl_rewards._pretrained import pretrained
from flowrl_rewards._weights import absent_file, absent_packages, device_of, exactly

MODELS = {"dino": "facebook/dinov2-base", "perceptual": "timm/vgg16.tv_in1k"}
PACKAGES = {"dino": "torchvision", "perceptual": "timm"}
LAYERS = 5  # of the perceptual backbone
Score = Callable[[Sequence[Image.Image], Sequence[Image.Image]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Closeness to the picture in the metadata key "source"."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset({"source"})
    scope: ClassVar[str] = "sample"
    method: str = "dino"
    model: str = ""  # a hub id or a local folder, "" is the usual one: of transformers for dino, of timm for perceptual
    linear: str = ""  # a local file with the learned weights of perceptual, "" is none
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in MODELS:
            raise ValueError(f"reward similarity: method is {self.method!r}; give one of {', '.join(MODELS)}")
        if self.linear and self.method != "perceptual":
            raise ValueError(f"reward similarity: linear = {self.linear} is of perceptual; remove it or change method")
        object.__setattr__(self, "model", self.model or MODELS[self.method])

    def missing(self) -> Sequence[str]:
        return [
            *absent_packages(PACKAGES[self.method], extra="rewards"),
            *absent_file("model", self.model),
            *(absent_file("linear", self.linear) if self.linear else ()),
        ]

    def gold(self) -> Gold:
        """The source itself, and its negative."""
        noise = torch.randint(256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        source = Media(noise).pil()[0]
        return Gold(
            Media(torch.cat([noise, 255 - noise])),
            [Prompt(row, "keep it", {"source": source}) for row in range(2)],
            lower=torch.tensor([[1 - 1e-4], [-1.0]]),
            upper=torch.tensor([[1 + 1e-4], [1 - 1e-4]]),
        )

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        pictures = media.pil()
        sources = [prompt.metadata["source"].convert("RGB") for prompt in prompts]
        return self._score(pictures, sources)

    @cached_property
    def _score(self) -> Score:
        device = device_of(self.device)
        return dino(self.model, device) if self.method == "dino" else perceptual(self.model, self.linear, device)


def dino(model: str, device: torch.device) -> Score:
    """The cosine of the [CLS] states of N pairs of pictures [N]."""
    from transformers import AutoImageProcessor, AutoModel

    prepare = AutoImageProcessor.from_pretrained(model)
    network = pretrained(AutoModel, model, "model").to(device)

    def state(pictures: Sequence[Image.Image]) -> Tensor:
        pixels = prepare(images=list(pictures), return_tensors="pt")["pixel_values"].to(device)
        return network(pixel_values=pixels).last_hidden_state[:, 0]

    return lambda pictures, sources: cosine_similarity(state(pictures), state(sources))


def perceptual(model: str, linear: str, device: torch.device) -> Score:
    """1 - distance of N pairs of pictures [N] at the size of the first of each pair."""
    import timm
    from timm.data.config import resolve_model_data_config
    from torchvision.transforms.functional import normalize, to_tensor

    name = f"local-dir:{model}" if Path(model).is_dir() else f"hf-hub:{model}"
    network: Any = timm.create_model(name, pretrained=True, features_only=True, out_indices=range(LAYERS))
    network = network.eval().to(device)
    channels = network.feature_info.channels()
    weights = [w.to(device) for w in (learned(linear, channels) if linear else even(channels))]
    scale = resolve_model_data_config(network)

    def maps(pictures: Sequence[Image.Image]) -> list[Tensor]:
        pixels = torch.stack([normalize(to_tensor(picture), scale["mean"], scale["std"]) for picture in pictures])
        return network(pixels.to(device))

    def score(pictures: Sequence[Image.Image], sources: Sequence[Image.Image]) -> Tensor:
        fitted = [
            source.resize(picture.size, Image.Resampling.BICUBIC)
            for picture, source in zip(pictures, sources, strict=True)
        ]
        return 1 - distance(maps(pictures), maps(fitted), weights)

    return score


def distance(a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """sum_l mean_hw sum_c w_lc (a_lc - b_lc)^2 [N] of features [N, C, h, w] by layer, w_l [1, C, 1, 1]."""
    layers = [(w * (_unit(x) - _unit(y)) ** 2).sum(1).mean((1, 2)) for x, y, w in zip(a, b, weights, strict=True)]
    return torch.stack(layers).sum(0)


def _unit(features: Tensor) -> Tensor:
    return features / (features.norm(dim=1, keepdim=True) + 1e-10)


def even(channels: Sequence[int]) -> list[Tensor]:
    """Weights that make the distance 1 - the mean cosine."""
    return [torch.full((1, width, 1, 1), 1 / (2 * len(channels))) for width in channels]


def learned(path: str, channels: Sequence[int]) -> list[Tensor]:
    """The weights of a published LPIPS file. ValueError: they are of another backbone."""
    state = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True)
    wanted = {f"lin{layer}.model.1.weight": torch.empty(1, width, 1, 1) for layer, width in enumerate(channels)}
    exactly(state, wanted, path)
    return [state[key] for key in wanted]
