"""The commands under `flowrl rewards`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flowrl.cli_shared import users_mistake

rewards = typer.Typer(no_args_is_help=True, help="List, check and serve rewards.")


@rewards.command("list")
def list_rewards(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every reward that has a name here: its columns, what it needs, and what it lacks, packages or weights."""
    from flowrl import trials

    header = ("name", "columns", "needs", "scope", "extra", "state")
    rows = [(name, *trials.described(name)) for name in trials.names()]
    if as_json:
        typer.echo(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))
        return
    wide = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip())


@rewards.command()
def check(
    name: Annotated[str | None, typer.Argument(help="One reward; all that are ready where none is given.")] = None,
    options: Annotated[list[str] | None, typer.Argument(help="Its options, such as path=/my/weights.")] = None,
) -> None:
    """Gold cases, order, batches and time per picture; exit 0 only if nothing fails."""
    from flowrl import trials
    from flowrl.config_file import override
    from flowrl.scorers import RewardSpec

    failed = False
    with users_mistake():
        for one in [name] if name else trials.names():
            if name is None and trials.described(one)[-1] != "ready":
                typer.echo(f"-     {one}: {trials.described(one)[-1]}")
                continue
            trial = trials.trial(RewardSpec(name=one, options=override({}, options or [])))
            failed |= bool(trial.failures) or (name is not None and not trial.tried)
            said = "; ".join([*trial.failures, trial.note]).strip("; ")
            time = f"{trial.ms:.1f} ms a picture" if trial.tried else ""
            state = "FAIL" if trial.failures else "ok  " if trial.tried else "-   "
            typer.echo(f"{state}  {one}: {', '.join(filter(None, (time, said)))}")
    raise typer.Exit(1 if failed else 0)


@rewards.command("serve")
def serve_reward(
    name: Annotated[str, typer.Argument(help="A reward's name, package.module:name or path/file.py:name.")],
    options: Annotated[list[str] | None, typer.Argument(help="Its options, such as path=/my/weights.")] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8123,
    host: Annotated[str, typer.Option(help="Other than loopback needs --token-env.")] = "127.0.0.1",
    timeout: Annotated[float, typer.Option(help="Seconds that a call of the scorer may take.")] = 300.0,
    token_env: Annotated[str | None, typer.Option(help="The environment variable with the token to ask for.")] = None,
) -> None:
    """Serve one reward to training runs: `rewards: [{name: NAME, url: "http://127.0.0.1:PORT"}]`."""
    import os

    with users_mistake():
        if token_env is not None and token_env not in os.environ:
            raise ValueError(f"--token-env {token_env}: it is not set; export {token_env}=...")
        from flowrl.config_file import override
        from flowrl.serve import serve

        token = os.environ[token_env] if token_env else None
        serve(name, host, port, token, options=override({}, options or []), timeout=timeout)
