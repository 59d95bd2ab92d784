"""The two towers of a CLIP model (2103.00020, section 2.3), from open_clip or transformers, and what they are shown.

cosine   cos(f(picture), g(text))          logit   exp(log_scale) cos(f(picture), g(text))

Shape letters: N samples, D dimensions of the shared space.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._pretrained import pretrained

log = logging.getLogger(__name__)

Prepare = Callable[[Media], Tensor]  # N pictures -> what the network sees [N, 3, H, W]


class Towers(ABC):
    """A CLIP model: `prepare` makes its pixels; it reads the first `context` tokens of a text."""

    def __init__(self, network: Any, prepare: Prepare, context: int, device: torch.device) -> None:
        self.network, self.prepare, self.context, self.device = network, prepare, context, device
        self._told = False

    @abstractmethod
    def tokens(self, texts: list[str], length: int) -> Tensor:
        """[N, length], cut or filled up at the end."""

    @abstractmethod
    def see(self, pixels: Tensor) -> Tensor:
        """[N, D]"""

    @abstractmethod
    def read(self, tokens: Tensor) -> Tensor:
        """[N, D]"""

    def cosines(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        """[N] cos(f(picture), g(text))"""
        texts = [prompt.text for prompt in prompts]
        tokens = self.tokens(texts, self.context)
        if not self._told:
            self._tell_cut(texts, tokens)
        return cosine_similarity(self.pictures(media), self.read(tokens.to(self.device)))

    def pictures(self, media: Media) -> Tensor:
        """[N, D] f(picture)"""
        return self.see(self.prepare(media).to(self.device))

    def logits(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        """[N] exp(log_scale) cos(f(picture), g(text))"""
        return self.network.logit_scale.exp() * self.cosines(media, prompts)

    def _tell_cut(self, texts: list[str], tokens: Tensor) -> None:
        """Say once that texts are longer than what is read of them."""
        longer = self.tokens(texts, self.context + 1)[:, :-1]
        cut = int((longer != tokens).any(1).sum())
        if cut:
            log.warning(
                "%d of %d texts have more than %d tokens; their ends are not read", cut, len(texts), self.context
            )
            self._told = True


class OpenTowers(Towers):
    """A model of open_clip, with its tokenizer."""

    def __init__(self, network: Any, tokenizer: Any, prepare: Prepare, device: torch.device) -> None:
        super().__init__(network.eval().to(device), prepare, tokenizer.context_length, device)
        self.tokenizer = tokenizer

    def tokens(self, texts: list[str], length: int) -> Tensor:
        return self.tokenizer(texts, context_length=length)

    def see(self, pixels: Tensor) -> Tensor:
        return self.network.encode_image(pixels)

    def read(self, tokens: Tensor) -> Tensor:
        return self.network.encode_text(tokens)


class HubTowers(Towers):
    """A CLIPModel of transformers, with the tokenizer of `processor`."""

    def __init__(self, model: str, processor: str, prepare: Prepare, device: torch.device) -> None:
        from transformers import AutoTokenizer, CLIPModel

        network = pretrained(CLIPModel, model, "model").to(device)
        super().__init__(network, prepare, network.config.text_config.max_position_embeddings, device)
        self.tokenizer = AutoTokenizer.from_pretrained(processor)

    def tokens(self, texts: list[str], length: int) -> Tensor:
        filled = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
        return self.tokenizer(texts, **filled)["input_ids"]

    def see(self, pixels: Tensor) -> Tensor:
        return self.network.visual_projection(self.network.vision_model(pixel_values=pixels).pooler_output)

    def read(self, tokens: Tensor) -> Tensor:
        return self.network.text_projection(self.network.text_model(input_ids=tokens).pooler_output)


def bicubic(processor: str) -> Prepare:
    """The pictures as the processor's PIL backend prepares them."""
    from packaging.version import Version
    from transformers import AutoImageProcessor, __version__

    pil = {"backend": "pil"} if Version(__version__) >= Version("5.6") else {"use_fast": False}
    prepare = AutoImageProcessor.from_pretrained(processor, **pil)
    how = {"input_data_format": "channels_last", "return_tensors": "pt"}  # not guessed from a picture of one row
    return lambda media: prepare(images=media.pil(), **how)["pixel_values"]


def bilinear(processor: str) -> Prepare:
    """The pictures as Flow-GRPO prepares them for CLIP: float tensors, torchvision's own interpolation, no rounding."""
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize
    from transformers import AutoImageProcessor

    usual = AutoImageProcessor.from_pretrained(processor)
    crop = CenterCrop((usual.crop_size["height"], usual.crop_size["width"]))
    prepare = Compose([Resize(usual.size["shortest_edge"]), crop, Normalize(usual.image_mean, usual.image_std)])
    return lambda media: prepare(media.images.float() / 255)


def check_scale(reward: str, scale: float) -> None:
    """ValueError: not a positive factor."""
    if not 0 < scale < math.inf:
        raise ValueError(f"reward {reward}: scale is {scale}; give a positive factor, 1 leaves the score as it is")
