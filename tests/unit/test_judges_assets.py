"""The embedded judges answer as their README says, through the code of the rewards they stand in for."""

import numpy as np
import pytest
import torch

from flowrl.models.sd3 import SD3
from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl.zoo import captions, embedded, questions, shapes, verifier
from flowrl_rewards.clip import OpenCLIP
from flowrl_rewards.vlm import VLM

THRESHOLD = 0.269  # the cosine of shapes-clip that parts right from wrong, see the README of the assets


def look(image):
    return verifier.look(image.permute(1, 2, 0).numpy())


def standard_error(share, n):
    return (share * (1 - share) / n) ** 0.5


@pytest.fixture(scope="module")
def judge():
    """The scores [N] of pictures and texts, by the language model asked with a question, "{prompt}" = the text."""

    def says(question, images, texts):
        judge = VLM(model="shapes-vlm", size=None, rows=64, questions=[question] if question else [])
        with torch.inference_mode():
            return judge(Media(images), [Prompt(i, text) for i, text in enumerate(texts)])

    return says


@pytest.fixture(scope="module")
def truth():
    """300 true pictures of held-out scenes, every second through the autoencoder, and their scenes."""
    rng = np.random.default_rng(21)
    scenes = [shapes.draw_scene(rng, "heldout") for _ in range(300)]
    images = torch.from_numpy(np.stack([shapes.picture(s, rng) for s in scenes])).permute(0, 3, 1, 2).contiguous()
    adapter = SD3(path="shapes-sd3", max_sequence_length=1).load(torch.device("cpu"), torch.float32)
    images[::2] = adapter.reconstruct(images[::2])
    return images, scenes


@pytest.fixture(scope="module")
def samples():
    """200 samples of the base model for held-out prompts, their scenes, and the verifier's strict verdicts."""
    adapter = SD3(path="shapes-sd3", max_sequence_length=1).load(torch.device("cpu"), torch.float32)
    prompts = (shapes.prompts("heldout") * 3)[:200]
    cond, x, grid = adapter.encode(prompts), adapter.noise([(22, i) for i in range(200)]), adapter.grid(8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for t, s in zip(grid, grid[1:], strict=False):
            x = x + (s - t) * adapter.velocity(x, t.expand(200), cond)
    images, scenes = adapter.decode(x), [prompt.metadata["scene"] for prompt in prompts]
    return images, scenes, verifier.verify(images, scenes)[1] == 1


def test_clip_finds_the_right_caption_among_eight_near_ones(truth):
    images, scenes = truth
    rng, clip, right = np.random.default_rng(23), OpenCLIP(path="shapes-clip"), []
    for image, scene in zip(images, scenes, strict=True):
        texts = [shapes.text(s) for s in (scene, *captions.near(scene, *look(image), rng, 8))]
        with torch.inference_mode():
            scores = clip(Media(image.expand(len(texts), -1, -1, -1)), [Prompt(i, t) for i, t in enumerate(texts)])
        right.append(scores.argmax() == 0)
    assert len(texts) == 9 and np.mean(right) >= 0.9 + standard_error(0.9, 300)


@pytest.mark.parametrize("kind", questions.KINDS)
def test_the_language_model_answers_about_held_out_scenes(judge, truth, kind):
    rng = np.random.default_rng(24)
    drawn = [(image, questions.draw(kind, *look(image), rng, {"heldout"})) for image in truth[0]]
    drawn = [(image, *pair) for image, pair in drawn if pair]
    answers = torch.tensor([answer for *_, answer in drawn])
    said = judge("{prompt}", torch.stack([image for image, *_ in drawn]), [q.text for _, q, _ in drawn]) > 0.5
    assert len(drawn) > 60 and 0.35 < answers.float().mean() < 0.65
    assert (said == answers).float().mean() >= 0.9


def test_both_agree_with_the_verifier_on_what_the_base_model_makes(judge, samples):
    images, scenes, strict = samples
    texts = [shapes.text(scene) for scene in scenes]
    yes = judge(None, images, texts) > 0.5
    with torch.inference_mode():
        near = OpenCLIP(path="shapes-clip")(Media(images), [Prompt(i, t) for i, t in enumerate(texts)]) > THRESHOLD
    assert 0.2 < strict.float().mean() < 0.6
    assert (yes == strict).float().mean() >= 0.8 and (near == strict).float().mean() >= 0.8


def test_the_usual_question_is_one_that_the_language_model_knows():
    scene = shapes.prompts("train")[0].metadata["scene"]
    asked = questions.Question("match", scene).text
    (usual,) = VLM(model="shapes-vlm").questions
    assert asked == usual.text.format(prompt=shapes.text(scene))


def test_both_are_small():
    folders = [embedded("shapes-clip"), embedded("shapes-vlm")]
    assert sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file()) <= 6e6


@pytest.mark.parametrize("name", ["shapes-none", "", ".", "..", "shapes-clip/", "shapes-sd3/vae"])
def test_a_name_that_is_none_is_no_embedded_model(name):
    assert embedded(name) is None
