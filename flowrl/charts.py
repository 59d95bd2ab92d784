"""Curves of metrics.jsonl as inline SVG that takes its colours from the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from itertools import cycle
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.watchdog import harm

Rows = Sequence[dict[str, float]]  # of metrics.jsonl

COLOURS = {"#010203": "currentColor", "#010204": "var(--accent)", "#010205": "var(--second)"}  # drawn: shown
INK, ACCENT, SECOND = COLOURS
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "flowrl", "font.size": 9, "axes.labelcolor": INK, "text.color": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.grid": True,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": INK, "grid.alpha": 0.12, "legend.frameon": False,
    "axes.formatter.useoffset": False, "axes.labelpad": 8,
}  # fmt: skip
DASHES: Sequence[Any] = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)), (0, (8, 3)))
FEW = 20  # points that are drawn as dots, too


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a metric where it was measured; NaN leaves a gap in its line."""
    seen = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in seen], [value for _, value in seen]


def reward(rows: Rows, name: str) -> Markup:
    """The mean of a training reward with its standard deviation over samples, and its held-out evaluations."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        axes = figure.subplots()
        x, mean = series(rows, f"reward/{name}/mean")
        if mean:
            _, std = series(rows, f"reward/{name}/std")
            low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=ACCENT, alpha=0.14, linewidth=0, label="± std over samples")
            axes.plot(x, mean, color=ACCENT, linewidth=1.6, label="training prompts", marker=_marker(x))
        x, held = series(rows, f"eval/{name}")
        if held:
            axes.plot(x, held, color=SECOND, linewidth=1.2, marker="o", markersize=4, label="evaluation prompts")
        axes.legend(loc="best", fontsize=8)
        axes.set(xlabel="step", ylabel=name)
        return _svg(figure, f"{name} by step")


def drifts(rows: Rows, names: Sequence[str], bound: float) -> Markup:
    """The drifts watch/<probe> of a run, those that were ever beyond +-bound in another colour."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.axhspan(-bound, bound, color=ACCENT, alpha=0.1, linewidth=0)
        for name, dashes in zip(names, cycle(DASHES)):
            x, y = series(rows, name)
            look = (
                {"color": SECOND, "linewidth": 1.6}
                if max(harm(name.removeprefix("watch/"), d) for d in y) > bound
                else {"color": INK, "alpha": 0.5}
            )
            axes.plot(
                x, y, label=name.removeprefix("watch/"), linestyle=dashes, marker=_marker(x), markersize=3, **look
            )
        figure.legend(loc="outside upper center", ncols=3, fontsize=7)
        axes.set(xlabel="step", ylabel="drift, in units of the base")
        return _svg(figure, "drift by step")


def curve(rows: Rows, name: str) -> Markup:
    """One metric by step, small."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4, 1.9), layout="constrained")
        axes = figure.subplots()
        x, y = series(rows, name)
        axes.plot(x, y, color=ACCENT, linewidth=1.2, marker=_marker(x))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set(xlabel="step", ylabel=name.rpartition("/")[2])
        return _svg(figure, f"{name} by step")


def _marker(x: Sequence[float]) -> str:
    return "." if len(x) <= FEW else ""


def _svg(figure: Figure, title: str) -> Markup:
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    for drawn, shown in COLOURS.items():
        text = text.replace(drawn, shown)
    return Markup('<div class="chart" role="img" aria-label="{}">{}</div>').format(title, Markup(text))
