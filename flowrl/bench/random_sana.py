"""A network in the shape of Sana with random weights, made in memory: what it draws means nothing, its cost does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flowrl.models.base import quiet_loading
from flowrl.models.sana import Sana, SanaAdapter


@dataclass(frozen=True, kw_only=True)
class RandomSana(Sana):
    """The block `model:` of `configs/bench`; a picture has 32 x 32 pixels a token, a prompt one token a byte."""

    path: str = ""
    instruction: bool = False
    width: int = 512
    blocks: int = 8
    caption_channels: int = 2304  # of the text encoder
    tokens: int = 64  # of a picture

    def load(self, device: torch.device, dtype: torch.dtype) -> SanaAdapter:
        with quiet_loading():
            from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
            from tokenizers import Tokenizer, models, pre_tokenizers
            from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

            letters = sorted(pre_tokenizers.ByteLevel.alphabet())
            vocabulary = {piece: i for i, piece in enumerate(["<pad>", *letters])}
            bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
            bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>")
            torch.manual_seed(0)
            text_encoder = Gemma2Model(Gemma2Config(
                vocab_size=len(vocabulary), hidden_size=self.caption_channels, intermediate_size=64,
                num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
                query_pre_attn_scalar=16, pad_token_id=0,
            ))  # fmt: skip
            transformer = SanaTransformer2DModel(
                num_attention_heads=self.width // 32, attention_head_dim=32, num_layers=self.blocks,
                num_cross_attention_heads=self.width // 64, cross_attention_head_dim=64,
                cross_attention_dim=self.width, caption_channels=self.caption_channels,
                sample_size=round(self.tokens**0.5),
            )  # fmt: skip
            vae = AutoencoderDC(
                encoder_block_out_channels=(32,) * 6, decoder_block_out_channels=(32,) * 6,
                encoder_layers_per_block=(0, 0, 0, 0, 0, 1), decoder_layers_per_block=(0, 0, 0, 0, 0, 1),
                encoder_qkv_multiscales=((),) * 6, decoder_qkv_multiscales=((),) * 6,
            )  # fmt: skip
            scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
            pipeline = SanaPipeline(tokenizer, text_encoder, vae, transformer, scheduler)
        for part in (text_encoder, transformer, vae):
            torch.nn.Module.to(part, device, dtype)  # diffusers' own warns of a cast, whatever it is
        return SanaAdapter(self, pipeline)
