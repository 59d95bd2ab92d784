"""ImageReward (2304.05977, section 3): BLIP reads picture and prompt together; an MLP on its [CLS] state is the reward.

ImageReward = (MLP(h_CLS) - 0.16717) / 1.03334,   about -2 to 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from huggingface_hub import hf_hub_download
from PIL import Image
from torch import Tensor, nn

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._weights import absent_file, absent_packages, device_of, exactly, located
from flowrl_rewards.aesthetic import Head

FILE = "ImageReward.pt"
MEAN, STD = 0.16717, 1.03334  # of the raw reward over the authors' data
TOKENS = 35
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
TEXT = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "encoder_hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-12,
}
PUBLISHED = {  # what a name of `Network` is called in the file, replaced in this order
    "vision.encoder.layers.": "blip.visual_encoder.blocks.",
    "vision.embeddings.class_embedding": "blip.visual_encoder.cls_token",
    "vision.embeddings.position_embedding": "blip.visual_encoder.pos_embed",
    "vision.embeddings.patch_embedding.": "blip.visual_encoder.patch_embed.proj.",
    "vision.post_layernorm.": "blip.visual_encoder.norm.",
    ".self_attn.qkv.": ".attn.qkv.",
    ".self_attn.projection.": ".attn.proj.",
    ".layer_norm": ".norm",
    "text.": "blip.text_encoder.",
    "head.": "mlp.",
}
UNUSED = ("blip.text_encoder.embeddings.position_ids", "blip.vision_proj.", "blip.text_proj.")  # no part of the score


@dataclass(frozen=True, kw_only=True)
class ImageReward:
    """How well people would like the picture for its prompt; needs no reference."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    weights: str = "THUDM/ImageReward"  # or a local file, or a folder with ImageReward.pt
    tokenizer: str = "google-bert/bert-base-uncased"  # or a local folder
    device: str = "auto"

    def missing(self) -> Sequence[str]:
        return [
            *absent_packages("torchvision", extra="rewards"),
            *absent_file("weights", self.weights, FILE),
            *absent_file("tokenizer", self.tokenizer, "tokenizer_config.json"),
        ]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        device = device_of(self.device)
        text = self._tokens(
            [prompt.text for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        ).to(device)
        pixels = torch.stack([self._pixels(image) for image in media.pil()]).to(device)
        return (self._network(pixels, text["input_ids"], text["attention_mask"]) - MEAN) / STD

    @cached_property
    def _network(self) -> Network:
        path = located(self.weights, FILE) or hf_hub_download(self.weights, FILE)
        state = torch.load(path, map_location="cpu", weights_only=True)
        return read(state, str(path)).to(device_of(self.device))

    @cached_property
    def _tokens(self) -> Any:
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(self.tokenizer)
        tokens.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})  # BLIP's last rows
        return tokens

    @cached_property
    def _pixels(self) -> Callable[[Image.Image], Tensor]:
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

        size = VISION["image_size"]
        crop = (Resize(size, InterpolationMode.BICUBIC), CenterCrop(size))
        return Compose([*crop, ToTensor(), Normalize(PIXEL_MEAN, PIXEL_STD)])


class Network(nn.Module):
    """Pixels [N, 3, 224, 224] and tokens [N, 35] with their mask -> raw rewards [N]."""

    def __init__(self) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.vision = BlipVisionModel(BlipVisionConfig(**VISION))
        self.text = BlipTextModel(BlipTextConfig(**TEXT), add_pooling_layer=False)
        self.head = Head(TEXT["hidden_size"])

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        seen = self.vision(pixel_values=pixels).last_hidden_state
        states = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=seen).last_hidden_state
        return self.head(states[:, 0])


def published(name: str) -> str:
    """What a parameter of `Network` is called in the published file."""
    for ours, theirs in PUBLISHED.items():
        name = name.replace(ours, theirs)
    return name


def read(state: dict[str, Tensor], source: str) -> Network:
    """The network of a published state. ValueError: its keys or shapes are others."""
    network = Network().eval()
    state = {key: value for key, value in state.items() if not key.startswith(UNUSED)}
    wanted = network.state_dict()
    exactly(state, {published(name): value for name, value in wanted.items()}, source)
    network.load_state_dict({name: state[published(name)] for name in wanted})
    return network
