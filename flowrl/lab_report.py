"""What the laboratory found, as a table, as data and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from flowrl.lab import PRIOR, Normal, Result

COLUMNS = 4  # panels in a row
HEADER = ("case", "reward", "mean", "std", "exact mean", "exact std", "KL", "claim", "rows", "s", "holds")


def table(results: Sequence[Result]) -> str:
    """One line a case, and the count of those that do not hold."""
    drawn = Table(box=MARKDOWN)
    for name in HEADER:
        drawn.add_column(name, justify="left" if name in ("case", "reward", "claim", "holds") else "right")
    for r in results:
        laws = (f"{value:.3f}" for law in (r.reached, r.case.exact) for value in (law.mean, law.std))
        drawn.add_row(
            r.case.name, str(r.case.reward), *laws, f"{r.kl:.4f}", r.case.claim, f"{r.rows:,}", f"{r.seconds:.0f}",
            "yes" if r.holds else "NO",
        )  # fmt: skip
    out = StringIO()
    Console(file=out, width=200, color_system=None, markup=False, emoji=False, highlight=False).print(drawn)
    failed = sum(not r.holds for r in results)
    last = f"{failed} of {len(results)} cases do not hold" if failed else f"all {len(results)} cases hold"
    return "\n".join([*(line.rstrip() for line in out.getvalue().strip("\n").splitlines()), last])


def data(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [
        {
            "case": r.case.name, "algorithm": r.case.algorithm, "reward": str(r.case.reward), "m": r.case.m,
            **vars(r.reached), "exact": vars(r.case.exact), "kl": r.kl, "claim": r.case.claim, "rows": r.rows,
            "seconds": r.seconds, "holds": r.holds,
        }
        for r in results
    ]  # fmt: skip


def plot(results: Sequence[Result], path: Path) -> None:
    """A panel a case: the densities of the prior, of the exact tilt and of the law that was reached."""
    rows = math.ceil(len(results) / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.2 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True).ravel()
    x = np.linspace(-3, 3.5, 300)
    for axes, r in zip(panels, results, strict=False):
        axes.plot(x, density(PRIOR, x), color="0.7", linewidth=1, label="prior")
        axes.fill_between(x, density(r.case.exact, x), color="tab:blue", alpha=0.25, linewidth=0, label="exact")
        axes.plot(x, density(r.reached, x), color="tab:blue" if r.holds else "tab:red", linewidth=1.5, label="reached")
        axes.set_title(f"{r.case.name}{'' if r.holds else ' does not hold'}", fontsize=9)
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def density(law: Normal, x: np.ndarray) -> np.ndarray:
    return np.exp(-(((x - law.mean) / law.std) ** 2) / 2) / (law.std * math.sqrt(2 * math.pi))
