"""A run from its config to its folder: runs/<name>/ with the resolved config, metrics, checkpoints and the export."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from flowrl import checkpoint
from flowrl.config import Config
from flowrl.evaluate import generate, score
from flowrl.export import export
from flowrl.session import Session, make_accelerator, start
from flowrl.tell import Teller
from flowrl.train import train_step

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
    """Train and leave the run's folder behind. ValueError: the user's mistake, before any weight is loaded."""
    accelerator = make_accelerator(config)
    if accelerator.is_main_process:
        check_folder(config, resume, overwrite)
    accelerator.wait_for_everyone()
    folder, first, best = config.folder, 0, float("-inf")
    found = checkpoint.complete(folder / "checkpoints")[-1] if resume else None
    if found:
        _refuse_changed(config, folder)
    said: list[str] = []
    s = start(config, accelerator, said.append)
    if found:
        state = checkpoint.load(found, s.policy, s.optimiser)
        first, best = state["step"], state["best"]
        said.append(f"going on from {found}")
        if first >= config.steps:
            raise ValueError(f"--resume: {found} has done {first} steps and steps = {config.steps}; raise steps")
    elif accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, now that this one can begin
        folder.mkdir(parents=True)
    if accelerator.is_main_process:
        (folder / "config.yaml").write_text(config.to_yaml())
        (folder / "environment.json").write_text(json.dumps(environment(s), indent=1))
    accelerator.init_trackers(config.run, {"config": config.to_yaml()})
    with Teller(folder, accelerator, config.steps, first) as teller:
        for line in said:
            teller.line(line)
        for step in range(first, config.steps):
            metrics, last = train_step(s, step), step + 1 == config.steps
            if _due(config.evaluate.every, step) or (config.evaluate.every and last):
                metrics |= held_out(s)
            teller.row(step, metrics)
            reached = metrics.get(f"eval/{config.save.best}", best)
            better = reached > best
            best = reached if better else best
            if accelerator.is_main_process:
                if better:
                    checkpoint.save(folder / "best", step + 1, s.policy, s.optimiser, {"best": best}, keep=1)
                if last or _due(config.save.every, step):
                    keep = config.save.keep
                    checkpoint.save(folder / "checkpoints", step + 1, s.policy, s.optimiser, {"best": best}, keep)
    if accelerator.is_main_process:
        export(s, folder / "export")
    accelerator.end_training()
    return folder


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
    changed = [key for key in now if now[key] != was.get(key) and key not in ("steps", "save", "track")]
    if changed:
        raise ValueError(
            f"--resume: {', '.join(changed)} differ from {folder / 'config.yaml'}; a resumed run keeps its config"
        )
