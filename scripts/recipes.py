"""Train and evaluate the recipes of configs/shapes at several seeds, and write what they reach to docs/recipes.md.

A recipe and seed that has its evaluation already is not run again, so an interrupted call goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, cast

import typer

from flowrl.config import load
from flowrl.config_file import ConfigError

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "configs" / "shapes"
FAST = ("nft", "awm", "ram")  # five minutes, the others eight
HEAD = """\
| recipe | steps | strict score, by seed | gap closed, by seed | worst, 95 % | seconds, slowest / limit | holds |
| --- | --- | --- | --- | --- | --- | --- |"""
SHARE = 0.20  # of the gap between base and ceiling that a recipe is to close at its worst seed


def flowrl(*args: str) -> str:
    """The output of a command; its messages go to the terminal."""
    command = [sys.executable, "-m", "flowrl", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def made(name: str, seed: int, out: Path) -> dict:
    """What a recipe reaches at a seed: trained and evaluated now, unless its folder has that already."""
    folder = out / f"{name}-seed{seed}"
    if known(name, seed, out) is None:
        begun = time.perf_counter()
        flowrl("train", str(SHAPES / f"{name}.yaml"), f"run={folder}", f"seed={seed}", "--overwrite")
        (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - begun))
        flowrl("eval", str(folder), "--json", "--no-guided")
    return cast(dict, known(name, seed, out))


def known(name: str, seed: int, out: Path) -> dict | None:
    """What the recipe as it stands was found to reach at a seed; None where that was not measured."""
    folder = out / f"{name}-seed{seed}"
    done = folder / "evaluation.json"
    if not done.exists():
        return None
    try:
        was = load(folder / "config.yaml")
    except ConfigError:  # of an earlier version
        return None
    if was != load(SHAPES / f"{name}.yaml", [f"run={folder}", f"seed={seed}"]):
        return None
    seconds = json.loads((folder / "seconds.json").read_text())
    return {"seconds": seconds, **json.loads(done.read_text())["rewards"]["shapes_strict"]}


def row(name: str, results: list[dict]) -> str:
    """A line of the table; the worst seed decides."""
    worst = min(results, key=lambda r: r["closed"]["share"])
    slowest, limit = max(r["seconds"] for r in results), 300 if name in FAST else 480
    shares = " ".join(f"{r['closed']['share']:.0%}" for r in results)
    low, high = worst["closed"]["ci95"]
    holds = "yes" if worst["closed"]["share"] >= SHARE and slowest <= limit else "no"
    tuned = " ".join(f"{r['tuned']:.3f}" for r in results)
    steps = load(SHAPES / f"{name}.yaml").steps
    return f"| {name} | {steps} | {tuned} | {shares} | [{low:.0%}, {high:.0%}] | {slowest:.0f} / {limit} | {holds} |"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Recipes; all where none is given.")] = None,
    seeds: str = "0,1,2",
    out: Path = Path("runs/recipes"),
) -> None:
    """Make recipes, then write the table of all that have results to docs/recipes.md."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    numbers = [int(seed) for seed in seeds.split(",")]
    every = sorted(path.stem for path in SHAPES.glob("*.yaml") if path.stem != "demo")
    for name in names or every:
        typer.echo(row(name, [made(name, seed, ROOT / out) for seed in numbers]))
    found = {name: [r for seed in numbers if (r := known(name, seed, ROOT / out))] for name in every}
    lines = [HEAD, *(row(name, results) for name, results in found.items() if results)]
    page = ROOT / "docs" / "recipes.md"
    head = page.read_text().split("\n| recipe |")[0]
    page.write_text(head + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
