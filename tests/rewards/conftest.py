import pytest
import torch
from torch.testing import assert_close

from flowrl.rewards import Media
from flowrl.types import Prompt
from tests.either import PilProcessor, byte_tokenizer


@pytest.fixture
def steady():
    """Assert that scores follow their samples, whatever the batch, and that the pictures stay what they are."""

    def check(scorer, media, prompts, atol=1e-5):
        before, n = media.images.clone(), len(prompts)
        order = [*range(1, n), 0]
        with torch.inference_mode():
            whole = scorer(media, prompts)
            moved = scorer(media[order], [prompts[row] for row in order])
            alone = torch.cat([scorer(media[[row]], [prompts[row]]) for row in range(n)])
        assert len(whole) == n
        assert_close(moved, whole[order], rtol=1e-5, atol=atol)
        assert_close(alone, whole, rtol=1e-5, atol=atol)
        assert torch.equal(media.images, before)

    return check


@pytest.fixture(scope="session")
def hub_clip(tmp_path_factory):
    """The folder of a random CLIPModel for 32 x 32 pictures and 12 tokens, with its tokenizer and image processor."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPConfig, CLIPModel

    letters = sorted(ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    tokenizer = byte_tokenizer(pieces, model_max_length=12)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(pieces), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    picture = {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    network = CLIPModel(
        CLIPConfig(
            text_config=tower | text, vision_config=tower | picture, projection_dim=8, logit_scale_init_value=4.6
        )
    )
    lively(network)
    folder = tmp_path_factory.mktemp("hub_clip")
    crop = {"height": 32, "width": 32}
    for part in (network, tokenizer, PilProcessor(size={"shortest_edge": 32}, crop_size=crop)):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def open_clip_config():
    """The architecture of a small CLIP of open_clip, for 32 x 32 pictures and 12 tokens."""
    return {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    }


@pytest.fixture(scope="session")
def open_clip_name(open_clip_config, tmp_path_factory):
    """A name under which open_clip knows that architecture."""
    import json

    import open_clip

    path = tmp_path_factory.mktemp("open_clip_configs") / "small-clip.json"
    path.write_text(json.dumps(open_clip_config))
    open_clip.add_model_config(path)
    return path.stem


@pytest.fixture(scope="session")
def open_network(open_clip_config):
    """A random network of that architecture."""
    import copy

    import open_clip

    torch.manual_seed(0)
    network = open_clip.CLIP(**copy.deepcopy(open_clip_config))
    lively(network)
    return network.eval()


def lively(network):
    """Make a fresh network tell inputs apart."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim:
                parameter.normal_(std=0.7)


@pytest.fixture
def sized():
    """Five pictures of noise of height x width, and five prompts of other lengths."""

    def make(height, width):
        generator = torch.Generator().manual_seed(1)
        coarse = torch.rand(5, 3, 7, 9, generator=generator)  # blobs, that resizing does not wash out
        images = torch.nn.functional.interpolate(coarse, (height, width)).mul(255).round().to(torch.uint8)
        texts = ["red", "a cat", "two", "", "blue sky"]
        return Media(images), [Prompt(row, text) for row, text in enumerate(texts)]

    return make
