"""The commands under `flowrl bench`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli_shared import ConfigPath, Overrides, users_mistake

bench = typer.Typer(no_args_is_help=True, help="Measure speed and signal; ratios are taken inside one run.")


@bench.command("step")
def bench_step(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps measured after one warm-up step.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Where a training step's time goes; of a model that shares its text, what that saves."""
    from flowrl.bench import sharing, step
    from flowrl.config import load

    with users_mistake():
        loaded = load(config, overrides or ())
        way = sharing if getattr(loaded.model, "share_context", False) else step
        result = way.measure(loaded, steps)
    typer.echo(json.dumps(result) if as_json else way.table(result))


@bench.command("signal")
def bench_signal(
    config: ConfigPath,
    overrides: Overrides = None,
    rollouts: Annotated[int, typer.Option(min=3, help="Rollouts whose gradients are compared.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How many pictures an objective needs until its gradient is more signal than noise; no weight moves."""
    from flowrl.bench import signal
    from flowrl.config import load

    with users_mistake():
        result = signal.measure(load(config, overrides or ()), rollouts)
    typer.echo(json.dumps(result) if as_json else signal.table(result))


@bench.command("attention")
def bench_attention(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for the better one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; auto: float32, on a GPU bfloat16.")
    ] = "auto",
    to: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Cross-attention to shared text against stock code: time, memory, FLOP; nothing on a wrong result."""
    from flowrl_kernels import bench

    with users_mistake():
        cases = bench.cases(device, dtype)
    try:
        results = [bench.measure(case) for case in cases]
    except bench.Wrong as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    if to:
        rows = bench.rows(results)
        with to.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    typer.echo(json.dumps(results) if as_json else "\n\n".join(map(bench.table, results)))
