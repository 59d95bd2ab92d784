"""What a run holds while it lives, built in the order that lets the cheapest mistake fail first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType
from torch import Tensor

from flowrl import data, draws
from flowrl.bank import RewardBank
from flowrl.config import Config
from flowrl.models.base import Adapter
from flowrl.pictures import Picture
from flowrl.plan import Plan, plan
from flowrl.policy import Policy
from flowrl.types import Cond, Prompt, Roots

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Session:
    config: Config
    accelerator: Accelerator
    prompts: list[Prompt]
    plan: Plan
    rewards: RewardBank
    held: list[Prompt]  # what evaluations in the run ask
    judges: RewardBank  # and who judges them
    adapter: Adapter
    policy: Policy
    optimiser: torch.optim.Optimizer
    pairs: Mapping[int, tuple[Picture, Picture]] = field(default_factory=dict)  # given, by prompt id
    skipped_in_a_row: int = 0

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return cast(Tensor, self.accelerator.reduce(value.to(self.accelerator.device))).to(value.device)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.rewards.columns

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """[B, *L] under the weights in place, `rows_per_forward` rows at a time."""
        rows = self.plan.rows_per_forward
        parts = [slice(i, i + rows) for i in range(0, len(x), rows)]
        return torch.cat([self.policy.velocity(x[part], t[part], cond[part]) for part in parts])


def start(config: Config, accelerator: Accelerator | None = None, tell=lambda line: None) -> Session:
    """Prompts, plan and rewards, then the weights. `tell` gets what the user should know, line by line."""
    accelerator = accelerator or make_accelerator(config)
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    rewards = RewardBank(config.rewards)
    file = data.asked(config.data)
    if not file.pairs:
        rewards.check(file.prompts)
    e = config.evaluate
    held = data.load(e.prompts).prompts if e.prompts else file.prompts
    judges = RewardBank(e.rewards) if e.rewards else rewards
    judges.check(held)
    if config.save.best and (config.save.best not in judges.columns or not e.every):
        raise ValueError(
            f"save.best = {config.save.best}: it must be one of {', '.join(judges.columns)}, and evaluate.every above 0"
        )
    planned = plan(config, accelerator.num_processes, len(file.prompts))
    for line in (*file.notices, data.wrapping(len(file.prompts), config.data.prompts_per_step), *planned.lines()):
        if line:
            tell(line)
    half = AUTOCAST[config.compute.precision] if config.lora else None  # a frozen base may rest in half precision
    adapter = config.model.load(accelerator.device, half or torch.float32)
    if config.compute.checkpointing:
        adapter.network.enable_gradient_checkpointing(adapter.checkpoint)
    policy = Policy(adapter, config.lora, config.policy, config.seed, AUTOCAST[config.compute.precision])
    o = config.optimiser
    optimiser = torch.optim.AdamW(policy.parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
                                  fused=True)  # fmt: skip
    adapter.network, optimiser = accelerator.prepare(adapter.network, optimiser)
    return Session(
        config, accelerator, file.prompts, planned, rewards, held, judges, adapter, policy, optimiser, file.pairs
    )


def make_accelerator(config: Config) -> Accelerator:
    """The processes of a run; `train.update` weighs gradients. ValueError: a launch or a tracker that cannot work."""
    trackers: list[Any] = [name for name in config.track if name != "jsonl"]
    for name in trackers:
        if name not in get_available_trackers():
            raise ValueError(f"track = {name}: it is not installed; pip install 'flowrl-posttrain[trackers]'")
    accelerator = Accelerator(
        mixed_precision="fp16" if config.compute.precision == "fp16" else "no", gradient_accumulation_steps=1,
        log_with=trackers or None, project_dir=str(config.folder), cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise ValueError(f"the launcher asks for {kind.value}: several processes are trained by DDP (--multi_gpu) only")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise ValueError(
            f"the launcher started {launched} processes, but each of them would train alone (num_processes = "
            f"{accelerator.num_processes}); start them by accelerate launch --multi_gpu or torchrun"
        )
    return accelerator


def ask(s: Session, step: int) -> tuple[list[Prompt], Roots]:
    """This rank's prompts of a step, and who their samples are.

    A prompt that a step holds twice makes two groups whose samples have different indices, so different noise.
    """
    d, acc = s.config.data, s.accelerator
    everyone = data.take(s.prompts, d.prompts_per_step, s.config.seed, step)
    times = [sum(q.id == p.id for q in everyone[:i]) for i, p in enumerate(everyone)]
    share = d.prompts_per_step // acc.num_processes
    first = acc.process_index * share
    row = torch.arange(share).repeat_interleave(d.group_size)
    member = torch.arange(d.group_size).repeat(share)
    mine = everyone[first : first + share]
    before = torch.tensor(times[first : first + share])
    ids = torch.tensor([p.id for p in mine])
    roots = Roots(row, ids[row], before[row] * d.group_size + member, first + row)
    return mine, Roots(*(value.to(acc.device) for value in vars(roots).values()))


def first_noise(s: Session, roots: Roots, step: int) -> Tensor:
    """[N, *L] c common + sqrt(1 - c^2) own, c = `data.shared_noise`; what is common is a group's, or a pair's."""
    c, who, key = s.config.data.shared_noise, roots.of(torch.arange(len(roots))), (s.config.seed, step)
    own = s.adapter.noise([(*key, draws.ROOT, prompt, index) for prompt, index in who])
    if c == 0:
        return own
    size = 2 if s.config.algorithm.paired else s.config.data.group_size
    common = s.adapter.noise([(*key, draws.COMMON, prompt, index // size) for prompt, index in who])
    return c * common + (1 - c * c) ** 0.5 * own
