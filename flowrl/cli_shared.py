"""What the commands share: their common arguments, and how a user's mistake ends one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

log = logging.getLogger("flowrl.cli")

ConfigPath = Annotated[str, typer.Argument(help="A YAML file, or a packaged recipe such as shapes/demo.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides: optimiser.lr=1e-4 run=mine")]


@contextmanager
def users_mistake() -> Iterator[None]:
    """A ValueError, or a file that cannot be had, ends the command with its message and status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        log.debug("raised here", exc_info=True)
        typer.echo(f"flowrl: {error}", err=True)
        raise typer.Exit(2) from error
