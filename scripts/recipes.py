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
from typing import Annotated

import typer

from flowrl.config import load

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


def result(name: str, seed: int, out: Path) -> dict:
    """What a recipe as it stands reaches at a seed: trained and evaluated now, or read from its folder."""
    folder, overrides = out / f"{name}-seed{seed}", [f"run={out / f'{name}-seed{seed}'}", f"seed={seed}"]
    done, seconds = folder / "evaluation.json", folder / "seconds.json"
    if not (done.exists() and load(folder / "config.yaml") == load(SHAPES / f"{name}.yaml", overrides)):
        begun = time.perf_counter()
        flowrl("train", str(SHAPES / f"{name}.yaml"), *overrides, "--overwrite")
        seconds.write_text(json.dumps(time.perf_counter() - begun))
        flowrl("eval", str(folder), "--json", "--no-guided")
    return {"seconds": json.loads(seconds.read_text()), **json.loads(done.read_text())["rewards"]["shapes_strict"]}


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
    """Print the table of all recipes that have results, and write it to docs/recipes.md."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    numbers = [int(seed) for seed in seeds.split(",")]
    every = sorted(path.stem for path in SHAPES.glob("*.yaml") if path.stem != "demo")
    for name in names or every:
        typer.echo(row(name, [result(name, seed, out) for seed in numbers]))
    there = [n for n in every if all((out / f"{n}-seed{seed}" / "evaluation.json").exists() for seed in numbers)]
    lines = [HEAD, *(row(name, [result(name, seed, out) for seed in numbers]) for name in there)]
    page = ROOT / "docs" / "recipes.md"
    head = page.read_text().split("\n| recipe |")[0]
    page.write_text(head + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
