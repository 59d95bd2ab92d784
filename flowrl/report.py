"""What a run shows its readers: the table of an evaluation, its pictures, and report.html, one file for all of it."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image

from flowrl import charts, tables
from flowrl.charts import Rows
from flowrl.tables import Result

if TYPE_CHECKING:  # a report needs neither torch nor a model
    from flowrl.evaluate import Scores
    from flowrl.types import Prompt

SIDES = ("base", "tuned")
SHOWN = 256  # pixels a side that a picture has at most in the report


def save_pictures(folder: Path, prompts: Sequence[Prompt], base: Scores, tuned: Scores) -> None:
    """Every seed of the first `prompts` before and after as PNG, and prompts.json with their texts and scores."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.png"):
        stale.unlink()
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        rows.append({"id": prompt.id, "text": prompt.text})
        for side, scores in zip(SIDES, (base, tuned), strict=True):
            rows[i][side] = {name: values[i].tolist() for name, values in scores.rewards.items()}
            for k, image in enumerate(scores.images[i]):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / _file(i, k, side))
    (folder / "prompts.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def table(result: Result) -> str:
    """A report of `evaluate.evaluate` as plain text of at most 100 columns."""
    return tables.text(result)


def write(run_folder: str | Path) -> Path:
    """report.html of a run from what its folder holds so far. ValueError: the folder is no run."""
    folder = Path(run_folder)
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} is no run: it has no config.yaml; give the folder of a run, such as runs/demo")
    rows = [json.loads(line) for line in _read(folder / "metrics.jsonl").splitlines()]
    result = json.loads(_read(folder / "evaluation.json") or "null")
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    rewards = dict(_rewards(names))
    config = _read(folder / "config.yaml")
    watch = yaml.safe_load(config).get("watch")
    watched = [name for name in names if name.startswith("watch/")] if watch else []
    drawn = {*watched, *(name for some in rewards.values() for name in some)}
    times = [name for name in names if name.startswith("time/")]
    page = _template().render(
        run=folder,
        steps=len(rows),
        headline=_headline(result, rows, list(rewards)),
        rewards=[(some, charts.reward(rows, name)) for name, some in rewards.items()],
        drifts=(watched, charts.drifts(rows, watched, watch["bound"])) if watched else None,
        watch=watch,
        others=[(name, charts.curve(rows, name)) for name in names if name not in drawn and name not in times],
        result=result,
        grids=[tables.rewards(result), tables.guided(result), tables.probes(result)] if result else [],
        pictures=list(_pictures(folder / "pictures")),
        sides=SIDES,
        times=_shares({name: median(charts.series(rows, name)[1]) for name in times}),
        config=config,
        environment=json.loads(_read(folder / "environment.json") or "{}"),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _read(path: Path) -> str:
    """The text of a file, "" where there is none yet."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _template() -> Template:
    loader = PackageLoader("flowrl", ".")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.jinja")


def _rewards(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each reward, with the metrics that its chart shows."""
    means = [n.removeprefix("reward/") for n in names if n.startswith("reward/")]
    trained = [n.removesuffix("/mean") for n in means if n.endswith("/mean")]
    held_out = [n.removeprefix("eval/") for n in names if n.startswith("eval/")]
    for name in dict.fromkeys((*trained, *held_out)):
        yield name, [n for n in (f"reward/{name}/mean", f"reward/{name}/std", f"eval/{name}") if n in names]


def _headline(result: Result | None, rows: Rows, rewards: Sequence[str]) -> str:
    """One sentence: how the first reward of the evaluation changed, else how the first one went in training."""
    if result:
        name, row = next(iter(result["rewards"].items()))
        low, high = row["ci95"]
        if not row["n"]:
            return f"{name} has no verdict on any prompt."
        verb = "rose" if low > 0 else "fell" if high < 0 else "did not change measurably"
        n, closed = tables.places(row), row.get("closed")
        gap = f", {closed['share']:.0%} of the gap to the ceiling" if closed else ""
        return (
            f"{name} {verb}: {row['base']:.{n}f} before, {row['tuned']:.{n}f} after, a difference of "
            f"{row['diff']:+.{n}f} (95% interval {low:.{n}f} to {high:.{n}f}, {row['n']} prompts){gap}."
        )
    first = [(name, f"reward/{name}/mean") for name in rewards[:1]]
    for name, metric in (*first, ("the loss", "train/loss")):
        if values := [value for value in charts.series(rows, metric)[1] if not math.isnan(value)]:
            some = max(1, len(values) // 10)
            start, end = fmean(values[:some]), fmean(values[-some:])
            return f"In training, {name} went from {start:.3f} (first {some} steps) to {end:.3f} (last {some})."
    return "No step is on record yet."


def _shares(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, share of all)."""
    total = sum(seconds.values())
    return [(name, value, value / total) for name, value in seconds.items()]


def _pictures(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of prompts.json, with for each side its pictures as (data URI, pixels wide, score by reward)."""
    for i, row in enumerate(json.loads(_read(folder / "prompts.json") or "[]")):
        shown = {}
        for side in SIDES:
            scores = [dict(zip(row[side], values, strict=True)) for values in zip(*row[side].values(), strict=True)]
            shown[side] = [(*_embedded(folder / _file(i, k, side)), some) for k, some in enumerate(scores)]
        yield {"text": row["text"], **shown}


def _embedded(path: Path) -> tuple[str, int]:
    """(data URI, width) of a picture, made smaller than SHOWN where it is larger."""
    with Image.open(path) as image:
        image.thumbnail((SHOWN, SHOWN))
        out = BytesIO()
        image.save(out, "PNG")
        return f"data:image/png;base64,{b64encode(out.getvalue()).decode()}", image.width


def _file(prompt: int, seed: int, side: str) -> str:
    return f"{prompt:03}-{seed:02}-{side}.png"
