"""An evaluation as tables of text, the same cells for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

Result = Mapping[str, Any]  # a report of `evaluate.evaluate`

COMPARED = ("base", "tuned", "difference")
NONE = "-"


@dataclass(frozen=True)
class Grid:
    """Cells under a header; `legend` says what the names in the header mean."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    legend: dict[str, str] = field(default_factory=dict)


def rewards(result: Result) -> Grid:
    """Each reward before and after, its ceiling, the share of the gap that closed, and what guidance would give."""
    rows = []
    for name, row in result["rewards"].items():
        n, closed = places(row), row.get("closed")
        ceiling = NONE if row["ceiling"] is None else f"{row['ceiling']:.{n}f}"
        gap = "{:.0%} [{:.0%}, {:.0%}]".format(closed["share"], *closed["ci95"]) if closed else NONE
        by_scale = {scale: scores[name] for scale, scores in result["guided_base"].items()}
        best = max(by_scale, key=by_scale.__getitem__, default=None)
        rows.append((*compared(name, row), ceiling, gap, f"{by_scale[best]:.{n}f} at {best}" if best else NONE))
    return Grid(("reward", *COMPARED, "ceiling", "gap closed", "guided base"), rows, {
        "difference": "tuned - base on the same prompts and noise, [its 95% interval by bootstrap over prompts]",
        "ceiling": "what pictures of the true scenes score, where the prompts say what is true",
        "gap closed": "difference / (ceiling - base), [its interval]",
        "guided base": "the base at its best guidance scale, which costs two forwards a step",
    })  # fmt: skip


def probes(result: Result) -> Grid:
    """What was never optimised, before and after."""
    rows = [compared(name, row) for name, row in result["probes"].items()]
    meaning = "a number of the pictures that is never optimised: a large drift is a sign of a gamed reward"
    return Grid(("probe", *COMPARED), rows, {"probe": meaning})


def guided(result: Result) -> Grid:
    """Each reward of the base at every guidance scale; no rows where that was not measured."""
    scales = result["guided_base"]
    rows = [
        (name, *(f"{scores[name]:.{places(row)}f}" for scores in scales.values()))
        for name, row in result["rewards"].items()
        if scales
    ]
    return Grid(("base at guidance scale", *scales), rows)


def compared(name: str, row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """The cells of one `evaluate.compare`."""
    n, (low, high) = places(row), row["ci95"]
    return name, f"{row['base']:.{n}f}", f"{row['tuned']:.{n}f}", f"{row['diff']:+.{n}f} [{low:.{n}f}, {high:.{n}f}]"


def places(row: Mapping[str, Any]) -> int:
    """Decimals of a row: three digits of the larger mean, and at least 0.001 of a unit scale."""
    size = max(abs(row["base"]), abs(row["tuned"]))
    digits = 2 - math.floor(math.log10(size)) if size > 0 else 3
    return min(6, max(digits, 3 if size < 10 else 2))


def text(result: Result) -> str:
    """Rewards and probes as plain text of at most 100 columns."""
    out = StringIO()
    console = Console(file=out, width=100, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(f"base against tuned: {result['prompts']} prompts x {result['seeds']} seeds")
    for grid in rewards(result), probes(result):
        drawn = Table(box=MARKDOWN)
        for name in grid.header:
            first, wide = name == grid.header[0], name == COMPARED[-1]
            drawn.add_column(name, justify="left" if first else "right", overflow="fold", no_wrap=not (first or wide))
        for row in grid.rows:
            drawn.add_row(*row)
        console.print(drawn, *(f"{name}: {meaning}" for name, meaning in grid.legend.items()), sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
