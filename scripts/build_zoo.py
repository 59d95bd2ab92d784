"""Build an embedded model from nothing: a stock pipeline directory, trained on the scenes of flowrl/zoo/shapes.py.

    python scripts/build_zoo.py [shapes-sd3 | shapes-sana] [--out flowrl/zoo/assets/MODEL] [--work runs/zoo/MODEL]

Three stages, each skipped where its result is there: the autoencoder (13 minutes on one core), the cached latents (4
minutes), the transformer (30 to 45 minutes on two cores; a checkpoint every 500 steps). Deterministic in (seed,
machine).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, Gemma2Config, Gemma2Model

from flowrl.zoo import shapes, verifier

SEED = 0
TOKENS = 16
SCENES = 40_000
LR = 1.5e-3
Reader = Callable[[Tensor], tuple[Tensor, ...]]  # rows of a list of texts -> what the network is given of them


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


@torch.no_grad()
def latents_of(model, vae, pictures: Tensor) -> Tensor:
    """Normalised latents [N, 8, 8, 8] of pictures [N, 3, 64, 64]."""
    z = torch.cat([model.encode(vae, to_float(part)) for part in pictures.split(128)])
    return (z - getattr(vae.config, "shift_factor", 0)) * vae.config.scaling_factor


@torch.no_grad()
def pictures_of(vae, z: Tensor) -> Tensor:
    """[N, 3, 64, 64] uint8 pictures of normalised latents."""
    z = z / vae.config.scaling_factor + getattr(vae.config, "shift_factor", 0)
    return torch.cat([to_uint8(vae.decode(part).sample) for part in z.split(64)])


def train_autoencoder(model, work: Path, steps: int, noise: float = 0.08):
    torch.manual_seed(SEED)
    vae = model.new_autoencoder()
    if (work / "vae" / "config.json").exists():
        return type(vae).from_pretrained(work / "vae")
    pictures, _ = render(12_000, SEED + 1)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-3)
    g, start = torch.Generator().manual_seed(SEED), time.time()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        x = to_float(pictures[torch.randint(len(pictures), (32,), generator=g)])
        with torch.autocast("cpu", torch.bfloat16):
            z = model.encode(vae, x)
            scale = z.float().std().detach()
            y = vae.decode(z + noise * scale * torch.randn(z.shape, generator=g)).sample.float()
        # the small penalties keep the latents at unit scale and around 0
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 1e-3 * (z.float().square().mean() - 1).square()
        loss = loss + model.centring * z.float().mean().square()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            log(work, ae_step=step, loss=loss.item(), scale=scale.item(), s=time.time() - start)
    vae.eval()
    with torch.no_grad():
        z = torch.cat([model.encode(vae, to_float(p)) for p in pictures[:4000].split(200)])
    vae.register_to_config(**model.normaliser(z))
    vae.save_pretrained(work / "vae")
    held, scenes = render(1000, SEED + 2, "heldout")
    log(work, ae_strict_truth=verifier.verify(held, scenes)[1].mean().item(),
        ae_strict=verifier.verify(pictures_of(vae, latents_of(model, vae, held)), scenes)[1].mean().item(),
        mean=z.mean().item(), std=z.std().item())  # fmt: skip
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


# --- the two models ---------------------------------------------------------------------------------------------------


class SD3:
    """A StableDiffusion3Pipeline whose text encoders are frozen and random."""

    centring: ClassVar[float] = 0.0

    @staticmethod
    def new_autoencoder() -> AutoencoderKL:
        return AutoencoderKL(
            block_out_channels=(16, 32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=8, norm_num_groups=8,
            mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, sample_size=64,
            scaling_factor=1.0, shift_factor=0.0,
        )  # fmt: skip

    @staticmethod
    def encode(vae: AutoencoderKL, x: Tensor) -> Tensor:
        return vae.encode(x).latent_dist.mean

    @staticmethod
    def normaliser(z: Tensor) -> dict[str, float]:
        return {"scaling_factor": float(1 / z.std()), "shift_factor": float(z.mean())}

    @staticmethod
    def assemble(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
        tokenizer = new_tokenizer()
        encoders = [new_text_encoder(tokenizer, 48, SEED + 11), new_text_encoder(tokenizer, 64, SEED + 12)]
        torch.manual_seed(SEED)
        transformer = SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=8, out_channels=8, num_layers=4, attention_head_dim=32,
            num_attention_heads=4, joint_attention_dim=112, caption_projection_dim=128, pooled_projection_dim=112,
            pos_embed_max_size=8, qk_norm="rms_norm",
        )  # fmt: skip
        return StableDiffusion3Pipeline(
            transformer=transformer, vae=vae, scheduler=new_scheduler(),
            text_encoder=encoders[0], text_encoder_2=encoders[1], text_encoder_3=None,
            tokenizer=tokenizer, tokenizer_2=tokenizer, tokenizer_3=None,
        )  # fmt: skip

    @staticmethod
    def trained(pipe: StableDiffusion3Pipeline) -> list[nn.Module]:
        return [pipe.transformer]

    @staticmethod
    def reader(pipe: StableDiffusion3Pipeline, texts: list[str]) -> Reader:
        """Rows -> stock embeddings [B, TOKENS + 1, width] (one zero row for the absent T5) and pooled [B, width]."""
        with torch.no_grad():
            sequence, _, pooled, _ = pipe.encode_prompt(
                texts, None, None, do_classifier_free_guidance=False, max_sequence_length=1, device="cpu"
            )
        return lambda rows: (sequence[rows], pooled[rows])

    @staticmethod
    def velocity(pipe: StableDiffusion3Pipeline, x: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        return pipe.transformer(x, sequence, pooled, t * 1000, return_dict=False)[0]


class Sana:
    """A SanaPipeline whose text encoder, a small Gemma 2, is trained with the transformer."""

    centring: ClassVar[float] = 1e-2  # weight of a penalty: the stock pipeline has no shift

    @staticmethod
    def new_autoencoder() -> AutoencoderDC:
        return AutoencoderDC(
            latent_channels=8, encoder_block_out_channels=(16, 48, 64, 64), decoder_block_out_channels=(16, 48, 64, 64),
            encoder_layers_per_block=(0, 1, 1, 1), decoder_layers_per_block=(0, 2, 2, 2),
            encoder_qkv_multiscales=((),) * 4, decoder_qkv_multiscales=((),) * 4,
        )  # fmt: skip

    @staticmethod
    def encode(vae: AutoencoderDC, x: Tensor) -> Tensor:
        return vae.encode(x).latent

    @staticmethod
    def normaliser(z: Tensor) -> dict[str, float]:
        return {"scaling_factor": float(1 / z.std())}

    @staticmethod
    def assemble(vae: AutoencoderDC) -> SanaPipeline:
        tokenizer = new_tokenizer()
        torch.manual_seed(SEED)
        encoder = Gemma2Model(Gemma2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, head_dim=16, query_pre_attn_scalar=16,
            max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ))  # fmt: skip
        transformer = SanaTransformer2DModel(
            in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=32, num_layers=6,
            num_cross_attention_heads=4, cross_attention_head_dim=32, cross_attention_dim=128, caption_channels=64,
            sample_size=8, interpolation_scale=1,
        )  # fmt: skip
        return SanaPipeline(tokenizer, encoder, vae, transformer, new_scheduler())

    @staticmethod
    def trained(pipe: SanaPipeline) -> list[nn.Module]:
        return [pipe.transformer, pipe.text_encoder]

    @staticmethod
    def reader(pipe: SanaPipeline, texts: list[str]) -> Reader:
        """Rows -> embeddings [B, TOKENS, width] of the encoder as it stands, and their mask [B, TOKENS]."""
        read = pipe.tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
        ids, mask = read.input_ids, read.attention_mask
        return lambda rows: (pipe.text_encoder(ids[rows], attention_mask=mask[rows])[0], mask[rows])

    @staticmethod
    def velocity(pipe: SanaPipeline, x: Tensor, t: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
        return pipe.transformer(x, sequence, t * 1000, encoder_attention_mask=mask, return_dict=False)[0]


MODELS: dict[str, Any] = {"shapes-sd3": SD3, "shapes-sana": Sana}


def new_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Stretched, so that 8 steps are even and none of them is wasted near 0."""
    return FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=0.125)


# --- transformer -----------------------------------------------------------------------------------------------------


def cached(model, work: Path, vae, name: str, count: int, seed: int, split: str) -> tuple[Tensor, list[str]]:
    """Normalised latents [count, 8, 8, 8] of random scenes and their prompts, kept in the work folder."""
    path = work / f"{name}.pt"
    if not path.exists():
        pictures, scenes = render(count, seed, split)
        torch.save({"z": latents_of(model, vae, pictures), "texts": [shapes.text(s) for s in scenes]}, path)
    saved = torch.load(path)
    return saved["z"], saved["texts"]


def flow_loss(model, pipe, x0: Tensor, t: Tensor, eps: Tensor, reader: Reader, rows: Tensor) -> Tensor:
    """[B] mean squared error of the velocity at x_t = (1 - t) x0 + t eps."""
    like = t.view(-1, 1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        v = model.velocity(pipe, (1 - like) * x0 + like * eps, t, *reader(rows))
    return (v.float() - (eps - x0)).square().mean((1, 2, 3))


@torch.no_grad()
def generate(model, pipe, text: tuple[Tensor, ...], noise: Tensor, steps: int) -> Tensor:
    """[N, 3, 64, 64] uint8 pictures by Euler steps on a uniform grid, without guidance."""
    x, grid = noise, torch.linspace(1, 0, steps + 1)
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            v = model.velocity(pipe, x, t.expand(len(x)), *text)
        x = x + (s - t) * v.float()
    return pictures_of(pipe.vae, x)


def train_transformer(model, work: Path, pipe, steps: int, batch: int = 64) -> None:
    """Flow matching with logit-normal t, 10 % empty prompts, cosine learning rate and averaged weights."""
    network = nn.ModuleList(model.trained(pipe)).train()
    z, texts = cached(model, work, pipe.vae, "train", SCENES, SEED + 3, "train")
    held_z, held_texts = cached(model, work, pipe.vae, "validation", 512, SEED + 4, "validation")
    names = ["", *sorted(set(texts) | set(held_texts))]
    index = {text: i for i, text in enumerate(names)}
    reader = model.reader(pipe, names)
    rows, held_rows = (torch.tensor([index[t] for t in some]) for some in (texts, held_texts))

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
        loss = flow_loss(model, pipe, z[pick], t, torch.randn(z[pick].shape, generator=g), reader, row).mean()
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
            with torch.no_grad(), swapped(network, average):
                seen = validate(model, pipe, held_z, reader, held_rows)
            log(work, step=step + 1, loss=loss.item(), **seen, s=time.time() - start)
    with torch.no_grad():
        torch._foreach_copy_(list(network.parameters()), average)
    network.eval()


@contextmanager
def swapped(network: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """The network with other weights inside, its own afterwards."""
    live = [p.clone() for p in network.parameters()]
    torch._foreach_copy_(list(network.parameters()), weights)
    yield
    torch._foreach_copy_(list(network.parameters()), live)


def validate(model, pipe, z: Tensor, reader: Reader, rows: Tensor) -> dict[str, float]:
    """The loss on held scenes at even times, and the verifier's scores of two pictures a validation prompt."""
    g = torch.Generator().manual_seed(SEED)
    t = (torch.arange(len(z)) + 0.5) / len(z)
    eps = torch.randn(z.shape, generator=g)
    parts = torch.arange(len(z)).split(64)
    loss = torch.cat([flow_loss(model, pipe, z[i], t[i], eps[i], reader, rows[i]) for i in parts]).mean()
    asked = [p for p in shapes.prompts("validation") for _ in range(2)]
    text = model.reader(pipe, [p.text for p in asked])(torch.arange(len(asked)))
    pictures = generate(model, pipe, text, torch.randn(len(asked), 8, 8, 8, generator=g), 8)
    partial, strict = verifier.verify(pictures, [p.metadata["scene"] for p in asked])
    return {"validation": loss.item(), "partial": partial.mean().item(), "strict": strict.mean().item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, nargs="?", default="shapes-sd3")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--ae-steps", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    work, out = args.work or Path("runs/zoo") / args.model, args.out or Path("flowrl/zoo/assets") / args.model
    work.mkdir(parents=True, exist_ok=True)
    model = MODELS[args.model]
    pipe = model.assemble(train_autoencoder(model, work, args.ae_steps))
    train_transformer(model, work, pipe, args.steps)
    pipe.to(dtype=torch.float16).save_pretrained(out)
    for folder in out.glob("tokenizer*"):
        for_transformers_4(folder)
