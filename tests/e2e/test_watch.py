"""A reward that is hacked trips the watch: what it says, where the run ends, what it leaves behind."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flowrl import checkpoint, report, run, train
from flowrl.cli import app
from flowrl.config import load
from flowrl.watchdog import Tripped
from tests.tiny import NFT, config

NETWORK = "export/transformer/diffusion_pytorch_model.safetensors"
DARK = """
import numpy as np


def dark(images, prompts, metadata):
    return [1 - float(np.asarray(image).mean()) / 255 for image in images]
"""
HASTY = (  # a rate that wrecks the pictures of the tiny pipeline in the third step
    *NFT, "steps=8", "model.lora=null", "data.group_size=8", "save.every=1", "watch.patience=2",
    "watch.probes=[sharpness]", "optimiser={lr: 0.2, weight_decay: 0, updates: 2, warmup: 8}",
)  # fmt: skip


def hasty(tmp_path, tiny, *overrides, idle=()):
    """A run that drifts, rewarded for darkness; `idle` adds the same reward where it is only watched."""
    path = tmp_path / "dark.py"
    path.write_text(DARK)
    rewards = [{"name": f"{path}:dark", "label": "dark"}, *({"name": f"{path}:dark", **how} for how in idle)]
    return config(tmp_path, tiny, *HASTY, f"rewards={json.dumps(rewards)}", *overrides)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def drifts(folder):
    return [{name: value for name, value in row.items() if name.startswith("watch/")} for row in rows(folder)]


def tripped(c, **how):
    """Run until the watch ends it; (what it says, how many steps were made)."""
    with pytest.raises(Tripped) as alarm:
        run.run(c, **how)
    return str(alarm.value), len(rows(c.folder))


def weights(folder, slot="current"):
    return (folder / f"{slot}.safetensors").read_bytes()


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory):
    """A run that its watch has stopped: (config, what was said, steps made)."""
    c = hasty(tmp_path_factory.mktemp("stopped"), tiny, "watch.action=stop")
    return c, *tripped(c)


def test_stop_ends_the_run_with_its_checkpoint(stopped):
    c, said, steps = stopped
    assert re.search(rf"after step {steps}: sharpness is [\d.]+ standard deviations below .*watch.action=warn", said)
    assert steps < c.steps
    newest = checkpoint.complete(c.folder / "checkpoints")[-1]
    assert newest.name == f"step-{steps:06d}" and not (c.folder / "export").exists()


def test_the_run_ends_at_the_first_window_beyond_the_bound(stopped):
    c, _, steps = stopped
    found = [row["watch/sharpness"] for row in drifts(c.folder)]
    assert len(found) == steps and [abs(d) > 2 for d in found[1:]] == [False] * (steps - 2) + [True]


def test_the_drift_is_that_of_the_logged_means_from_the_base(stopped):
    c, _, _ = stopped
    state = json.loads((checkpoint.complete(c.folder / "checkpoints")[-1] / "state.json").read_text())
    mean, std = state["watch"]["base"]["sharpness"]
    logged = [(row["probe/sharpness/mean"] - mean) / std for row in rows(c.folder)]
    windows = [logged[0], *((a + b) / 2 for a, b in zip(logged, logged[1:], strict=False))]
    assert [row["watch/sharpness"] for row in drifts(c.folder)] == pytest.approx(windows)


def test_the_report_has_the_drift_beside_the_reward(stopped):
    c, _, _ = stopped
    page = report.write(c.folder).read_text()
    rewards, others = page.split("<h2>Base against tuned</h2>")
    for name, place, elsewhere in (
        ("reward/dark/mean", rewards, others),
        ("watch/sharpness", rewards, others),
        ("probe/sharpness/mean", others, rewards),
    ):
        assert name in place and name not in elsewhere


def test_a_watched_run_learns_what_an_unwatched_one_does(tiny, tmp_path, stopped):
    c, _, steps = stopped
    off = hasty(tmp_path, tiny, "watch=null", f"steps={steps}")
    run.run(off)
    for row, other in zip(rows(c.folder), rows(off.folder), strict=True):
        same = {name for name in row if not name.startswith(("time/", "probe/", "watch/"))}
        assert same == {name for name in other if not name.startswith("time/")}
        assert all(row[name] == other[name] for name in same)
    assert weights(c.folder / f"checkpoints/step-{steps:06d}") == weights(off.folder / f"checkpoints/step-{steps:06d}")


def test_a_stopped_run_goes_on_where_its_user_says_so(tiny, tmp_path):
    c = hasty(tmp_path, tiny, "watch.action=stop")
    _, steps = tripped(c)
    assert tripped(c, resume=True)[1] == steps + 1  # it still drifts
    run.run(hasty(tmp_path, tiny, "watch.action=warn", f"steps={steps + 3}"), resume=True)
    assert len(rows(c.folder)) == steps + 3


@pytest.mark.parametrize("cut", [1, 2])
def test_a_killed_run_goes_on_with_the_same_drifts_from_the_same_base(tiny, tmp_path, monkeypatch, stopped, cut):
    c, said, _ = stopped
    killed = hasty(tmp_path, tiny, "watch.action=stop")

    def power_cut(s, step):
        if step == cut:
            raise KeyboardInterrupt
        return train.train_step(s, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run, "train_step", power_cut)
        run.run(killed)
    assert tripped(killed, resume=True)[0] == said
    assert drifts(killed.folder) == drifts(c.folder)


def test_a_rollback_leaves_and_exports_what_was_before_the_drift(tiny, tmp_path, stopped):
    c = hasty(tmp_path, tiny, "watch.action=rollback")
    said, steps = tripped(c)
    assert steps == stopped[2]
    found = [row["watch/sharpness"] for row in drifts(c.folder)]
    (sound,) = checkpoint.complete(c.folder / "checkpoints")
    back = int(sound.name.removeprefix("step-"))
    assert f"those after step {back} again" in said and back < steps
    assert len(found) == steps  # the page still shows how it went
    assert abs(found[back - 1]) <= 1 < abs(found[back])
    assert weights(c.folder / "drifted" / f"step-{steps:06d}") != weights(sound)
    exported, average = (load_file(path) for path in (c.folder / NETWORK, sound / "average.safetensors"))
    assert all(torch.equal(exported[name], value) for name, value in average.items())


def test_a_rollback_before_the_first_checkpoint_is_to_the_base(tiny, tmp_path):
    c = hasty(tmp_path, tiny, "watch.action=rollback", "save.every=0")
    tripped(c)
    (sound,) = checkpoint.complete(c.folder / "checkpoints")
    assert sound.name == "step-000000" and weights(sound) == weights(sound, "ref")


def test_a_rollback_that_a_kill_cut_in_two_is_finished_on_resume(tiny, tmp_path):
    c = hasty(tmp_path, tiny, "watch.action=rollback", "save.every=0")
    _, steps = tripped(c)
    (c.folder / "checkpoints").rename(c.folder / "sound")
    run.run(hasty(tmp_path, tiny, "watch.action=warn", "save.every=0", f"steps={steps}"), resume=True)
    end = f"step-{steps:06d}"
    assert weights(c.folder / "checkpoints" / end) == weights(c.folder / "drifted" / end)


def test_a_warning_is_said_and_the_run_goes_on(tiny, tmp_path, capfd):
    c = hasty(tmp_path, tiny, "watch.action=warn")
    run.run(c)
    assert len(rows(c.folder)) == c.steps and (c.folder / "export").exists()
    said = " ".join(capfd.readouterr().err.split())
    assert len(re.findall(r"step \d+: sharpness is [\d.]+ standard deviations below", said)) == 1
    assert "sharpness drift -" in said


def test_a_reward_of_weight_0_trips_the_watch_where_it_falls(tiny, tmp_path):
    c = hasty(tmp_path, tiny, "watch.action=stop", "watch.probes=[]", idle=[{"label": "idle", "weight": 0.0}])
    said, _ = tripped(c)
    assert "reward/idle is" in said and "below" in said
    assert set(drifts(c.folder)[-1]) == {"watch/reward/idle"}


def test_a_run_that_began_without_a_watch_cannot_get_one(tiny, tmp_path):
    run.run(hasty(tmp_path, tiny, "watch=null", "steps=2"))
    with pytest.raises(ValueError, match="its base is not measured; add watch=null"):
        run.run(hasty(tmp_path, tiny, "steps=4"), resume=True)
    run.run(hasty(tmp_path, tiny, "watch=null", "steps=4"), resume=True)


def test_the_command_ends_with_status_3(tiny, tmp_path):
    c = hasty(tmp_path, tiny, "watch.action=stop")
    (tmp_path / "mine.yaml").write_text(c.to_yaml())
    done = CliRunner().invoke(app, ["train", str(tmp_path / "mine.yaml")])
    assert done.exit_code == 3 and "flowrl: the watch ended the run after step" in done.stderr and not done.stdout


SMALL = (  # the demo's method in short steps, without the charge that keeps it near the base
    "data.prompts_per_step=2", "sampler.steps=4", "algorithm.draws=1", "regularise={}", "optimiser.lr=4e-4",
    "compute={threads: 1}", "watch.action=stop",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "reward, steps, hacked", [("dark", 14, "brightness"), ("jpeg_size", 14, "diversity"), ("shapes", 10, None)]
)
def test_a_hacked_reward_of_the_embedded_model_trips_and_an_honest_one_does_not(tmp_path, reward, steps, hacked):
    (tmp_path / "dark.py").write_text(DARK)
    name = f"{tmp_path}/dark.py:dark" if reward == "dark" else reward
    c = load("shapes/demo", (f"run={tmp_path}/run", f"rewards=[{{name: '{name}'}}]", f"steps={steps}", *SMALL))
    if hacked is None:
        run.run(c)
        assert len(rows(c.folder)) == steps
    else:
        said, made = tripped(c)
        assert hacked in said and made < steps
