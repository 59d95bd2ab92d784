"""The commands under `flowrl bench`."""

from __future__ import annotations

import json
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
    """Where a training step's time goes: the network's share by hooks on the network itself."""
    from flowrl.bench import step
    from flowrl.config import load

    with users_mistake():
        result = step.measure(load(config, overrides or ()), steps)
    typer.echo(json.dumps(result) if as_json else step.table(result))


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
