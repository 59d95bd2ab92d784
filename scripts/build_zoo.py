"""Build the embedded model `shapes-sd3` from nothing: a stock StableDiffusion3Pipeline directory.

    python scripts/build_zoo.py [--out flowrl/zoo/assets/shapes-sd3] [--work runs/zoo]

Three stages, each skipped where its result is there: the autoencoder (13 minutes on one core), the cached latents (4
minutes), the transformer (30 minutes on two cores; a checkpoint every 500 steps). Deterministic in (seed, machine).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from flowrl.zoo import shapes, verifier

SEED = 0
TOKENS = 16
SCENES = 40_000
LR = 1.5e-3


def log(work: Path, **row: float) -> None:
    with open(work / "log.jsonl", "a") as f:
        f.write(json.dumps(row) + "\n")
    print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)


def render(count: int, seed: int, split: str = "train") -> tuple[Tensor, list[shapes.Scene]]:
    """[count, 3, 64, 64] uint8 pictures of random scenes, and the scenes."""
    rng = np.random.default_rng(seed)
    scenes = [shapes.draw_scene(rng, split) for _ in range(count)]
    pictures = np.stack([shapes.picture(s, rng) for s in scenes])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), scenes


def to_float(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def to_uint8(x: Tensor) -> Tensor:
    return ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


# --- autoencoder -----------------------------------------------------------------------------------------------------


def new_autoencoder() -> AutoencoderKL:
    torch.manual_seed(SEED)
    return AutoencoderKL(
        block_out_channels=(16, 32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=8, norm_num_groups=8,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, sample_size=64,
        scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip


def autoencode(vae: AutoencoderKL, pictures: Tensor, batch: int = 128) -> Tensor:
    with torch.no_grad():
        parts = [vae.decode(vae.encode(to_float(p)).latent_dist.mean).sample for p in pictures.split(batch)]
    return to_uint8(torch.cat(parts))


def train_autoencoder(work: Path, steps: int, noise: float = 0.08) -> AutoencoderKL:
    if (work / "vae" / "config.json").exists():
        return AutoencoderKL.from_pretrained(work / "vae")
    vae, (pictures, _) = new_autoencoder(), render(12_000, SEED + 1)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-3)
    g, start = torch.Generator().manual_seed(SEED), time.time()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        x = to_float(pictures[torch.randint(len(pictures), (32,), generator=g)])
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encode(x).latent_dist.mean
            scale = z.float().std().detach()
            y = vae.decode(z + noise * scale * torch.randn(z.shape, generator=g)).sample.float()
        # the small penalty keeps the latents at unit scale
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 1e-3 * (z.float().square().mean() - 1).square()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            log(work, ae_step=step, loss=loss.item(), scale=scale.item(), s=time.time() - start)
    vae.eval()
    with torch.no_grad():
        z = torch.cat([vae.encode(to_float(p)).latent_dist.mean for p in pictures[:4000].split(200)])
    vae.register_to_config(scaling_factor=float(1 / z.std()), shift_factor=float(z.mean()))
    vae.save_pretrained(work / "vae")
    held, scenes = render(1000, SEED + 2, "heldout")
    log(work, ae_strict_truth=verifier.verify(held, scenes)[1].mean().item(),
        ae_strict=verifier.verify(autoencode(vae, held), scenes)[1].mean().item())  # fmt: skip
    return vae


# --- text ------------------------------------------------------------------------------------------------------------


def new_tokenizer() -> CLIPTokenizer:
    """A CLIP byte-pair tokenizer in which every word of the grammar is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = [*shapes.COLOURS, *shapes.SHAPES, *(s + "s" for s in shapes.SHAPES), *shapes.NUMBERS, "and", "the", "to",
             *{w for r in shapes.RELATIONS for w in r.split()}]  # fmt: skip
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix="</w>",
                                  show_progress=False)  # fmt: skip
    bpe.train_from_iterator([sorted(words)] * 4, trainer)
    merges = [tuple(m) for m in json.loads(bpe.to_str())["model"]["merges"]]
    pieces = [*alphabet, *(a + "</w>" for a in alphabet), *("".join(m) for m in merges)]
    vocabulary = {piece: i for i, piece in enumerate(["<|startoftext|>", "<|endoftext|>", *dict.fromkeys(pieces)])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "vocab.json").write_text(json.dumps(vocabulary))
        (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in merges) + "\n")
        tokenizer = CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=TOKENS)
    assert all(len(tokenizer(word).input_ids) == 3 for word in words)
    return tokenizer


def for_transformers_4(folder: Path) -> None:
    """Beside what transformers 5 saves of a tokenizer or a processor, what transformers 4 looks for."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    if config["tokenizer_class"] == "CLIPTokenizer":
        (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False) + "\n")
        merges = "\n".join(" ".join(pair) for pair in model["merges"])
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    else:
        config.pop("backend", None)
        config |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": config.pop("extra_special_tokens", []),
            "model_input_names": ["input_ids", "attention_mask"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (folder / "processor_config.json").exists():
        image = json.loads((folder / "processor_config.json").read_text())["image_processor"]
        (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")


def new_text_encoder(tokenizer: CLIPTokenizer, width: int, seed: int) -> CLIPTextModelWithProjection:
    """A frozen random encoder: its residual stream carries the tokens and their places, its attention mixes them."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=width // 16, max_position_embeddings=TOKENS, projection_dim=width,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    encoder = CLIPTextModelWithProjection(config).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in encoder.named_parameters():
            if "embedding" in name:
                p.copy_(torch.randn(p.shape, generator=g))
            elif p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=g) * 1.5 / p.shape[1] ** 0.5)
    return encoder


def new_transformer(text_width: int, pooled_width: int) -> SD3Transformer2DModel:
    torch.manual_seed(SEED)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=8, out_channels=8, num_layers=4, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=text_width, caption_projection_dim=128,
        pooled_projection_dim=pooled_width, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip


def assemble(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    tokenizer = new_tokenizer()
    encoders = [new_text_encoder(tokenizer, 48, SEED + 11), new_text_encoder(tokenizer, 64, SEED + 12)]
    return StableDiffusion3Pipeline(
        transformer=new_transformer(112, 112), vae=vae,
        # stretched, so that 8 steps are even and none of them is wasted near 0
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=0.125),
        text_encoder=encoders[0], text_encoder_2=encoders[1], text_encoder_3=None,
        tokenizer=tokenizer, tokenizer_2=tokenizer, tokenizer_3=None,
    )  # fmt: skip


# --- transformer -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_texts(pipe: StableDiffusion3Pipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Stock prompt embeddings [P, TOKENS + 1, width] (one zero row for the absent T5) and pooled [P, width]."""
    sequence, _, pooled, _ = pipe.encode_prompt(
        texts, None, None, do_classifier_free_guidance=False, max_sequence_length=1, device="cpu"
    )
    return sequence, pooled


@torch.no_grad()
def latents(work: Path, vae: AutoencoderKL, name: str, count: int, seed: int, split: str) -> tuple[Tensor, list[str]]:
    """Normalised latents [count, 8, 8, 8] of random scenes and their prompts, cached in the work folder."""
    path = work / f"{name}.pt"
    if not path.exists():
        pictures, scenes = render(count, seed, split)
        z = torch.cat([vae.encode(to_float(p)).latent_dist.mean for p in pictures.split(128)])
        z = (z - vae.config.shift_factor) * vae.config.scaling_factor
        torch.save({"z": z, "texts": [shapes.text(s) for s in scenes]}, path)
    saved = torch.load(path)
    return saved["z"], saved["texts"]


def flow_loss(
    network: SD3Transformer2DModel, x0: Tensor, t: Tensor, eps: Tensor, text: tuple[Tensor, Tensor]
) -> Tensor:
    """[B] mean squared error of the velocity at x_t = (1 - t) x0 + t eps."""
    like = t.view(-1, 1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        v = network((1 - like) * x0 + like * eps, text[0], text[1], t * 1000, return_dict=False)[0]
    return (v.float() - (eps - x0)).square().mean((1, 2, 3))


@torch.no_grad()
def generate(network, vae, text: tuple[Tensor, Tensor], noise: Tensor, steps: int) -> Tensor:
    """[N, 3, 64, 64] uint8 pictures by Euler steps on a uniform grid, without guidance."""
    x, grid = noise, torch.linspace(1, 0, steps + 1)
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            v = network(x, text[0], text[1], t.expand(len(x)) * 1000, return_dict=False)[0]
        x = x + (s - t) * v.float()
    z = x / vae.config.scaling_factor + vae.config.shift_factor
    return torch.cat([to_uint8(vae.decode(part).sample) for part in z.split(64)])


def train_transformer(work: Path, pipe: StableDiffusion3Pipeline, steps: int, batch: int = 64) -> None:
    """Flow matching with logit-normal t, 10 % empty prompts, cosine learning rate and averaged weights."""
    network, vae = pipe.transformer.train(), pipe.vae
    z, texts = latents(work, vae, "train", SCENES, SEED + 3, "train")
    held_z, held_texts = latents(work, vae, "validation", 512, SEED + 4, "validation")
    names = ["", *sorted(set(texts) | set(held_texts))]
    index = {text: i for i, text in enumerate(names)}
    table, pooled = encode_texts(pipe, names)
    rows, held_rows = (torch.tensor([index[t] for t in some]) for some in (texts, held_texts))
    asked = shapes.prompts("validation")
    asked_text = encode_texts(pipe, [p.text for p in asked for _ in range(2)])

    average = [p.detach().clone() for p in network.parameters()]
    optimiser = torch.optim.AdamW(network.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    first, path = 0, work / "transformer.pt"
    if path.exists():
        saved = torch.load(path)
        network.load_state_dict(saved["network"])
        optimiser.load_state_dict(saved["optimiser"])
        average, first = saved["average"], saved["step"]
    start = time.time()
    for step in range(first, steps):
        g = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        rate = LR * min(1, (step + 1) / 200) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        pick = torch.randint(len(z), (batch,), generator=g)
        row = rows[pick] * (torch.rand(batch, generator=g) >= 0.1)
        t = torch.randn(batch, generator=g).sigmoid()
        loss = flow_loss(network, z[pick], t, torch.randn(z[pick].shape, generator=g), (table[row], pooled[row])).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        live = [p.detach() for p in network.parameters()]
        torch._foreach_lerp_(average, live, 1 - min(0.999, (step + 1) / (step + 10)))
        if (step + 1) % 500 == 0:
            torch.save({"network": network.state_dict(), "optimiser": optimiser.state_dict(), "average": average,
                        "step": step + 1}, work / "partial.pt")  # fmt: skip
            (work / "partial.pt").replace(path)
            with torch.no_grad():
                live = [p.clone() for p in live]
                torch._foreach_copy_(list(network.parameters()), average)
                g = torch.Generator().manual_seed(SEED)
                t = (torch.arange(len(held_z)) + 0.5) / len(held_z)
                eps = torch.randn(held_z.shape, generator=g)
                text = (table[held_rows], pooled[held_rows])
                parts = torch.arange(len(held_z)).split(64)
                validation = torch.cat(
                    [flow_loss(network, held_z[i], t[i], eps[i], (text[0][i], text[1][i])) for i in parts]
                ).mean()
                pictures = generate(network, vae, asked_text, torch.randn(len(asked) * 2, 8, 8, 8, generator=g), 8)
                torch._foreach_copy_(list(network.parameters()), live)
            partial, strict = verifier.verify(pictures, [p.metadata["scene"] for p in asked for _ in range(2)])
            log(work, step=step + 1, loss=loss.item(), validation=validation.item(), partial=partial.mean().item(),
                strict=strict.mean().item(), s=time.time() - start)  # fmt: skip
    with torch.no_grad():
        torch._foreach_copy_(list(network.parameters()), average)
    network.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("flowrl/zoo/assets/shapes-sd3"))
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--ae-steps", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pipe = assemble(train_autoencoder(args.work, args.ae_steps))
    train_transformer(args.work, pipe, args.steps)
    pipe.to(dtype=torch.float16).save_pretrained(args.out)
    for name in ("tokenizer", "tokenizer_2"):
        for_transformers_4(args.out / name)
