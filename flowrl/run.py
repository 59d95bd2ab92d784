"""A run from its config to its folder: runs/<name>/ with the resolved config, metrics, checkpoints and the export."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowrl import checkpoint
from flowrl.config import Config
from flowrl.evaluate import generate, score
from flowrl.export import export
from flowrl.guard import SOUND, roll_back, settle, watchdog
from flowrl.session import Session, make_accelerator, start
from flowrl.tell import Teller
from flowrl.train import train_step
from flowrl.watchdog import Tripped, Watchdog

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


def check_folder(config: Config, resume: bool, overwrite: bool) -> None:
    """See that the run can have its folder. ValueError: it is in use, or holds nothing to resume."""
    folder = config.folder
    if resume and overwrite:
        raise ValueError("--resume goes on with what --overwrite removes: give one of them")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run = {config.run}: {folder} is a file; give another name")
    used = folder.exists() and any(folder.iterdir())
    if resume:
        if not checkpoint.complete(folder / "checkpoints"):
            raise ValueError(f"--resume: there is no whole checkpoint in {folder / 'checkpoints'}; start without it")
        return
    if used and not overwrite:
        raise ValueError(
            f"run = {config.run}: {folder} is not empty; give another name (run=NAME), --resume or --overwrite"
        )
    if used and not (folder / "config.yaml").exists():
        raise ValueError(f"run = {config.run}: {folder} is no run's folder and is not removed; give another name")


def run(config: Config, resume: bool = False, overwrite: bool = False) -> Path:
    """Train and leave the run's folder behind.

    ValueError: the user's mistake, before any weight is loaded. Tripped: the watch ended the run, see `end`.
    """
    accelerator = make_accelerator(config)
    if accelerator.is_main_process:
        settle(config.folder)
        check_folder(config, resume, overwrite)
    accelerator.wait_for_everyone()
    folder, state = config.folder, {"step": 0, "best": float("-inf")}
    found = checkpoint.complete(folder / "checkpoints")[-1] if resume else None
    if found:
        _refuse_changed(config, folder)
    said: list[str] = []
    s = start(config, accelerator, said.append)
    if found:
        state = checkpoint.load(found, s.policy, s.optimiser)
        said.append(f"going on from {found}")
        if state["step"] >= config.steps and (folder / "export").exists():
            raise ValueError(
                f"--resume: {found} has done {state['step']} steps and steps = {config.steps}; raise steps"
            )
    elif accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, now that this one can begin
        folder.mkdir(parents=True)
    if accelerator.is_main_process:
        (folder / "config.yaml").write_text(config.to_yaml())
        (folder / "environment.json").write_text(json.dumps(environment(s), indent=1))
    accelerator.init_trackers(config.run, {"config": config.to_yaml()})
    with Teller(folder, accelerator, config.steps, state["step"]) as teller:
        for line in said:
            teller.line(line)
        dog = watchdog(s, state, teller.line)
        go_through(s, state, dog, teller)
    end(s, dog)
    return folder


def go_through(s: Session, state: Mapping[str, Any], dog: Watchdog, teller: Teller) -> None:
    """The steps that are left, with their evaluations and checkpoints; the watch may end them early."""
    c, folder, best = s.config, s.config.folder, state["best"]
    rolls_back = dog.watch.action == "rollback"

    def keep(where: str, step: int, count: int = 1) -> None:
        if s.accelerator.is_main_process:
            extra = {"best": best, "watch": dog.state}
            checkpoint.save(folder / where, step, s.policy, s.optimiser, extra, count)

    if rolls_back and not (folder / SOUND).exists():
        if not dog.quiet:
            raise ValueError("watch.action = rollback: the run has drifted already, so there is nothing sound to keep; "
                             "take watch.action=stop or warn")  # fmt: skip
        keep(SOUND, state["step"])
    for step in range(state["step"], c.steps):
        metrics = train_step(s, step)
        metrics |= dog.see(step, metrics)
        last = dog.trips or step + 1 == c.steps
        if _due(c.evaluate.every, step) or (c.evaluate.every and last):
            metrics |= held_out(s)
        for sentence in dog.news():
            teller.line(f"step {step + 1}: {sentence}")
        teller.row(step, metrics, dog.beyond)
        reached = metrics.get(f"eval/{c.save.best}", best)
        if reached > best:
            best = reached
            keep("best", step + 1)
        if last or _due(c.save.every, step):
            keep("checkpoints", step + 1, c.save.keep)
            if rolls_back and dog.quiet:
                keep(SOUND, step + 1)
        if last:
            return


def end(s: Session, dog: Watchdog) -> None:
    """Export what the run has come to. Tripped: the watch ended it, and only what it has rolled back to is exported."""
    done, fate = s.policy.rollouts, "nothing is exported, and --resume watch.action=warn goes on"
    if dog.trips and dog.watch.action == "rollback":
        roll_back(s)
        fate = f"the weights are those after step {s.policy.rollouts} again, before the drift, and exported"
    if s.accelerator.is_main_process and not (dog.trips and dog.watch.action == "stop"):
        export(s, s.config.folder / "export")
    s.accelerator.end_training()
    if dog.trips:
        raise Tripped(f"the watch ended the run after step {done}: {dog.verdict}; {fate}")


def held_out(s: Session) -> dict[str, float]:
    """eval/<reward>: means of the averaged weights on the prompts of the `evaluate` block."""
    scores = score(s.judges, s.held, generate(s, "average", s.held, s.adapter.encode(s.held), s.config.evaluate.seeds))
    return {f"eval/{name}": values.nanmean().item() for name, values in scores.rewards.items()}


def reopen(folder: Path, tell: Callable[[str], None] = lambda line: None) -> Session:
    """The session of a run as its newest checkpoint left it."""
    from flowrl.config import load

    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} is no run: it has no config.yaml; give the folder of a run, such as runs/demo")
    found = checkpoint.complete(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} has no whole checkpoint yet")
    s = start(load(folder / "config.yaml"), tell=tell)
    checkpoint.load(found[-1], s.policy)
    return s


def environment(s: Session) -> dict[str, object]:
    """What the numbers of a run depend on besides its config."""
    grid = s.adapter.grid(s.config.sampler.steps).tolist()
    return {
        "flowrl": version("flowrl-posttrain"), "python": platform.python_version(), "machine": platform.machine(),
        **{name: version(name) for name in LIBRARIES}, "device": str(s.accelerator.device),
        "processes": s.accelerator.num_processes, "threads": torch.get_num_threads(), "grid": grid,
    }  # fmt: skip


def _due(every: int, step: int) -> bool:
    return every > 0 and (step + 1) % every == 0


def _refuse_changed(config: Config, folder: Path) -> None:
    from flowrl.config import load

    was, now = load(folder / "config.yaml").dump(), config.dump()
    changed = [key for key in now if now[key] != was.get(key) and key not in ("steps", "save", "track", "watch")]
    if changed:
        raise ValueError(
            f"--resume: {', '.join(changed)} differ from {folder / 'config.yaml'}; a resumed run keeps its config"
        )
