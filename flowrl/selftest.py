"""What must hold before any number of a run is worth reading, checked on a small copy of the run itself.

The model, the method, the sampler and the precision are the run's; prompts, groups and the reward are cheap ones.
Each check is a function that is named by what it claims.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl import checkpoint, draws, stock
from flowrl.algorithms._points import ReverseProcess
from flowrl.bench.step import staged_step
from flowrl.clock import Clock
from flowrl.config import Config, resolve
from flowrl.export import export
from flowrl.forwards import forwards
from flowrl.plan import reasons
from flowrl.session import Session, ask, first_noise, start
from flowrl.tell import Sums
from flowrl.train import rolled_out, train_step, update

RATIO = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # |ratio - 1| in batches of another shape than the rollout's
GRADIENT = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}  # relative, between batches of different shapes
LATENT = {"fp32": 1e-4, "bf16": 0.1, "fp16": 2e-2}  # of unit scale; stock pipelines round them at each step


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    measured: str
    wanted: str


def run(config: Config) -> list[Check]:
    """All checks that apply to a run; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        s = start(small(config, folder))
        checks = [noise_depends_on_its_key_alone(s), eta_0_is_the_stock_pipeline(s)]
        if isinstance(config.algorithm, ReverseProcess):
            checks += ratio_is_1_before_the_first_update(s)
        checks.append(resuming_changes_nothing(s, Path(folder, "checkpoints")))
        checks += [no_forward_is_run_twice(s, s.config.steps), gradient_does_not_depend_on_the_split(s)]
        return checks + exported_weights_are_ours(s, Path(folder, "export"))


def table(checks: Sequence[Check]) -> str:
    """One line a check, and the count of those that failed."""
    wide = [max(len(value) for value in column) for column in zip(*((c.name, c.measured) for c in checks), strict=True)]
    lines = [
        f"{'ok  ' if c.passed else 'FAIL'}  {c.name:{wide[0]}}  {c.measured:{wide[1]}}  wanted {c.wanted}"
        for c in checks
    ]
    failed = sum(not c.passed for c in checks)
    lines.append(f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks hold")
    return "\n".join(lines)


def small(config: Config, folder: str) -> Config:
    """The run with 4 steps of few prompts in small groups, as few as work, and a reward that needs no model."""
    raw, updates = config.dump(), config.optimiser.updates
    raw |= {"run": f"{folder}/run", "steps": 4, "rewards": [{"name": "jpeg_incompressible"}], "track": ["jsonl"]}
    raw = {key: value for key, value in raw.items() if key not in ("evaluate", "save", "watch")}
    own, least = config.data.group_size, 2 * updates * -(-2 // updates)
    sizes = (own,) if config.data.pairs else (least, own)
    shares = ({"group_size": size, "prompts_per_step": n} for size, n in product(sizes, (2, 2 * updates)))
    runs = (resolve({**raw, "data": {**raw["data"], **share}}) for share in shares)
    return next(run for run in runs if not any(reasons(run)))


def noise_depends_on_its_key_alone(s: Session) -> Check:
    """Members of a group differ unless they share all of it, and two processes draw what one draws."""
    _, roots = ask(s, 0)
    noise = first_noise(s, roots, 0)
    again = []
    for rank in range(2):
        process: Any = SimpleNamespace(process_index=rank, num_processes=2, device=s.accelerator.device)
        again.append(first_noise(s, ask(replace(s, accelerator=process), 0)[1], 0))
    equal = sum(int((torch.pdist(noise[roots.group == g].flatten(1)) == 0).sum()) for g in roots.group.unique())
    c = s.config
    size = (2 if c.algorithm.paired else c.data.group_size) if c.data.shared_noise == 1 else 1
    wanted = len(noise) * (size - 1) // 2  # pairs of members that have all of it in common
    changed = int((torch.cat(again) != noise).flatten(1).any(1).sum())
    measured = f"{changed} of {len(noise)} differ on 2 processes, {equal} pairs of a group are equal"
    return Check("noise depends on its key alone", (changed, equal) == (0, wanted), measured, f"0 and {wanted}")


def eta_0_is_the_stock_pipeline(s: Session) -> Check:
    return _near("eta = 0 is the stock pipeline", s, stock.ours(s), stock.theirs(s, s.adapter.pipeline))


def ratio_is_1_before_the_first_update(s: Session) -> list[Check]:
    """Exactly, where a batch of the update is one of the rollout; nearly in other batches."""
    size, few = s.config.data.prompts_per_step * s.config.data.group_size, 3
    same = replace(s, plan=replace(s.plan, rows_per_forward=size))
    rollout, cond = rolled_out(same, 0, Clock(), Sums())
    worst = {}
    for rows, updates in ((size, 1), (few, s.config.optimiser.updates)):
        off = []
        for point in s.config.algorithm.points(rollout, cond[rollout.roots.prompt], updates, (s.config.seed, 0)):
            for first in range(0, len(point), rows):
                part = s.policy.bound(point.rows(first, first + rows), rollout.version)
                with torch.no_grad():
                    off.append((s.config.algorithm.log_ratio(part).exp() - 1).abs().max())
        worst[rows] = float(torch.stack(off).max())
    wanted = RATIO[s.config.compute.precision]
    return [
        Check("ratio is 1 in batches of the rollout", worst[size] == 0, f"off by {worst[size]:.2g}", "0"),
        Check(f"ratio is 1 in batches of {few}", worst[few] <= wanted, f"off by {worst[few]:.2g}", f"<= {wanted:g}"),
    ]


def resuming_changes_nothing(s: Session, folder: Path) -> Check:
    """Trains the session for its steps; one that starts from the checkpoint half way arrives at the same bits."""
    half, end = s.config.steps // 2, s.config.steps
    for step in range(half):
        train_step(s, step)
    saved = checkpoint.save(folder, half, s.policy, s.optimiser, {}, keep=1)
    through = [train_step(s, step) for step in range(half, end)]
    resumed = start(s.config)
    checkpoint.load(saved, resumed.policy, resumed.optimiser)
    again = [train_step(resumed, step) for step in range(half, end)]
    rows = [  # as text, since NaN is not equal to NaN
        (json.dumps(one[name]), json.dumps(other[name]))
        for one, other in zip(through, again, strict=True)
        for name in one
        if not name.startswith("time/")
    ]
    mine, theirs = s.policy.state()[0], resumed.policy.state()[0]
    tensors = [torch.equal(value, theirs[slot][name]) for slot in mine for name, value in mine[slot].items()]
    metrics, weights = sum(a != b for a, b in rows), tensors.count(False)
    measured = f"{metrics} of {len(rows)} metrics and {weights} of {len(tensors)} tensors differ"
    return Check("kill and resume is no interruption", not metrics and not weights, measured, "0 and 0")


def no_forward_is_run_twice(s: Session, step: int) -> Check:
    """The network's rows (calls) in one step are those the plan promised."""
    seen, planned = staged_step(s, step), forwards(s.config, step)
    got = [(seen[stage].rows, seen[stage].forwards) for stage in ("act", "learn")]
    want = [(count.rows, count.calls) for count in (planned.rollout, planned.current + planned.others)]
    said = (f"rollout {a} ({b}), updates {c} ({d})" for (a, b), (c, d) in (got, want))
    return Check("no forward is run twice", got == want, *said)


def gradient_does_not_depend_on_the_split(s: Session) -> Check:
    """One update on a whole rollout, row by row, in threes and at once; the weights are put back."""
    rollout, cond = rolled_out(s, s.config.steps, Clock(), Sums())
    key = s.config.seed, s.config.steps
    point = next(s.config.algorithm.points(rollout, cond[rollout.roots.prompt], 1, key))
    policy, optimiser = copy.deepcopy(s.policy.state()), copy.deepcopy(s.optimiser.state_dict())
    seen = []
    for rows in (1, 3, len(point)):
        sums = Sums()
        update(replace(s, plan=replace(s.plan, rows_per_forward=rows)), point, rollout.version, sums)
        seen.append(sums.reduced(s.total))
        s.policy.load_state(*policy)
        s.optimiser.load_state_dict(optimiser)
    norms, losses = ([row[name] for row in seen] for name in ("train/grad_norm", "train/loss"))
    norm = (max(norms) - min(norms)) / max(norms) if max(norms) else float("inf")
    loss = (max(losses) - min(losses)) / max(1.0, *map(abs, losses))  # advantages are of unit scale and cancel
    wanted = GRADIENT[s.config.compute.precision]
    measured = f"norm {norms[-1]:.3g} off by {norm:.1g}, loss by {loss:.1g}"
    return Check("gradient is the same for any micro-batch", max(norm, loss) <= wanted, measured, f"<= {wanted:g}")


def exported_weights_are_ours(s: Session, folder: Path) -> list[Check]:
    """Weights away from their start, exported and loaded by a fresh stock pipeline, make the pictures we make."""
    pipeline = stock.fresh(s)
    base = stock.theirs(s, pipeline)
    with torch.no_grad():
        for i, p in enumerate(s.policy.parameters):
            p.add_(draws.normal(p.shape, [(i,)])[0].to(p) / (10 * p[0].numel()) ** 0.5)
    stock.put_in(s, pipeline, export(s, folder, "current"))
    checks = [_near("exported weights are ours", s, stock.ours(s), stock.theirs(s, pipeline), base)]
    if s.config.lora:
        pipeline.set_adapters(pipeline.get_active_adapters(), 0.0)
        checks.append(_near("exported LoRA at scale 0 is the base", s, base, stock.theirs(s, pipeline)))
    return checks


def _near(name: str, s: Session, x: Tensor, y: Tensor, base: Tensor | None = None) -> Check:
    """Latents x and y are equal up to the precision, relative to their size above 1; and both are not `base`."""
    scale = max(1.0, float(x.abs().max()) / 4)
    off, wanted = float((x - y).abs().max()) / scale, LATENT[s.config.compute.precision]
    moved = base is None or float((x - base).abs().max()) / scale > 2 * wanted
    measured = f"off by {off:.2g}" if moved else "the weights changed nothing"
    return Check(name, moved and off <= wanted, measured, f"<= {wanted:g}")
