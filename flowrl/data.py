"""Where prompts come from and which of them a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.config import Data
from flowrl.pairs import read_pairs
from flowrl.prompt_files import PromptFile, read_prompts
from flowrl.types import Prompt


def asked(data: Data) -> PromptFile:
    """What the block `data:` of a run names: prompts, or pairs. Raises as `load` and `read_pairs` do."""
    if data.pairs is not None:
        return read_pairs(data.pairs, data.skip_bad)
    return load(str(data.prompts), data.skip_bad, data.dedupe)


def load(spec: str | Path, skip_bad: bool = False, dedupe: bool = False) -> PromptFile:
    """The prompts of a file, looked up from the current folder, or of shapes/train, shapes/validation, shapes/heldout.

    Raises PromptFileError listing every problem of the file (see `prompt_files.read_prompts`), ValueError for an
    unknown built-in set.
    """
    name = str(spec)
    if name.startswith("shapes/") and not Path(name).exists():
        from flowrl.zoo import shapes

        return PromptFile(shapes.prompts(name.removeprefix("shapes/")), [], [])
    return read_prompts(spec, skip_bad, dedupe)


def take(prompts: Sequence[Prompt], per_step: int, seed: int, step: int, rank: int = 0, world: int = 1) -> list[Prompt]:
    """The prompts of one step on one rank, a pure function of (seed, step).

    The steps read one endless list, epoch after epoch, each epoch the permutation keyed by (seed, epoch): place p is
    permutation[p // n][p % n], and step s holds the places [s per_step, (s + 1) per_step). A list shorter than
    per_step so comes round within a step. Rank r has the r-th of `world` equal contiguous shares.

    Raises ValueError where per_step does not split evenly over the ranks.
    """
    if per_step % world:
        fitting = [n for n in (per_step - per_step % world, per_step - per_step % world + world) if n]
        raise ValueError(
            f"data.prompts_per_step = {per_step} does not split evenly over {world} processes: "
            f"use {' or '.join(map(str, fitting))}"
        )
    share = per_step // world
    start = step * per_step + rank * share
    places = [divmod(place, len(prompts)) for place in range(start, start + share)]
    orders = {epoch: _order(len(prompts), seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return [prompts[orders[epoch][place]] for epoch, place in places]


def _order(n: int, seed: int, epoch: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(n).tolist()


def wrapping(n_prompts: int, per_step: int) -> str:
    """What the user is told where a step holds a prompt more than once, else ""."""
    if n_prompts >= per_step:
        return ""
    return f"data.prompts_per_step = {per_step} and prompts = {n_prompts}: steps repeat prompts, in a fixed order"
