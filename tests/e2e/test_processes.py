"""Two processes do what one does: the same prompts and noise, and the same first update."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowrl.guard import watchdog
from flowrl.session import ask, first_noise, start
from flowrl.train import train_step
from tests.tiny import NFT, config

RECIPES = {
    "flow_grpo": ("credit.normalise=global", "compute.rows_per_forward=5"),
    "nft, all weights": (*NFT, "model.lora=null", "optimiser.updates=2", "regularise.velocity_kl=0.1"),
}
WORKER = """
import sys

import torch

from flowrl.config import load
from flowrl.guard import watchdog
from flowrl.session import ask, first_noise, start
from flowrl.train import train_step

out, *paths = sys.argv[1:]
for number, path in enumerate(paths):
    s = start(load(path))
    prompts, roots = ask(s, 0)
    seen = {
        "processes": s.accelerator.num_processes, "rank": s.accelerator.process_index,
        "prompts": [p.text for p in prompts], "noise": first_noise(s, roots, 0),
        "base": watchdog(s, {"step": 0}, print).base,
        "metrics": [train_step(s, step) for step in range(2)], "weights": s.policy.state()[0]["current"],
    }
    torch.save(seen, f"{out}/{number}-{seen['rank']}.pt")
"""


@pytest.fixture(scope="module")
def launched(tiny, tmp_path_factory):
    """{recipe: (its config, what each of two processes saw)}, from one launch."""
    folder = tmp_path_factory.mktemp("processes")
    configs = {name: config(folder, tiny, *recipe) for name, recipe in RECIPES.items()}
    (folder / "worker.py").write_text(WORKER)
    paths = [folder / f"{number}.yaml" for number in range(len(configs))]
    for path, c in zip(paths, configs.values(), strict=True):
        path.write_text(c.to_yaml())
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, str(folder / "worker.py"), str(folder), *map(str, paths)], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: (c, [torch.load(folder / f"{number}-{rank}.pt") for rank in range(2)])
        for number, (name, c) in enumerate(configs.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_do_what_one_does(launched, recipe):
    c, ranks = launched[recipe]
    s = start(c)
    prompts, roots = ask(s, 0)
    assert s.accelerator.num_processes == 1 and [seen["processes"] for seen in ranks] == [2, 2]
    assert [text for seen in ranks for text in seen["prompts"]] == [p.text for p in prompts]
    assert torch.equal(torch.cat([seen["noise"] for seen in ranks]), first_noise(s, roots, 0))
    base = watchdog(s, {"step": 0}, print).base
    assert ranks[0]["base"] == ranks[1]["base"] and set(base) == set(ranks[0]["base"])
    for name, values in base.items():
        assert ranks[0]["base"][name] == pytest.approx(values, rel=1e-4), name
    alone, first = train_step(s, 0), ranks[0]["metrics"][0]
    assert {name for name in first if not name.startswith("time/")} <= set(alone)
    for name in ("train/loss", "train/grad_norm"):
        assert first[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6 if name == "train/loss" else 0)
    for name in (name for name in alone if name.startswith("reward/")):
        assert first[name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_processes_agree_with_each_other(launched, recipe):
    _, (one, other) = launched[recipe]
    assert one["prompts"] != other["prompts"] and not torch.equal(one["noise"], other["noise"])
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        assert all(a[name] == b[name] for name in a if not name.startswith("time/"))
    assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
