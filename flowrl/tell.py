"""What a run tells: metrics.jsonl always, trackers beside it, and a progress bar on the main process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor


class Sums:
    """Weighted sums of values by metric name, reduced over ranks once a step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}

    def mean(self, name: str, values: Tensor, weight: Tensor | None = None) -> None:
        """Add values [N] to the mean reported as `name`."""
        weight = torch.ones_like(values) if weight is None else weight.to(values.dtype)
        self.parts.setdefault(name, []).append(torch.stack([(values * weight).sum(), weight.sum()]).double())

    def spread(self, name: str, values: Tensor) -> None:
        """Add values [N] with NaN = none to name/mean, name/std and name/nan_frac."""
        self.moments(name, values[~values.isnan()])
        self.mean(f"{name}/nan_frac", values.isnan().float())

    def moments(self, name: str, values: Tensor) -> None:
        """Add values [N] to name/mean and name/std."""
        values = values.double()  # the square of a mean cancels most digits
        self.mean(f"{name}/mean", values)
        self.mean(f"{name}/square", values.square())

    def reduced(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """{name: weighted mean over all ranks}, a mean of nothing left out; `total` sums a tensor over them."""
        names = sorted(self.parts)
        table = torch.stack([torch.stack(self.parts[name]).sum(0).cpu() for name in names])
        table = total(table)
        rows = zip(names, table.tolist(), strict=True)
        means = {name: top / weight for name, (top, weight) in rows if weight}
        for name in [n for n in means if n.endswith("/square")]:
            stem = name.removesuffix("/square")
            mean = means[f"{stem}/mean"]
            means[f"{stem}/std"] = max(0.0, means.pop(name) - mean**2) ** 0.5
        return means


class Teller:
    """Writes rows as they come; on ranks other than the main one it is silent."""

    def __init__(self, folder: Path, accelerator: Accelerator, steps: int, first: int = 0) -> None:
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.path, self.steps = folder / "metrics.jsonl", steps
        self.console = Console(stderr=True, quiet=not self.main)
        if self.main:
            _drop_rows_from(self.path, first)
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self.console, disable=not (self.main and self.console.is_terminal),
        )  # fmt: skip
        self.task = self.bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Teller:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def row(self, step: int, metrics: Mapping[str, float], beyond: Mapping[str, float]) -> None:
        """One step's metrics; `beyond` are the drifts that are to be seen at once."""
        if self.main:
            with open(self.path, "a") as f:
                f.write(json.dumps({"step": step, **metrics}) + "\n")
        self.accelerator.log(dict(metrics), step=step)
        means = [f"{name.split('/', 1)[1]} {metrics[name]:.3f}" for name in self._worth_saying(metrics)]
        said = "  ".join([*means, *(f"{name} drift {drift:+.1f}" for name, drift in beyond.items())])
        self.bar.update(self.task, completed=step + 1, description=said)
        if self.main and not self.console.is_terminal and ((step + 1) % max(1, self.steps // 10) == 0):
            self.line(f"step {step + 1}/{self.steps}  {said}")

    def _worth_saying(self, metrics: Mapping[str, float]) -> list[str]:
        rewards = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean")]
        return [*rewards, *(name for name in ("train/loss",) if name in metrics)]


def _drop_rows_from(path: Path, first: int) -> None:
    """A resumed run writes its steps again: keep the first rows, which were whole before their checkpoint was."""
    if path.exists():
        rows = path.read_text().splitlines()
        path.write_text("".join(row + "\n" for row in rows[:first]))
