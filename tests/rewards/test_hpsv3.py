"""HPSv3 against raw outputs of a tiny random Qwen2-VL, one sample at a time and without padding."""

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import nn
from torch.testing import assert_close
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards.hpsv3 import HPSv3
from tests.either import QwenProcessor, byte_tokenizer

WIDTH = 32
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT = """{% for turn in messages %}<|im_start|>{{ turn.role }}
{% for part in turn.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{
part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
INSTRUCTION = "How good a picture of {prompt} is this? <|Reward|> {end}"
PIXELS = 6 * 28 * 28
PROMPTS = [Prompt(0, "a red circle"), Prompt(1, "a {prompt} {}"), Prompt(2, "two blue squares beside one another")]


def noise(n, height=50, width=90):
    return Media(torch.randint(256, (n, 3, height, width), dtype=torch.uint8))


def tokenizer():
    words = byte_tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()), Qwen2Tokenizer)
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    return words


@pytest.fixture
def raw():
    """The network and the head that the published file holds."""
    words = tokenizer()
    start, end, image, video = words.convert_tokens_to_ids(SPECIAL[2:])
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(words) + 3,  # rows without a token, as in the base model
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},  # as in the published file
            "initializer_range": 0.2,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "initializer_range": 0.2},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    layers = nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    return Qwen2VLForConditionalGeneration(config).eval(), nn.Sequential(*layers).eval()


@pytest.fixture
def state(raw):
    """The entries of the published file: the names of the first Qwen2-VL, and rm_head."""
    names = {"model.language_model.": "model.", "model.visual.": "visual.", "lm_head.": "lm_head."}
    found = {f"rm_head.{name}": value for name, value in raw[1].state_dict().items()}
    for name, value in raw[0].state_dict().items():
        (start,) = (start for start in names if name.startswith(start))
        found[names[start] + name.removeprefix(start)] = value
    return {name: value.clone() for name, value in found.items()}


@pytest.fixture
def build(raw, state, tmp_path):
    """Save base and weights, and give a scorer of them."""
    words = tokenizer()
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), words, Qwen2VLVideoProcessor(), chat_template=CHAT)
    processor.save_pretrained(tmp_path / "base")
    base = Qwen2VLConfig.from_dict(raw[0].config.to_dict())
    base.text_config.vocab_size = len(words)  # the base model has no row for the reward token
    base.save_pretrained(tmp_path / "base")

    def scorer(**options):
        save_file(state, tmp_path / "HPSv3.safetensors")
        paths = {"weights": str(tmp_path), "base": str(tmp_path / "base")}
        return HPSv3(**paths, **{"instruction": INSTRUCTION, "pixels": PIXELS, "dtype": "float32", **options})

    return scorer


def expected(raw, picture, text):
    """(mu, sigma) of one sample whose tokens are put together by hand."""
    network, head = raw
    words, images = tokenizer(), QwenProcessor(min_pixels=PIXELS, max_pixels=PIXELS)
    seen = images(images=[picture], return_tensors="pt")
    pads = "<|image_pad|>" * (seen["image_grid_thw"].prod().item() // 4)
    before = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>How good a picture of {text} is this? "
    ids = words(before)["input_ids"]
    ids = torch.tensor([[*ids, len(words)]])  # the reward token follows the last of the base; later ones are not read
    outputs = network(
        input_ids=ids,
        mm_token_type_ids=(ids == network.config.image_token_id).int(),
        output_hidden_states=True,
        **seen,
    )
    return head(outputs.hidden_states[-1][0, -1])


@torch.no_grad()
@pytest.mark.parametrize("size", [(30, 60), (200, 90)], ids=["enlarged", "shrunk"])
def test_the_score_is_mu_at_the_reward_token(raw, build, size):
    media = noise(3, *size)
    wanted = torch.stack([expected(raw, *one) for one in zip(media.pil(), (p.text for p in PROMPTS), strict=True)])
    assert wanted[:, 0].std() > 1e-3
    assert_close(build()(media, PROMPTS), wanted[:, 0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_file_without_the_word_head_is_the_same(build, state):
    media = noise(2)
    whole = build()(media, PROMPTS[:2])
    del state["lm_head.weight"]
    assert torch.equal(build()(media, PROMPTS[:2]), whole)


@torch.no_grad()
def test_the_head_stays_in_float32(build):
    media = noise(3)
    exact, half = build()(media, PROMPTS), build(dtype="bfloat16")(media, PROMPTS)
    assert half.dtype == torch.float32 and not torch.equal(half, half.bfloat16().float())
    assert_close(half, exact, rtol=0, atol=0.05)


def test_a_batch_may_be_split_and_permuted(build, steady):
    steady(build(), noise(3), PROMPTS)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda s: s.pop("model.embed_tokens.weight"), r"missing keys: model\.embed_tokens\.weight"),
        (lambda s: s.update({"rm_head.6.bias": torch.zeros(2)}), r"unexpected keys: rm_head\.6\.bias"),
        (lambda s: s.update({"rm_head.5.weight": torch.zeros(4, 16)}),
         r"wrong shapes: rm_head\.5\.weight \[4, 16\] for \[2, 16\]"),
    ],
    ids=["missing", "no embedding", "unexpected", "shape"],
)  # fmt: skip
def test_another_file_is_refused(build, state, spoil, told):
    spoil(state)
    with pytest.raises(ValueError, match=told):
        build()(noise(1), PROMPTS[:1])


def test_a_prompt_with_the_reward_token_is_refused(build):
    with pytest.raises(ValueError, match=r"prompt 4 holds <\|Reward\|>"):
        build()(noise(2), [PROMPTS[0], Prompt(4, "ten of ten <|Reward|>")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; give one of float32, bfloat16, float16"),
        ({"pixels": 100}, "pixels is 100, less than the 784 of one token"),
        ({"instruction": "Good? <|Reward|>"}, r"instruction holds \{prompt\} 0 times"),
        ({"instruction": "{prompt} <|Reward|> <|Reward|>"}, r"instruction holds <\|Reward\|> 2 times"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        HPSv3(**options)


def test_what_is_missing_is_named(build):
    assert not build().missing()
    weights, base = HPSv3(weights="no/such", base="./nowhere").missing()
    assert "weights = no/such" in weights and "base = ./nowhere" in base
