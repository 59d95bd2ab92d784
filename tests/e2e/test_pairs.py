"""Steps that learn from given pairs of pictures on a very small pipeline: what they see, and that they learn it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from flowrl import checkpoint, report, run, selftest
from flowrl.clock import Clock
from flowrl.forwards import Count, forwards
from flowrl.models.sd3 import SD3
from flowrl.session import start
from flowrl.tell import Sums
from flowrl.train import rolled_out, train_step
from flowrl.zoo import shapes
from tests.tiny import NFT, PROMPTS, config

SILENT = "def score(images, prompts, metadata):\n    raise RuntimeError('nobody may ask')\n"
DPO = ("sampler={steps: 4}", "algorithm={name: dpo, beta: 20}")
METHODS = {"dpo": DPO, "nft": NFT}


@pytest.fixture
def pairs(tmp_path):
    """A file that prefers smooth pictures of a colour to noise, one pair a prompt."""
    rng = np.random.default_rng(0)
    for i in range(len(PROMPTS)):
        smooth = np.full((16, 16, 3), rng.integers(0, 256, 3), np.uint8)
        Image.fromarray(smooth).save(tmp_path / f"{i}a.png")
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / f"{i}b.png")
    rows = [{"prompt": p, "chosen": f"{i}a.png", "rejected": f"{i}b.png"} for i, p in enumerate(PROMPTS)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def given(tiny, tmp_path, pairs):
    """(overrides) -> the config of a run on the pairs, whose reward must not be asked."""

    def make(*overrides):
        (tmp_path / "silent.py").write_text(SILENT)
        data = json.dumps({"pairs": str(pairs), "prompts_per_step": 4})
        rewards = json.dumps([{"name": f"{tmp_path}/silent.py:score"}])
        return config(tmp_path, tiny, f"data={data}", f"rewards={rewards}", *overrides)

    return make


def rollout_of(s, step):
    return rolled_out(s, step, Clock(), Sums())[0]


def untimed(metrics):
    return json.dumps({name: value for name, value in sorted(metrics.items()) if not name.startswith("time/")})


def test_a_step_holds_the_pictures_of_its_pairs(given):
    s = start(given(*DPO, "data.prompts_per_step=7"))
    seen = []
    s.adapter.network.register_forward_hook(lambda network, args, output: seen.append(len(output[0])))
    r = rollout_of(s, 0)
    assert not seen and len(r.states.t) == len(r.edges.state) == 0
    assert r.adv.tolist() == r.rewards[:, 0].tolist() == [1, -1] * 7
    assert r.weight.tolist() == [1] * 14 and r.group.tolist() == [g for g in range(7) for _ in range(2)]
    for prompt, index, x0 in zip(r.roots.prompt_id.tolist(), r.roots.index.tolist(), r.x0, strict=True):
        picture = s.pairs[prompt][index % 2].fitted(8, 8)
        assert picture.shape == (3, 8, 8) and s.pairs[prompt][index % 2].path.stem == f"{prompt - 1}{'ab'[index % 2]}"
        assert_close(x0, s.adapter.latents(torch.from_numpy(picture)[None])[0], atol=1e-5, rtol=0)
    keys = set(r.roots.of(torch.arange(14)))
    assert len(keys) == 14, "a pair that a step holds twice draws other noise each time"


def test_two_processes_hold_the_pairs_of_one(given):
    s = start(given(*DPO))
    whole = rollout_of(s, 3)
    shares = []
    for rank in range(2):
        process = SimpleNamespace(process_index=rank, num_processes=2, device=s.accelerator.device)
        shares.append(rollout_of(replace(s, accelerator=process), 3))
    assert_close(torch.cat([r.x0 for r in shares]), whole.x0, atol=1e-5, rtol=0)
    for column in ("prompt_id", "index", "group"):
        assert torch.equal(torch.cat([vars(r.roots)[column] for r in shares]), vars(whole.roots)[column])
    assert torch.equal(torch.cat([r.adv for r in shares]), whole.adv)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_learns_from_the_same_pairs(given, tmp_path, method):
    c = given(*METHODS[method])
    s = start(c)
    for step in range(2):
        train_step(s, step)
    saved = checkpoint.save(tmp_path / "checkpoints", 2, s.policy, s.optimiser, {}, keep=1)
    through = [untimed(train_step(s, step)) for step in (2, 3)]
    resumed = start(c)
    checkpoint.load(saved, resumed.policy, resumed.optimiser)
    assert [untimed(train_step(resumed, step)) for step in (2, 3)] == through
    assert not any("reward/" in row for row in through)


@pytest.mark.parametrize("method", METHODS)
def test_the_network_runs_as_often_as_planned(given, method):
    c = given(*METHODS[method], "compute.rows_per_forward=5", "regularise.velocity_kl=0.1", "optimiser.updates=2")
    s, seen = start(c), []
    s.adapter.network.register_forward_hook(lambda network, args, output: seen.append(len(output[0])))
    for step in range(3):
        train_step(s, step)
        planned = forwards(c, step)
        assert planned.rollout.calls == 0
        assert Count(sum(seen), len(seen)) == planned.current + planned.others
        seen.clear()


def test_dpo_learns_the_preferences_that_are_given(given):
    s = start(given(*DPO, "optimiser.lr=0.003", "algorithm.draws=2"))
    rows = [train_step(s, step) for step in range(40)]
    loss, margin = ([row[f"train/{name}"] for row in rows] for name in ("loss", "margin"))
    assert loss[0] == pytest.approx(math.log(2)) and margin[0] == 0
    assert np.mean(loss[-10:]) < 0.9 * math.log(2)
    assert np.mean(margin[-10:]) > max(0.1, np.mean(margin[1:11]))


def test_a_whole_run_leaves_its_folder_and_a_report_without_rewards(given):
    folder = run.run(given(*DPO, "steps=2"))
    assert checkpoint.complete(folder / "checkpoints") and (folder / "export").is_dir()
    page = report.write(folder).read_text()
    assert "In training, the loss went from 0.693" in page and "margin" in page


def test_all_checks_of_a_run_on_pairs_hold(given, tmp_path):
    checks = selftest.run(given(*DPO))
    assert all(check.passed for check in checks), selftest.table(checks)


def test_latents_of_pictures_decode_to_them():
    adapter = SD3(path="shapes-sd3", max_sequence_length=1).load(torch.device("cpu"), torch.float32)
    rng = np.random.default_rng(0)
    scenes = [prompt.metadata["scene"] for prompt in shapes.prompts("train")[:8]]
    pictures = torch.from_numpy(np.stack([shapes.picture(scene, rng) for scene in scenes])).permute(0, 3, 1, 2)
    assert pictures.shape[2:] == adapter.size
    x0 = adapter.latents(pictures)
    assert x0.shape == (8, *adapter.latent.shape) and x0.dtype == torch.float32
    assert torch.equal(x0, adapter.latents(pictures))
    off = (adapter.decode(x0).float() - pictures).abs()
    assert off.mean() < 4 and off.mean() < 0.1 * (pictures.float() - pictures.float().mean()).abs().mean()
    assert 0.3 < x0.std() < 3, "latents are of the scale of the noise they are mixed with"
