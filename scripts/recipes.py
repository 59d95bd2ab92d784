"""Train and evaluate the recipes of configs/shapes at several seeds, and write what they reach to docs/recipes.md.

What a recipe reached at a seed is kept in docs/recipes.json and not measured again until the recipe changes, so an
interrupted call goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "configs" / "shapes"
RESULTS = ROOT / "docs" / "recipes.json"
FAST = ("nft", "awm", "ram")  # five minutes, those of a judge ten, the others eight
JUDGED = ("nft_clip", "nft_vlm")  # have to raise the verifier's score, which they are not taught
HEAD = """\
| recipe | steps | strict score, by seed | gap closed, by seed | worst, 95 % | seconds, slowest / limit | holds |
| --- | --- | --- | --- | --- | --- | --- |"""
SHARE = 0.20  # of the gap between base and ceiling that a recipe is to close at its worst seed


def flowrl(*args: str) -> str:
    """The output of a command; its messages go to the terminal."""
    command = [sys.executable, "-m", "flowrl", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def recipe(name: str) -> dict:
    return yaml.safe_load((SHAPES / f"{name}.yaml").read_text())


def digest(name: str) -> str:
    """Of what the recipe says, whatever its comments."""
    return hashlib.sha256(json.dumps(recipe(name), sort_keys=True).encode()).hexdigest()[:12]


def kept() -> dict[str, dict]:
    """ "recipe/seed": what it reached."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def known(name: str, seeds: list[int]) -> list[dict]:
    """What the recipe as it stands reached at those seeds that were measured."""
    found = [kept().get(f"{name}/{seed}") for seed in seeds]
    return [one for one in found if one and one["recipe"] == digest(name)]


def make(name: str, seed: int, out: Path) -> None:
    """Train and evaluate a recipe at a seed, unless what it reaches is known."""
    if known(name, [seed]):
        return
    folder, begun = out / f"{name}-seed{seed}", time.perf_counter()
    flowrl("train", str(SHAPES / f"{name}.yaml"), f"run={folder}", f"seed={seed}", "--overwrite")
    seconds = round(time.perf_counter() - begun, 1)
    found = json.loads(flowrl("eval", str(folder), "--json", "--no-guided"))["rewards"]["shapes_strict"]
    results = {**kept(), f"{name}/{seed}": {"recipe": digest(name), "seconds": seconds, **found}}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def row(name: str, results: list[dict]) -> str:
    """A line of the table; the worst seed decides."""
    worst = min(results, key=lambda r: r["closed"]["share"])
    slowest = max(r["seconds"] for r in results)
    limit = 300 if name in FAST else 600 if name in JUDGED else 480
    shares = " ".join(f"{r['closed']['share']:.0%}" for r in results)
    low, high = worst["closed"]["ci95"]
    learns = low > 0 if name in JUDGED else worst["closed"]["share"] >= SHARE
    holds = "yes" if learns and slowest <= limit else "no"
    tuned = " ".join(f"{r['tuned']:.3f}" for r in results)
    steps = recipe(name)["steps"]
    return f"| {name} | {steps} | {tuned} | {shares} | [{low:.0%}, {high:.0%}] | {slowest:.0f} / {limit} | {holds} |"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Recipes; all where none is given.")] = None,
    seeds: str = "0,1,2",
    out: Path = Path("runs/recipes"),
) -> None:
    """Make recipes, then write the table of all that have results to docs/recipes.md."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    every = sorted(path.stem for path in SHAPES.glob("*.yaml") if path.stem != "demo")
    numbers = [int(seed) for seed in seeds.split(",")]
    for name in names or every:
        for seed in numbers:
            make(name, seed, ROOT / out)
        typer.echo(row(name, known(name, numbers)))
    lines = [HEAD, *(row(name, results) for name in every if (results := known(name, numbers)))]
    page = ROOT / "docs" / "recipes.md"
    head = page.read_text().split("\n| recipe |")[0]
    page.write_text(head + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
