"""Checkpoints that are whole or absent: written aside, checksummed, moved into place; nothing in them executes.

checkpoints/step-000020/   current|old|ref|average.safetensors, optimiser.pt, state.json, manifest.json (last)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowrl.policy import Policy

log = logging.getLogger(__name__)
FORMAT = 1


def save(
    root: Path, step: int, policy: Policy, optimiser: torch.optim.Optimizer, extra: dict[str, Any], keep: int
) -> Path:
    """Write the state after `step` steps and drop all but the `keep` newest checkpoints."""
    target, partial = root / f"step-{step:06d}", root / f".partial-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors, counters = policy.state()
    for slot, values in tensors.items():
        save_file({name: value.contiguous() for name, value in values.items()}, partial / f"{slot}.safetensors")
    torch.save(optimiser.state_dict(), partial / "optimiser.pt")
    state = {"format": FORMAT, "step": step, "policy": counters, **extra}
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    sums = {file.name: _sum(file) for file in sorted(partial.iterdir())}
    with open(partial / "manifest.json", "w") as f:
        json.dump(sums, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in _found(root)[:-keep]:
        shutil.rmtree(old)
    return target


def complete(root: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; broken ones are named and passed over."""
    found = []
    for folder in _found(root):
        try:
            sums = json.loads((folder / "manifest.json").read_text())
            broken = [name for name, value in sums.items() if _sum(folder / name) != value]
        except (OSError, ValueError) as error:
            broken = [str(error)]
        if broken:
            log.warning("checkpoint %s is incomplete (%s) and is passed over", folder, broken[0])
        else:
            found.append(folder)
    return found


def load(folder: Path, policy: Policy, optimiser: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Put a checkpoint's weights, and the optimiser's state where one is given, in place; returns its state.json."""
    state = json.loads((folder / "state.json").read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"{folder} is a checkpoint of format {state['format']}, this version reads format {FORMAT}")
    slots = ("current", "old", "ref", "average")
    policy.load_state({slot: load_file(folder / f"{slot}.safetensors") for slot in slots}, state["policy"])
    if optimiser is not None:
        optimiser.load_state_dict(torch.load(folder / "optimiser.pt", weights_only=True, map_location="cpu"))
    return state


def _found(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def _sum(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as f:
        while chunk := f.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
