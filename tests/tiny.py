"""Very small random pipelines, built from config, and runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
)

from flowrl.config import Config, resolve
from flowrl.config_file import override
from tests.either import byte_tokenizer

TOKENS = 12
REWARD = """
import numpy as np


def score(images, prompts, metadata):
    return [round(float(np.asarray(image).mean()) / 255, 3) for image in images]
"""  # rounded, so that a level of one pixel, which may turn on 1e-7 in a latent, is nothing
PROMPTS = ("red", "a cube", "two", "blue sky", "x")


def tiny_sd3(folder: Path, shift: float = 3.0, shift_terminal: float | None = None) -> Path:
    """Save a pipeline of latents [4, 4, 4] and pictures [3, 8, 8], two joint blocks of width 32."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    encoders = [_text_encoder(tokenizer, width) for width in (16, 32)]
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=4, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=48, caption_projection_dim=32, pooled_projection_dim=48,
            pos_embed_max_size=4, qk_norm="rms_norm",
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=4,
            mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, sample_size=8,
            scaling_factor=1.0, shift_factor=0.0,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=shift_terminal),
        text_encoder=encoders[0], text_encoder_2=encoders[1], text_encoder_3=None,
        tokenizer=tokenizer, tokenizer_2=tokenizer, tokenizer_3=None,
    )  # fmt: skip
    with torch.no_grad():  # a fresh projection is so small that every picture is its noise
        pipeline.transformer.proj_out.weight.normal_(std=0.2)
    pipeline.save_pretrained(folder)
    return folder


def tiny_sana(folder: Path, shift: float = 3.0, shift_terminal: float | None = None, **network: Any) -> Path:
    """Save a pipeline of latents [4, 4, 4] and pictures [3, 32, 32], the smallest, that reads text of width 16."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    text = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    sizes = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
        "caption_channels": 16, "sample_size": 4, "interpolation_scale": 1, "qk_norm": "rms_norm_across_heads",
    }  # fmt: skip
    pipeline = SanaPipeline(
        transformer=SanaTransformer2DModel(**{**sizes, **network}),
        vae=AutoencoderDC(
            latent_channels=4, encoder_block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4,
            encoder_layers_per_block=(0, 1, 1, 1), decoder_layers_per_block=(0, 1, 1, 1),
            encoder_qkv_multiscales=((),) * 4, decoder_qkv_multiscales=((),) * 4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=shift_terminal),
        text_encoder=Gemma2Model(text), tokenizer=tokenizer,
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    return folder


def tiny_sd15(folder: Path, prediction: str = "epsilon", **scheduler: Any) -> Path:
    """Save a StableDiffusionPipeline of latents [4, 8, 8] and pictures [3, 16, 16] that reads text of width 16."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    text = _text_encoder(tokenizer, 16)
    encoder = CLIPTextModel(text.config).eval()
    encoder.load_state_dict(text.state_dict(), strict=False)
    pipeline = StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 8), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=4,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=4,
            mid_block_add_attention=False, sample_size=16,
        ),
        scheduler=PNDMScheduler(prediction_type=prediction, **{**settings, "skip_prk_steps": True, **scheduler}),
        text_encoder=encoder, tokenizer=tokenizer, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    return folder


def config(folder: Path, model: Path, *overrides: str) -> Config:
    """A resolved config of a short flow_grpo run on the pipeline at `model`; its files lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, reward = folder / "prompts.txt", folder / "brightness.py"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    reward.write_text(REWARD)
    raw = {
        "run": str(folder / "run"),
        "steps": 3,
        "model": {"name": "sd3", "path": str(model), "max_sequence_length": 1, "lora": {"rank": 4, "alpha": 8}},
        "data": {"prompts": str(prompts), "prompts_per_step": 2, "group_size": 4},
        "sampler": {"steps": 4, "kernel": "flow_sde", "eta": 0.7},
        "rewards": [{"name": f"{reward}:score"}],
        "algorithm": {"name": "flow_grpo", "surrogate": {"clip": 0.1}},
        "optimiser": {"lr": 1e-3},
    }
    return resolve(override(raw, list(overrides)))


NFT = (
    "algorithm={name: nft}",
    "sampler={steps: 4}",
)  # overrides that turn the run into DiffusionNFT on the ODE


def _tokenizer() -> CLIPTokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(letter + "</w>" for letter in alphabet)]
    return byte_tokenizer(pieces, model_max_length=TOKENS)


def _text_encoder(tokenizer: CLIPTokenizer, width: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=TOKENS, projection_dim=width,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    encoder = CLIPTextModelWithProjection(config).eval()
    with torch.no_grad():
        for name, p in encoder.named_parameters():  # as initialised, all texts look nearly alike
            if "embedding" in name:
                p.normal_()
    return encoder
