"""The watch of a session: its base is measured once, and a run that has drifted goes back to where it had not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl import checkpoint
from flowrl.clock import Clock
from flowrl.session import Session
from flowrl.tell import Sums
from flowrl.train import rolled_out
from flowrl.watchdog import Watch, Watchdog, base

SOUND = "sound"  # beside checkpoints/ and best/: the newest of before any drift, for a rollback


def watchdog(s: Session, state: Mapping[str, Any], tell: Callable[[str], None]) -> Watchdog:
    """The watch of a run that goes on from `state`: before its first step the policy is the base, which is measured."""
    w: Watch | None = s.config.watch
    kept: dict[str, Any] = state.get("watch", {"base": {}})
    if w is None or s.pairs:
        return Watchdog(Watch(), {})
    if state["step"] == 0:
        sums = Sums()
        for step in w.reference(s.config.steps, s.config.data.prompts_per_step):
            rolled_out(s, step, Clock(), sums)
        untrained = [name for name, weight in zip(s.columns, s.rewards.weights, strict=True) if not weight]
        kept = {"base": base(sums.reduced(s.total), untrained)}
    elif not kept["base"]:
        raise ValueError(
            "--resume: watch is given, but the run began without and its base is not measured; add watch=null"
        )
    dog = Watchdog(w, **kept)
    for name in dog.flat:
        tell(f"watch: {name} is the same in all pictures of the base, so that a drift has no unit; it is not watched")
    return dog


def roll_back(s: Session) -> None:
    """The sound checkpoint is in place and the newest of the run; those with the drift lie in drifted/."""
    folder = s.config.folder
    checkpoint.load(checkpoint.complete(folder / SOUND)[-1], s.policy, s.optimiser)
    s.accelerator.wait_for_everyone()
    if s.accelerator.is_main_process:
        shutil.rmtree(folder / "drifted", ignore_errors=True)
        os.replace(folder / "checkpoints", folder / "drifted")
        settle(folder)


def settle(folder: Path) -> None:
    """The second half of a rollback, which a kill may have cut off from the first."""
    if (folder / "drifted").exists() and (folder / SOUND).exists() and not (folder / "checkpoints").exists():
        os.replace(folder / SOUND, folder / "checkpoints")
