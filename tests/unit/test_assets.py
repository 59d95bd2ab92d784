"""The embedded models are those their README describes, and autoencoders keep what the verifier looks for."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import flowrl.zoo
from flowrl.models.sana import Sana
from flowrl.models.sd3 import SD3
from flowrl.zoo import shapes
from flowrl.zoo.verifier import verify

ASSETS = Path(flowrl.zoo.__path__[0]) / "assets"
SUMS = [line.split() for line in (ASSETS / "README.md").read_text().splitlines() if line.endswith(".safetensors")]


MODELS = {
    "shapes-sd3": SD3(path="shapes-sd3", max_sequence_length=1),
    "shapes-sana": Sana(path="shapes-sana", max_sequence_length=16, instruction=False),
}


@pytest.fixture(scope="module", params=MODELS)
def adapter(request):
    return MODELS[request.param].load(torch.device("cpu"), torch.float32)


def test_checksums():
    files = {str(f.relative_to(ASSETS)) for f in ASSETS.rglob("*.safetensors")}
    assert files == {name for _, name in SUMS}
    assert all(hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == want for want, name in SUMS)


def test_they_are_small():
    for folder in (path for path in ASSETS.iterdir() if path.is_dir()):
        assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 8e6, folder.name


def test_truth_survives_the_autoencoder(adapter):
    rng = np.random.default_rng(11)
    scenes = [shapes.draw_scene(rng, "heldout") for _ in range(400)]
    truth = torch.from_numpy(np.stack([shapes.picture(s, rng) for s in scenes])).permute(0, 3, 1, 2)
    assert verify(adapter.reconstruct(truth), scenes)[1].mean() >= 0.95


def test_every_word_of_the_grammar_is_a_token(adapter):
    tokenizer = adapter.pipeline.tokenizer
    for prompt in shapes.prompts("train"):
        assert len(tokenizer(prompt.text).input_ids) == len(prompt.text.split()) + 2 <= tokenizer.model_max_length


def test_latents_have_unit_scale(adapter):
    rng = np.random.default_rng(12)
    truth = np.stack([shapes.picture(shapes.draw_scene(rng), rng) for _ in range(64)])
    z = adapter.latents(torch.from_numpy(truth).permute(0, 3, 1, 2))
    assert z.std() == pytest.approx(1, abs=0.05)
    assert z.mean() == pytest.approx(0, abs=0.05)
