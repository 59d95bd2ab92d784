"""The command line.

Exit codes: 0 done, 2 the user's mistake (one message, no traceback), 3 the watch ended the run, 1 ours.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli_bench import bench
from flowrl.cli_rewards import rewards
from flowrl.cli_shared import ConfigPath, Overrides, log, users_mistake

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(bench, name="bench")
app.add_typer(rewards, name="rewards")


@app.callback()
def _logging(verbose: Annotated[bool, typer.Option(help="Show where a message comes from.")] = False) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    log.setLevel(logging.DEBUG if verbose else logging.WARNING)


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Remove what an earlier run of this name left.")] = False,
) -> None:
    """Train; the folder runs/NAME holds the resolved config, metrics, checkpoints and the exported weights."""
    from flowrl.config import load

    with users_mistake():
        loaded = load(config, overrides or ())  # before the heavy imports: a mistake is told at once
        from flowrl.run import run
        from flowrl.watchdog import Tripped

        try:
            folder = run(loaded, resume, overwrite)
        except Tripped as alarm:
            typer.echo(f"flowrl: {alarm}", err=True)
            raise typer.Exit(3) from None
        except KeyboardInterrupt:
            typer.echo("flowrl: interrupted; --resume goes on from the last checkpoint", err=True)
            raise typer.Exit(130) from None
    typer.echo(folder)


@app.command()
def plan(config: ConfigPath, overrides: Overrides = None) -> None:
    """Say what a run would do, before any weight is loaded."""
    from flowrl import data
    from flowrl.config import load
    from flowrl.plan import plan as make

    with users_mistake():
        loaded = load(config, overrides or ())
        prompts = data.asked(loaded.data).prompts
        typer.echo("\n".join(make(loaded, n_prompts=len(prompts)).lines()))


@app.command("data")
def show_data(
    prompts: Annotated[str, typer.Argument(help="A prompt file, or shapes/train, shapes/validation, shapes/heldout.")],
    skip_bad: Annotated[bool, typer.Option(help="Leave bad rows out and name them.")] = False,
    pairs: Annotated[bool, typer.Option(help="Read it as pairs of pictures, as data.pairs does.")] = False,
) -> None:
    """Check a prompt file, or one of pairs with its pictures, and show its first prompts."""
    from flowrl import data
    from flowrl.pairs import read_pairs

    with users_mistake():
        file = read_pairs(prompts, skip_bad) if pairs else data.load(prompts, skip_bad)
    for notice in file.notices:
        typer.echo(notice, err=True)
    for bad in file.skipped:
        typer.echo(f"skipped {bad.place}: {bad.reason}", err=True)
    typer.echo(f"{len(file.prompts)} prompts")
    for prompt in file.prompts[:10]:
        typer.echo(f"  {prompt.id}  {prompt.text[:100]!r}")
        for picture, place in zip(file.pairs.get(prompt.id, ()), ("chosen", "rejected"), strict=False):
            typer.echo(f"     {place:8}  {picture}")


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    prompts: Annotated[str | None, typer.Option(help="A prompt file or built-in set; else evaluate.test.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Pictures a prompt; else evaluate.seeds.")] = None,
    guided: Annotated[bool, typer.Option(help="Score the base with guidance, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Base against tuned on the same prompts and noise; writes evaluation.json, pictures and report.html."""
    from flowrl import report

    with users_mistake():
        from flowrl import data
        from flowrl.evaluate import evaluate as measure
        from flowrl.run import reopen

        s = reopen(run)
        e = s.config.evaluate
        chosen = prompts or e.test
        asked = data.load(chosen).prompts if chosen else s.held
        s.judges.check(asked)
        result, base, tuned = measure(s, asked, s.judges, seeds or e.seeds, guided)
    (run / "evaluation.json").write_text(json.dumps(result, indent=1))
    report.save_pictures(run / "pictures", asked[: e.pictures], base, tuned)
    path = report.write(run)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(report.table(result))
        typer.echo(f"report: {path}")


@app.command("report")
def write_report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write report.html anew from what the run's folder holds."""
    from flowrl import report

    with users_mistake():
        typer.echo(report.write(run))


@app.command()
def selftest(
    config: Annotated[str, typer.Option(help="The recipe whose model and method are tested.")] = "shapes/flow_grpo",
    overrides: Overrides = None,
) -> None:
    """Check what must hold before any number of a run is worth reading; exit 0 only if all does."""
    from flowrl import selftest as checks
    from flowrl.config import load

    with users_mistake():
        results = checks.run(load(config, overrides or ()))
    typer.echo(checks.table(results))
    raise typer.Exit(0 if all(r.passed for r in results) else 1)


@app.command()
def lab(
    only: Annotated[str | None, typer.Option(help="One case, or all of one algorithm.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path, typer.Option(help="Where the densities are drawn.")] = Path("lab.png"),
) -> None:
    """Train every objective where its fixed point is known; exit 0 only if all reach theirs."""
    import torch

    from flowrl import lab as laboratory
    from flowrl import lab_report
    from flowrl.lab_cases import select

    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a folder; make it, or name another place", param_hint="--out")
    torch.set_num_threads(1)  # over a few hundred numbers, threads only wait for each other
    results = []
    with users_mistake():
        for case in select(only):
            results.append(laboratory.run(case))
            typer.echo(f"{case.name}: {results[-1].seconds:.0f} s", err=True)
        typer.echo(json.dumps(lab_report.data(results)) if as_json else lab_report.table(results))
        lab_report.plot(results, out)
    raise typer.Exit(0 if all(r.holds for r in results) else 1)


def main() -> None:
    app()
