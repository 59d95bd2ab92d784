"""Build the embedded judges of `shapes` from nothing: `shapes-clip` for open_clip and `shapes-vlm` for transformers.

    python scripts/build_zoo_judges.py [--out flowrl/zoo/assets] [--work runs/zoo]

Four stages, each skipped where its result is there: pictures (true scenes through the autoencoder of `shapes-sd3`,
whole and damaged, and samples of `shapes-sd3`, all labelled by the rule-based verifier), the CLIP model, the language
model on the frozen image tower of the CLIP model, and what they reach. A training is resumed from its last 500 steps.
Deterministic in (seed, machine). Only training combinations are asked for, shown as captions or asked about.

Shape letters: B pictures, K captions or questions of one, U different captions, L tokens, P patches.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import build_zoo
import numpy as np
import open_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)  # fmt: skip

from flowrl.models.sd3 import SD3
from flowrl.zoo import captions, questions, shapes, verifier

SEED = 100
PATCH = 8
WIDTH, LAYERS, HEADS = 96, 4, 4  # of the image tower
EMBEDDING = 128
TEXT_WIDTH = 64
CONTEXT = 12
CANDIDATES = 8
POOL, ASKED = 12, 6  # questions a picture has, and those of one step
SLOT = 22  # tokens of the longest question
THINGS = [(colour, shape) for colour in shapes.COLOURS for shape in shapes.SHAPES]
Look = tuple[list[verifier.Seen], int]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PAD, BOS = 0, 1  # the places of the first two
IMAGE = "<image>"
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)


# --- pictures --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def damaged(adapter: Any, z: Tensor, g: torch.Generator) -> Tensor:
    """[N, 3, 64, 64] uint8 of latents, each with noise, one in five mixed with another."""
    share = torch.rand(len(z), 1, 1, 1, generator=g) * 0.5 * (torch.rand(len(z), 1, 1, 1, generator=g) < 0.2)
    noise = torch.rand(len(z), 1, 1, 1, generator=g) * 0.4 * torch.randn(z.shape, generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        return adapter.decode(z + share * (z.roll(1, 0) - z) + noise)


@torch.no_grad()
def sampled(adapter: Any, texts: list[str], g: torch.Generator) -> Tensor:
    """[N, 3, 64, 64] uint8 of the base model, 8 Euler steps, no guidance."""
    noise = torch.randn(len(texts), *adapter.latent.shape, generator=g)
    parts = []
    for start in range(0, len(texts), 64):
        rows = slice(start, start + 64)
        read = build_zoo.SD3.reader(adapter.pipeline, texts[rows])
        text = read(torch.arange(len(texts[rows])))
        parts.append(build_zoo.generate(build_zoo.SD3, adapter.pipeline, text, noise[rows], 8))
    return torch.cat(parts)


def pictures(work: Path, plain: int = 3000, blurred: int = 12_000, samples: int = 5000) -> dict[str, Any]:
    """images [N, 3, 64, 64] uint8, each also mirrored; asked: N scenes; looks: N x (objects, junk)."""
    path = work / "judges" / "pictures.pt"
    if not path.exists():
        adapter = SD3(path="shapes-sd3", max_sequence_length=1).load(torch.device("cpu"), torch.float32)
        g, rng = torch.Generator().manual_seed(SEED), np.random.default_rng(SEED)
        scene_of = {shapes.text(s): s for some in shapes.scenes("train").values() for s in some}
        renders, asked = build_zoo.render(plain, SEED)
        z, texts = build_zoo.cached(
            build_zoo.SD3, work, adapter.pipeline.vae, "train", build_zoo.SCENES, build_zoo.SEED + 3, "train"
        )
        wished = [shapes.draw_scene(rng) for _ in range(samples)]
        images = torch.cat([
            renders, damaged(adapter, z[:blurred], g), sampled(adapter, [shapes.text(s) for s in wished], g),
        ])  # fmt: skip
        asked += [scene_of[text] for text in texts[:blurred]] + wished
        looks = [verifier.look(image.permute(1, 2, 0).numpy()) for image in images]
        plain_looks = [([(s.colour, s.shape, float(s.x), float(s.y)) for s in seen], junk) for seen, junk in looks]
        torch.save({"images": images, "asked": asked, "looks": plain_looks}, path)
    saved = torch.load(path)
    looks = [([verifier.Seen(*thing) for thing in seen], junk) for seen, junk in saved["looks"]]
    mirrored = [
        ([verifier.Seen(s.colour, s.shape, shapes.SIZE - s.x, s.y) for s in seen], junk) for seen, junk in looks
    ]
    other = {"left of": "right of", "right of": "left of"}
    asked = [{**s, "relation": other.get(s["relation"], s["relation"])} for s in saved["asked"]]
    asked = [
        s if captions.split_of()[shapes.text(s)] == "train" else t for s, t in zip(asked, saved["asked"], strict=True)
    ]
    return {
        "images": torch.cat([saved["images"], saved["images"].flip(3)]),
        "asked": saved["asked"] + asked, "looks": looks + mirrored,
    }  # fmt: skip


def places(looks: Sequence[Look]) -> Tensor:
    """[N, P] what has its middle in each patch: 0 nothing, else 1 + the number of the colour and shape."""
    found = torch.zeros(len(looks), shapes.SIZE // PATCH, shapes.SIZE // PATCH, dtype=torch.long)
    for row, (seen, _) in zip(found, looks, strict=True):
        for s in seen:
            row[int(s.y // PATCH), int(s.x // PATCH)] = 1 + THINGS.index((s.colour, s.shape))
    return found.flatten(1)


def contents(looks: Sequence[Look]) -> Tensor:
    """[N, things, 3] the number of each thing, and the sum of its x and y, from -2 to 2."""
    found = torch.zeros(len(looks), len(THINGS), 3)
    for row, (seen, _) in zip(found, looks, strict=True):
        for s in seen:
            row[THINGS.index((s.colour, s.shape))] += torch.tensor(
                [1, 4 * s.x / shapes.SIZE - 2, 4 * s.y / shapes.SIZE - 2]
            )
    return found


def meant(scene: shapes.Scene) -> Tensor:
    """[things, 3] the mean contents of a scene."""
    found = torch.zeros(len(THINGS), 3)
    for (colour, shape, n), sign in zip(scene["objects"], (-1, 1), strict=False):
        x, y = {"left of": (1, 0), "right of": (-1, 0), "above": (0, 1), "below": (0, -1)}.get(
            scene["relation"], (0, 0)
        )
        found[THINGS.index((colour, shape))] = torch.tensor([n, 0.8 * sign * x, 0.8 * sign * y])
    return found


# --- training --------------------------------------------------------------------------------------------------------


def train(
    work: Path, name: str, module: nn.Module, loss: Callable[[torch.Generator], Tensor], steps: int, lr: float,
    check: Callable[[], dict[str, float]],
) -> None:  # fmt: skip
    """AdamW with a warm-up and a cosine; the state is kept every 500 steps."""
    weights = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.98), weight_decay=0.02)
    path, first = work / "judges" / f"{name}.pt", 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["module"])
        optimiser.load_state_dict(saved["optimiser"])
        first = saved["step"]
    start, cpu = time.time(), time.process_time()
    for step in range(first, steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 100) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
        charged = loss(torch.Generator().manual_seed(SEED * 1_000_003 + step))
        optimiser.zero_grad()
        charged.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if (step + 1) % 100 == 0:
            build_zoo.log(work, **{f"{name}_step": step + 1}, loss=charged.item(), s=time.time() - start,
                          cpu=time.process_time() - cpu, **(check() if (step + 1) % 500 == 0 else {}))  # fmt: skip
        if (step + 1) % 500 == 0:
            state = {"module": module.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token a word or sign."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), IMAGE, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    return tokenizer


def grammar() -> list[str]:
    return sorted({word for text in captions.split_of() for word in text.split()})


# --- CLIP ------------------------------------------------------------------------------------------------------------


def save_clip(model: open_clip.CLIP, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({k: v.half().contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")


def new_clip(folder: Path) -> tuple[open_clip.CLIP, dict[str, Any]]:
    """A new model, its configuration, and its tokenizer in the folder."""
    words = word_tokenizer(grammar())
    words.normalizer = normalizers.Lowercase()
    bos, eos = SPECIAL["bos_token"], SPECIAL["eos_token"]
    words.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(t, words.token_to_id(t)) for t in (bos, eos)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=CONTEXT, **SPECIAL)
    tokenizer.save_pretrained(folder)
    build_zoo.for_transformers_4(folder)
    text = {
        "context_length": CONTEXT, "vocab_size": len(tokenizer), "hf_tokenizer_name": folder.name,
        "width": TEXT_WIDTH, "heads": HEADS, "layers": 2, "pool_type": "eos", "eos_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {
        "image_size": shapes.SIZE, "patch_size": PATCH, "width": WIDTH, "layers": LAYERS,
        "head_width": WIDTH // HEADS, "pos_embed_type": "sin_cos_2d",
    }  # fmt: skip
    grey = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
    config = {
        "model_cfg": {"embed_dim": EMBEDDING, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": grey,
    }  # fmt: skip
    torch.manual_seed(SEED)
    return open_clip.CLIP(EMBEDDING, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text)), config


def candidates(data: dict[str, Any]) -> tuple[list[shapes.Scene], Tensor, Tensor]:
    """(captions, their numbers [N, K], whether they are true [N, K]): what is asked, what is true, and near misses."""
    rng, known = np.random.default_rng(SEED + 1), [s for some in shapes.scenes("train").values() for s in some]
    number = {shapes.text(scene): i for i, scene in enumerate(known)}
    rows, truths = [], []
    for asked, look in zip(data["asked"], data["looks"], strict=True):
        true = captions.described(*look)
        told = [s for s in true if shapes.text(s) in number]
        told = [told[i] for i in rng.permutation(len(told))[:2]]
        near = captions.near(told[0] if told else asked, *look, rng, CANDIDATES, {"train"})
        spare = [known[i] for i in rng.integers(len(known), size=CANDIDATES)]
        chosen = {shapes.text(s): s for s in [asked, *told, *near, *spare]}
        some = list(chosen.values())[:CANDIDATES]
        rows.append([number[shapes.text(s)] for s in some])
        truths.append([s in true for s in some])
    return known, torch.tensor(rows), torch.tensor(truths)


class Contrast(nn.Module):
    """The model, and what only its training needs: the bias of a yes, and readers of patches and of embeddings."""

    def __init__(self, clip: open_clip.CLIP) -> None:
        super().__init__()
        self.clip = clip
        clip.visual.output_tokens = True  # not in the configuration: open_clip's encode_image cannot take them
        self.bias = nn.Parameter(torch.tensor(-6.0))
        self.place = nn.Linear(WIDTH, 1 + len(THINGS))
        self.content = nn.Linear(EMBEDDING, 3 * len(THINGS))

    def loss(self, images: Tensor, ids: Tensor, pick: Tensor, truth: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Right among wrong captions, right and wrong apart by one threshold, what is where, and what is there in all.

        images [B, 3, 64, 64], ids [U, L], pick [B, K] in U, truth [B, K] bool,
        told = place [B, P], contents [B, things, 3] of the pictures, meant [U, things, 3] of the captions
        """
        pooled, patches = self.clip.visual(build_zoo.to_float(images))
        words = self.clip.encode_text(ids)
        cosine = torch.einsum("bd,bkd->bk", F.normalize(pooled, dim=-1), F.normalize(words, dim=-1)[pick])
        logits = self.clip.logit_scale.exp() * cosine
        wanted = truth / truth.sum(1, keepdim=True).clamp(min=1)
        among = -(wanted * logits.log_softmax(1)).sum(1).mean()
        weight = torch.where(truth, 0.5 / truth.float().mean(), 0.5 / (1 - truth.float().mean()))
        apart = F.binary_cross_entropy_with_logits(logits + self.bias, truth.float(), weight)
        common = torch.ones(1 + len(THINGS)).index_fill(0, torch.tensor(0), 0.1)
        where = F.cross_entropy(self.place(patches).flatten(0, 1), told["place"].flatten(), common)
        inside = [
            (self.content(vectors) - told[name].flatten(1)).square().sum(1).mean()
            for name, vectors in (("contents", pooled), ("meant", words))
        ]
        return among + apart + where + sum(inside)


def train_clip(work: Path, folder: Path, data: dict[str, Any], steps: int, batch: int = 64) -> float:
    """The cosine above which a caption is true."""
    clip, config = new_clip(folder)
    module, place, content = Contrast(clip), places(data["looks"]), contents(data["looks"])
    scenes, rows, truths = candidates(data)
    save_clip(clip, config, folder)
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")([shapes.text(s) for s in scenes])
    mean = torch.stack([meant(s) for s in scenes])
    exam = examination(work, "validation", 400, 500)

    def loss(g: torch.Generator) -> Tensor:
        b = torch.randint(len(rows), (batch,), generator=g)
        different, pick = rows[b].unique(return_inverse=True)
        told = {"place": place[b], "contents": content[b], "meant": mean[different]}
        return module.loss(data["images"][b], ids[different], pick, truths[b], told)

    def check() -> dict[str, float]:
        save_clip(clip, config, folder)
        return examine_clip(folder, exam, calibrated(folder, exam))

    train(work, "clip", module, loss, steps, 2e-3, check)
    save_clip(clip, config, folder)
    return calibrated(folder, exam)


# --- the language model ----------------------------------------------------------------------------------------------


def new_vlm(folder: Path, clip: open_clip.CLIP) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A new model on the image tower of CLIP, which stays as it is, and its processor."""
    asked = ["Does", "this", "image", "match", "the", "caption", "Is", "Are", "there", "Answer", "Yes", "or", "No"]
    words = word_tokenizer([*grammar(), *asked, *'?."'])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=256, additional_special_tokens=[IMAGE], padding_side="left", **SPECIAL
    )
    side = {"height": shapes.SIZE, "width": shapes.SIZE}
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": shapes.SIZE}, crop_size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = LlavaProcessor(
        image_processor, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", chat_template=CHAT,
        num_additional_image_tokens=1,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        image_size=shapes.SIZE, patch_size=PATCH, hidden_act="gelu", projection_dim=EMBEDDING,
    )  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=3 * TEXT_WIDTH, num_hidden_layers=4,
        num_attention_heads=HEADS, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1,
        pad_token_id=ids["pad_token"], bos_token_id=ids["bos_token"], eos_token_id=ids["eos_token"],
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = LlavaForConditionalGeneration(LlavaConfig(
        vision_config=vision, text_config=text, vision_feature_layer=-1, image_seq_length=(shapes.SIZE // PATCH) ** 2,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    ))  # fmt: skip
    model.model.vision_tower.load_state_dict(tower(clip.visual))
    model.model.vision_tower.requires_grad_(False)
    processor.save_pretrained(folder)
    build_zoo.for_transformers_4(folder)
    return model, processor


def tower(visual: nn.Module) -> dict[str, Tensor]:
    """The weights of open_clip's image tower under the names of transformers."""
    names = {
        "conv1": "embeddings.patch_embedding", "ln_pre": "pre_layrnorm", "ln_post": "post_layernorm",
        "ln_1": "layer_norm1", "ln_2": "layer_norm2", "c_fc": "fc1", "c_proj": "fc2", "attn": "self_attn",
    }  # fmt: skip
    state = {}
    for name, value in visual.state_dict().items():
        if name == "class_embedding":
            state["embeddings.class_embedding"] = value
        elif name == "positional_embedding":
            state["embeddings.position_embedding.weight"] = value
        elif "in_proj" in name:
            layer, kind = name.split(".")[2], name.rsplit("_", 1)[1]
            for part, some in zip("qkv", value.chunk(3), strict=True):
                state[f"encoder.layers.{layer}.self_attn.{part}_proj.{kind}"] = some
        elif name != "proj":
            parts = [names.get(part, part) for part in name.split(".") if part != "mlp"]
            fixed = ".".join(parts).replace("transformer.resblocks", "encoder.layers")
            state[fixed.replace("fc", "mlp.fc")] = value
    return state


def pool(data: dict[str, Any]) -> tuple[list[str], Tensor, Tensor]:
    """(texts, their numbers [N, POOL], the answers [N, POOL]): about what was asked for, and drawn of each kind."""
    rng, number = np.random.default_rng(SEED + 2), {}
    rows, answers = [], []
    for asked, look in zip(data["asked"], data["looks"], strict=True):
        question = questions.Question("match", asked)
        some = [(question, question.answer(*look))]
        while len(some) < POOL:
            kind = questions.KINDS[int(rng.choice(3, p=(0.4, 0.25, 0.35)))] if not look[1] else "match"
            drawn = questions.draw(kind, *look, rng, {"train"})
            some.append(drawn if drawn else some[0])
        rows.append([number.setdefault(q.text, len(number)) for q, _ in some])
        answers.append([answer for _, answer in some])
    return list(number), torch.tensor(rows), torch.tensor(answers)


def packed(prefix: int, slots: int) -> tuple[Tensor, Tensor]:
    """(mask [1, 1, L, L], positions [1, L]) of one prefix and questions that see it and themselves alone."""
    slot = torch.cat([torch.full((prefix,), -1), torch.arange(slots).repeat_interleave(SLOT)])
    position = torch.cat([torch.arange(prefix), prefix + torch.arange(SLOT).repeat(slots)])
    seen = (slot == -1)[None, :] | (slot[:, None] == slot[None, :])
    allowed = seen & (position[:, None] >= position[None, :])
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None], position[None]


def mentions(tokenizer: PreTrainedTokenizerFast, ids: Tensor) -> Tensor:
    """[U, SLOT] the number of the thing that a question names up to this token, -1 elsewhere."""
    found = torch.full(ids.shape, -1)
    for number, (colour, shape) in enumerate(THINGS):
        first, *last = tokenizer.convert_tokens_to_ids([colour, shape, f"{shape}s"])
        found[:, 1:][(ids[:, :-1] == first) & torch.isin(ids[:, 1:], torch.tensor(last))] = number
    return found


class Grounded(nn.Module):
    """The model, and what only its training needs: a reader of what it has found in the picture."""

    def __init__(self, vlm: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.vlm = vlm
        self.content = nn.Linear(TEXT_WIDTH, 3)
        self.answers = tokenizer.convert_tokens_to_ids(["No", "Yes"])
        self.words = tokenizer.convert_tokens_to_ids([*shapes.COLOURS, *shapes.SHAPES])

    def loss(self, features: Tensor, ids: Tensor, answers: Tensor, told: dict[str, Tensor]) -> Tensor:
        """The answer after each question, the words of those with a Yes, the words for what is in a patch, and, half
        way through the layers, what there is of each thing that a question names.

        features [B, P, width], ids [B, K, SLOT] padded on the right, answers [B, K] bool,
        told = said [B, P, words], contents [B, things, 3], mentions [B, K, SLOT]
        """
        embed = self.vlm.get_input_embeddings()
        images = self.vlm.model.multi_modal_projector(features)
        prefix = torch.cat([embed(torch.full((len(features), 1), BOS)), images], 1)
        mask, position = packed(prefix.shape[1], ids.shape[1])
        states = self.vlm.model.language_model(
            inputs_embeds=torch.cat([prefix, embed(ids).flatten(1, 2)], 1), attention_mask=mask, position_ids=position,
            output_hidden_states=True,
        ).hidden_states  # fmt: skip
        middle, end = (some[:, prefix.shape[1] :].unflatten(1, ids.shape[1:]) for some in (states[2], states[-1]))
        logits = self.vlm.lm_head(end)  # [B, K, SLOT, V]
        last = (ids != PAD).sum(2)[..., None, None] - 1
        final = logits.take_along_dim(last, 2).flatten(0, 2)
        answer = F.cross_entropy(final, torch.tensor(self.answers)[answers.long()].flatten())
        follows = ids[:, :, 1:].masked_fill(~answers[..., None], PAD)
        words = F.cross_entropy(logits[:, :, :-1].flatten(0, 2), follows.flatten(), ignore_index=PAD)
        spoken = images @ embed.weight[self.words].T
        patches = F.binary_cross_entropy_with_logits(spoken, told["said"], pos_weight=torch.tensor(10.0))
        row, slot, token = (told["mentions"] >= 0).nonzero(as_tuple=True)
        there = told["contents"][row, told["mentions"][row, slot, token]]
        found = (self.content(middle[row, slot, token]) - there).square().sum(1).mean()
        return answer + 0.3 * words + patches + 0.3 * found


def train_vlm(work: Path, clip_folder: Path, folder: Path, data: dict[str, Any], steps: int, batch: int = 32) -> None:
    vlm, processor = new_vlm(folder, open_clip.create_model(f"local-dir:{clip_folder}"))
    tokenizer, module = processor.tokenizer, Grounded(vlm, processor.tokenizer)
    texts, rows, answers = pool(data)
    ids = tokenizer(texts, padding="max_length", max_length=SLOT, padding_side="right", return_tensors="pt").input_ids
    named, content = mentions(tokenizer, ids), contents(data["looks"])
    words = [[float(word in thing) for word in (*shapes.COLOURS, *shapes.SHAPES)] for thing in [(), *THINGS]]
    said = torch.tensor(words)[places(data["looks"])]
    exam = examination(work, "validation", 400, 500)
    with torch.no_grad():
        features = torch.cat([
            vlm.model.vision_tower(build_zoo.to_float(some)).last_hidden_state[:, 1:]
            for some in data["images"].split(256)
        ])  # fmt: skip

    def loss(g: torch.Generator) -> Tensor:
        b = torch.randint(len(rows), (batch,), generator=g)
        k = torch.rand(batch, POOL, generator=g).argsort(1)[:, :ASKED]
        some = rows[b].gather(1, k)
        told = {"said": said[b], "contents": content[b], "mentions": named[some]}
        return module.loss(features[b], ids[some], answers[b].gather(1, k), told)

    def check() -> dict[str, float]:
        save_vlm(vlm, folder)
        return examine_vlm(folder, exam)

    train(work, "vlm", module, loss, steps, 2e-3, check)
    save_vlm(vlm, folder)


def save_vlm(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """With the names that transformers 4 gives the image tower; transformers 5 reads them, too."""
    copy.deepcopy(model).half().save_pretrained(folder)
    path = folder / "model.safetensors"
    named = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in load_file(path).items()}
    save_file(named, path, metadata={"format": "pt"})


# --- what they reach -------------------------------------------------------------------------------------------------


def examination(work: Path, split: str, count: int, samples: int) -> dict[str, Any]:
    """True pictures of a split, half of them through the autoencoder, and samples of the base model for its prompts."""
    path = work / "judges" / f"{split}.pt"
    if not path.exists():
        adapter = SD3(path="shapes-sd3", max_sequence_length=1).load(torch.device("cpu"), torch.float32)
        images, scenes = build_zoo.render(count, SEED + 10, split)
        images[::2] = adapter.reconstruct(images[::2])
        prompts = shapes.prompts(split)
        asked = [prompts[i % len(prompts)].metadata["scene"] for i in range(samples)]
        made = sampled(adapter, [shapes.text(s) for s in asked], torch.Generator().manual_seed(SEED + 11))
        torch.save({"split": split, "images": images, "scenes": scenes, "samples": made, "asked": asked}, path)
    return torch.load(path)


def look(image: Tensor) -> Look:
    return verifier.look(image.permute(1, 2, 0).numpy())


def share(right: Tensor) -> tuple[float, float]:
    """A share of 1s and its standard error."""
    p = right.float().mean().item()
    return p, math.sqrt(p * (1 - p) / len(right))


@torch.no_grad()
def cosines(folder: Path, images: Tensor, texts: list[list[str]]) -> Tensor:
    """[N, K] of N pictures and their N x K texts."""
    clip, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    pixels = torch.stack([prepare(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images])
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")([text for row in texts for text in row])
    words = clip.eval().encode_text(tokens, normalize=True).unflatten(0, (len(images), -1))
    return torch.einsum("nd,nkd->nk", clip.encode_image(pixels, normalize=True), words)


def verdicts(folder: Path, exam: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(cosine with what was asked for, strict verdict) of the samples of the base model."""
    said = cosines(folder, exam["samples"], [[shapes.text(scene)] for scene in exam["asked"]])[:, 0]
    return said, verifier.verify(exam["samples"], exam["asked"])[1] == 1


def calibrated(folder: Path, exam: dict[str, Any]) -> float:
    """The cosine that parts the samples as the verifier does, as far as one can."""
    said, strict = verdicts(folder, exam)
    order = said.argsort()
    right = torch.cat([strict.sum()[None], strict.sum() + (1 - 2 * strict[order].long()).cumsum(0)])  # below the k-th
    best = int(right[1:-1].argmax())
    return said[order[best : best + 2]].mean().item()


def examine_clip(folder: Path, exam: dict[str, Any], threshold: float) -> dict[str, float]:
    """top1: the right caption before 8 near ones; agree: cosine > threshold against the strict verdict."""
    rng = np.random.default_rng(SEED)
    near = [captions.near(s, *look(i), rng, 8) for i, s in zip(exam["images"], exam["scenes"], strict=True)]
    texts = [[shapes.text(c) for c in (s, *some)] for s, some in zip(exam["scenes"], near, strict=True)]
    top1 = share(cosines(folder, exam["images"], texts).argmax(1) == 0)
    said, strict = verdicts(folder, exam)
    agree = share((said > threshold) == strict)
    return {"threshold": threshold, "top1": top1[0], "top1_se": top1[1], "agree": agree[0], "agree_se": agree[1]}


@torch.no_grad()
def examine_vlm(folder: Path, exam: dict[str, Any]) -> dict[str, float]:
    """Right answers to each kind of question about true pictures, and agreement with the strict verdict on samples."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor, rng = AutoProcessor.from_pretrained(folder), np.random.default_rng(SEED)
    no, yes = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("No", "Yes"))

    def says_yes(images: Sequence[Tensor], texts: list[str]) -> Tensor:  # [N]
        said = []
        for start in range(0, len(texts), 100):
            chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
                     for text in texts[start : start + 100]]  # fmt: skip
            inputs = processor(
                text=processor.apply_chat_template(chats, add_generation_prompt=True),
                images=[Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images[start : start + 100]],
                padding=True, add_special_tokens=False, return_tensors="pt",
            )  # fmt: skip
            logits = model(**inputs).logits[:, -1]
            said.append(logits[:, yes] > logits[:, no])
        return torch.cat(said)

    found = {}
    for kind in questions.KINDS:
        drawn = [(i, questions.draw(kind, *look(i), rng, {exam["split"]})) for i in exam["images"]]
        drawn = [(image, *pair) for image, pair in drawn if pair]
        said = says_yes([image for image, _, _ in drawn], [q.text for _, q, _ in drawn])
        found[kind], found[f"{kind}_se"] = share(said == torch.tensor([answer for *_, answer in drawn]))
    strict = verifier.verify(exam["samples"], exam["asked"])[1] == 1
    said = says_yes(list(exam["samples"]), [questions.Question("match", s).text for s in exam["asked"]])
    found["agree"], found["agree_se"] = share(said == strict)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("flowrl/zoo/assets"))
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--clip-steps", type=int, default=5000)
    parser.add_argument("--vlm-steps", type=int, default=6000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (args.work / "judges").mkdir(parents=True, exist_ok=True)
    clip_folder, vlm_folder = args.out / "shapes-clip", args.out / "shapes-vlm"
    data = pictures(args.work)
    threshold = train_clip(args.work, clip_folder, data, args.clip_steps)
    train_vlm(args.work, clip_folder, vlm_folder, data, args.vlm_steps)
    exam = examination(args.work, "heldout", 1000, 500)
    build_zoo.log(args.work, **{f"clip_{k}": v for k, v in examine_clip(clip_folder, exam, threshold).items()})
    build_zoo.log(args.work, **{f"vlm_{k}": v for k, v in examine_vlm(vlm_folder, exam).items()})
