"""ImageReward against a transcription of the published network that reads the published names, at a tiny size."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, embedding, gelu, layer_norm, linear
from torch.testing import assert_close
from transformers import BertTokenizer

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards import imagereward
from flowrl_rewards.imagereward import ImageReward, Network, read

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square", "over"]
TOKENS = 35
V, T, HEADS, SIZE, PATCH, LAYERS = 24, 16, 2, 32, 16, 2  # widths of the vision and the text network
SMALL_VISION = {
    "hidden_size": V,
    "intermediate_size": 2 * V,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": SIZE,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
}
SMALL_TEXT = {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": T,
    "encoder_hidden_size": V,
    "intermediate_size": 2 * T,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "layer_norm_eps": 1e-12,
}


def shapes():
    """Name and shape of every entry of the published file, at the small size."""

    def affine(name, out, into):
        return {f"{name}.weight": (out, *into), f"{name}.bias": (out,)}

    eyes, text = "blip.visual_encoder", "blip.text_encoder"
    found = {f"{eyes}.cls_token": (1, 1, V), f"{eyes}.pos_embed": (1, 1 + (SIZE // PATCH) ** 2, V)}
    found |= affine(f"{eyes}.patch_embed.proj", V, (3, PATCH, PATCH)) | affine(f"{eyes}.norm", V, ())
    for i in range(LAYERS):
        block = f"{eyes}.blocks.{i}"
        found |= affine(f"{block}.norm1", V, ()) | affine(f"{block}.norm2", V, ())
        found |= affine(f"{block}.attn.qkv", 3 * V, (V,)) | affine(f"{block}.attn.proj", V, (V,))
        found |= affine(f"{block}.mlp.fc1", 2 * V, (V,)) | affine(f"{block}.mlp.fc2", V, (2 * V,))
    found |= {
        f"{text}.embeddings.position_ids": (1, 512),
        f"{text}.embeddings.word_embeddings.weight": (len(WORDS) + 2, T),
        f"{text}.embeddings.position_embeddings.weight": (512, T),
    }
    found |= affine(f"{text}.embeddings.LayerNorm", T, ())
    for i in range(LAYERS):
        layer = f"{text}.encoder.layer.{i}"
        for kind, width in (("attention", T), ("crossattention", V)):
            found |= affine(f"{layer}.{kind}.self.query", T, (T,))
            found |= affine(f"{layer}.{kind}.self.key", T, (width,)) | affine(f"{layer}.{kind}.self.value", T, (width,))
            found |= affine(f"{layer}.{kind}.output.dense", T, (T,))
            found |= affine(f"{layer}.{kind}.output.LayerNorm", T, ())
        found |= affine(f"{layer}.intermediate.dense", 2 * T, (T,)) | affine(f"{layer}.output.dense", T, (2 * T,))
        found |= affine(f"{layer}.output.LayerNorm", T, ())
    found |= affine("blip.vision_proj", 256, (V,)) | affine("blip.text_proj", 256, (T,))
    for place, out, into in ((0, 1024, T), (2, 128, 1024), (4, 64, 128), (6, 16, 64), (7, 1, 16)):
        found |= affine(f"mlp.layers.{place}", out, (into,))
    return found


def transcribed(s, pixels, ids, mask):
    """The raw rewards [N] of the published network with the state `s`."""

    def affine(x, name):
        return linear(x, s[f"{name}.weight"], s[f"{name}.bias"])

    def norm(x, name, eps):
        return layer_norm(x, x.shape[-1:], s[f"{name}.weight"], s[f"{name}.bias"], eps)

    def attend(q, k, v, blocked=0.0):
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + blocked).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    eyes, text = "blip.visual_encoder", "blip.text_encoder"
    patches = conv2d(pixels, s[f"{eyes}.patch_embed.proj.weight"], s[f"{eyes}.patch_embed.proj.bias"], stride=PATCH)
    x = torch.cat([s[f"{eyes}.cls_token"].expand(len(pixels), 1, V), patches.flatten(2).transpose(1, 2)], 1)
    x = x + s[f"{eyes}.pos_embed"]
    for i in range(LAYERS):
        block = f"{eyes}.blocks.{i}"
        x = x + affine(attend(*affine(norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv").chunk(3, -1)),
                       f"{block}.attn.proj")  # fmt: skip
        x = x + affine(gelu(affine(norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    seen = norm(x, f"{eyes}.norm", 1e-6)

    places = s[f"{text}.embeddings.position_embeddings.weight"][: ids.shape[1]]
    y = norm(embedding(ids, s[f"{text}.embeddings.word_embeddings.weight"]) + places,
             f"{text}.embeddings.LayerNorm", 1e-12)  # fmt: skip
    padding = torch.where(mask[:, None, None] == 1, 0.0, -math.inf)
    for i in range(LAYERS):
        layer = f"{text}.encoder.layer.{i}"
        for kind, source, blocked in (("attention", None, padding), ("crossattention", seen, 0.0)):
            into = y if source is None else source
            q, k, v = (affine(z, f"{layer}.{kind}.self.{part}")
                       for z, part in ((y, "query"), (into, "key"), (into, "value")))  # fmt: skip
            y = norm(affine(attend(q, k, v, blocked), f"{layer}.{kind}.output.dense") + y,
                     f"{layer}.{kind}.output.LayerNorm", 1e-12)  # fmt: skip
        wide = gelu(affine(y, f"{layer}.intermediate.dense"))
        y = norm(affine(wide, f"{layer}.output.dense") + y, f"{layer}.output.LayerNorm", 1e-12)
    z = y[:, 0]
    for place in (0, 2, 4, 6, 7):
        z = affine(z, f"mlp.layers.{place}")
    return z[:, 0]


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(imagereward, "VISION", SMALL_VISION)
    monkeypatch.setattr(imagereward, "TEXT", SMALL_TEXT)
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes().items()}


@pytest.fixture
def options(state, tmp_path):
    torch.save(state, tmp_path / "ImageReward.pt")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "words")
    return {"weights": str(tmp_path), "tokenizer": str(tmp_path / "words")}


PROMPTS = [Prompt(0, "a red circle"), Prompt(1, "A blue square over a red circle"), Prompt(2, "a kettle")]
IDS = [[2, 5, 6, 8, 3], [2, 5, 7, 9, 10, 5, 6, 8, 3], [2, 5, 1, 3]]


def noise(n, height, width):
    return Media(torch.randint(256, (n, 3, height, width), dtype=torch.uint8))


def cut(image):
    """The middle 32 x 32 of a picture twice as wide as it is high, brought to the height 32."""
    return image.resize((2 * SIZE, SIZE), 3).crop((SIZE // 2, 0, SIZE // 2 + SIZE, SIZE))


@pytest.mark.parametrize(
    ("height", "width", "view"), [(SIZE, SIZE, lambda image: image), (48, 96, cut)], ids=["fitting", "wide"]
)
def test_the_score_is_that_of_the_published_network(options, state, height, width, view):
    media = noise(3, height, width)
    pixels = torch.stack([torch.from_numpy(np.array(view(image))) for image in media.pil()]).permute(0, 3, 1, 2) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    ids = torch.tensor([row + [0] * (TOKENS - len(row)) for row in IDS])
    wanted = (transcribed(state, (pixels - mean) / std, ids, (ids != 0).long()) - 0.16717) / 1.03334
    assert wanted.std() > 0.01
    with torch.inference_mode():
        assert_close(ImageReward(**options)(media, PROMPTS), wanted, rtol=1e-4, atol=1e-5)


def test_every_entry_of_the_file_has_one_place(state):
    placed = list(read(state, "x").state_dict().values())
    scored = {
        k: v for k, v in state.items() if "position_ids" not in k and "vision_proj" not in k and "text_proj" not in k
    }
    assert len(placed) == len(scored)
    assert all(sum(torch.equal(value, one) for one in placed) == 1 for value in scored.values())


def test_the_full_size_is_the_published_one():
    with torch.device("meta"):
        network = Network()
    settings = network.vision.config, network.text.config
    assert [(one.num_attention_heads, one.layer_norm_eps) for one in settings] == [(16, 1e-6), (12, 1e-12)]
    assert sum(p.numel() for p in network.vision.parameters()) == 303_301_632  # ViT-L/16 at 224 without a head
    # BERT base without token types, pooler and head, with cross-attention from 1024 channels in each of 12 layers
    cross = 768 * (768 + 1) * 2 + 768 * (1024 + 1) * 2 + 2 * 768
    assert sum(p.numel() for p in network.text.parameters()) == 85_054_464 + (30524 + 512 + 2) * 768 + 12 * cross


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.pop("blip.visual_encoder.blocks.1.attn.qkv.bias"),
         r"missing keys: blip\.visual_encoder\.blocks\.1\.attn\.qkv\.bias"),
        (lambda s: s.update({"mlp.layers.9.weight": torch.zeros(1)}), r"unexpected keys: mlp\.layers\.9\.weight"),
        (lambda s: s.update({"mlp.layers.7.weight": torch.zeros(1, 17)}),
         r"wrong shapes: mlp\.layers\.7\.weight \[1, 17\] for \[1, 16\]"),
    ],
    ids=["missing", "unexpected", "shape"],
)  # fmt: skip
def test_another_file_is_refused(state, spoil, told):
    spoil(state)
    with pytest.raises(ValueError, match=told):
        read(state, "x.pt")


def test_words_beyond_the_35th_token_are_not_read(options):
    media, scorer = noise(1, SIZE, SIZE), ImageReward(**options)
    texts = ("red " * 33, "red " * 33 + "blue", "red " * 32 + "blue")
    with torch.inference_mode():
        whole, longer, other = (scorer(media, [Prompt(0, text)]).item() for text in texts)
    assert longer == whole and abs(other - whole) > 1e-4


def test_a_batch_may_be_split_and_permuted(options, steady):
    steady(ImageReward(**options), noise(3, 40, 40), PROMPTS)


def test_what_is_missing_is_named(options):
    assert not ImageReward(**options).missing()
    weights, tokenizer = ImageReward(weights="no/such", tokenizer="./nowhere").missing()
    assert "weights = no/such is not on this machine" in weights and "tokenizer = ./nowhere" in tokenizer
