"""HPSv2.1 (2306.09341): a CLIP ViT-H/14 that was trained on people's rankings.

HPSv2 = cos(f(picture), g(text)),   about 0.2 to 0.35
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from torch.nn.functional import pad

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._towers import OpenTowers
from flowrl_rewards._weights import absent_file, absent_packages, device_of, exactly, located

FILE = "HPS_v2.1_compressed.pt"
ARCHITECTURE = "ViT-H-14"
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


@dataclass(frozen=True, kw_only=True)
class HPSv2:
    """Human preference for the picture, given its prompt."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    weights: str = "xswu/HPSv2"  # or a local file, or a folder with HPS_v2.1_compressed.pt
    device: str = "auto"

    def missing(self) -> Sequence[str]:
        return [*absent_packages("open_clip", extra="rewards"), *absent_file("weights", self.weights, FILE)]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        return self._towers.cosines(media, prompts)

    @cached_property
    def _towers(self) -> OpenTowers:
        import open_clip

        path = located(self.weights, FILE) or hf_hub_download(self.weights, FILE)
        network = read(torch.load(path, map_location="cpu", weights_only=True).get("state_dict", {}), str(path))
        prepare = partial(prepared, size=network.visual.image_size[0])
        return OpenTowers(network, open_clip.get_tokenizer(ARCHITECTURE), prepare, device_of(self.device))


def read(state: Mapping[str, Tensor], source: str) -> Any:
    """The network of a published state, in float32. ValueError: its keys or shapes are others."""
    import open_clip
    from accelerate import init_empty_weights

    config: Any = open_clip.get_model_config(ARCHITECTURE)
    with init_empty_weights():
        network = open_clip.CLIP(**config)
    exactly(state, network.state_dict(), source)
    network.load_state_dict({key: value.float() for key, value in state.items()}, assign=True)
    return network


def prepared(media: Media, size: int) -> Tensor:
    """Pixels [N, 3, size, size]: the longer side resized to `size` as a float tensor, black around the rest."""
    from torchvision.transforms import InterpolationMode, Normalize
    from torchvision.transforms.functional import resize

    height, width = (round(side * size / max(media.images.shape[2:])) for side in media.images.shape[2:])
    pixels = resize(media.images.float() / 255, [height, width], InterpolationMode.BICUBIC)
    left, top = (size - width) // 2, (size - height) // 2
    framed = pad(pixels, (left, size - width - left, top, size - height - top))
    return Normalize(PIXEL_MEAN, PIXEL_STD)(framed)
