"""One run as data: the keys of its file -> Config, by the types of the dataclasses that use them.

Validation is strict: an unknown key, a wrong type and a value out of range are errors, all of a file told at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    with_config,
)

from flowrl import config_errors
from flowrl.config_blocks import by_name, known_in, lifted, names, nested
from flowrl.config_file import override, read, refuse, shown, write
from flowrl.registry import ALGORITHMS, MODELS, REGULARISERS, REWARDS, STRICT, Block, Registry

BLOCKS = Registry("block", {
    "sampler": "flowrl.sample:Sampler", "credit": "flowrl.credit:Credit", "reward": "flowrl.scorers:RewardSpec",
    "policy": "flowrl.policy:Slots", "lora": "flowrl.policy:LoRA", "watch": "flowrl.watchdog:Watch",
})  # fmt: skip
ALIASES = {"model_name": "model.name", "lora": "model.lora", "algorithm_name": "algorithm.name"}  # field: its key


def _known_reward(spec: Any) -> Any:
    if not (spec.url or spec.python):
        REWARDS[spec.name]
    return spec


def _some(rewards: tuple) -> tuple:
    if not rewards:
        raise ValueError("it must have at least one reward, such as {name: shapes}")
    return rewards


def _folder(run: str) -> str:
    if not run.isprintable() or not Path(run).name or ".." in Path(run).parts:
        raise ValueError("it must name a folder; write letters and digits, such as demo, or a path without ..")
    return run


Name = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Correlation = Annotated[float, BeforeValidator(lambda c: float(c) if isinstance(c, bool) else c), Field(ge=0, le=1)]
Reward = Annotated[Any, Block(BLOCKS, "reward"), AfterValidator(_known_reward)]
Rewards = Annotated[tuple[Reward, ...], AfterValidator(_some)]


@dataclass(frozen=True, kw_only=True)
class Data:
    prompts: Name | None = None
    pairs: Name | None = None  # instead of prompts: a file of prompts with a chosen and a rejected picture each
    prompts_per_step: PositiveInt
    group_size: PositiveInt = 0  # not given; it is 2 with pairs
    shared_noise: Correlation = 0.0  # of a sample's first noise with one that its group shares; false = 0, true = 1
    skip_bad: bool = False
    dedupe: bool = False

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.pairs is None):
            raise ValueError("data.prompts or data.pairs, exactly one of the two is wanted; add or remove one")
        if self.prompts and not self.group_size:
            raise ValueError("data.group_size is missing; add it, such as 16")
        if self.pairs and (self.group_size not in (0, 2) or self.shared_noise or self.dedupe):
            fix = "remove data.group_size, data.shared_noise and data.dedupe"
            raise ValueError(f"data.pairs = {shown(self.pairs)}: its pairs are the groups, as they are; {fix}")
        object.__setattr__(self, "group_size", self.group_size or 2)


@dataclass(frozen=True)
class Optimiser:
    """AdamW; `updates` optimiser steps learn from each rollout, the first `warmup` of a run at a rising rate."""

    lr: Annotated[float, Field(gt=0, le=1)]
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    updates: PositiveInt = 1
    warmup: NonNegativeInt = 0


@dataclass(frozen=True)
class Evaluate:
    """What every `every`-th step and `flowrl eval` measure; null takes the run's own."""

    prompts: Name | None = None  # of a run's steps
    test: Name | None = None  # of `flowrl eval`; null takes `prompts`
    every: NonNegativeInt = 0  # steps, 0 = only by `flowrl eval`
    seeds: PositiveInt = 4
    rewards: Rewards | None = None
    steps: PositiveInt | None = None
    pictures: NonNegativeInt = 8  # prompts in the picture grids


@dataclass(frozen=True)
class Save:
    every: NonNegativeInt = 20  # steps, 0 = only at the end
    keep: PositiveInt = 2
    best: Name | None = None  # the reward of `evaluate` whose best checkpoint is kept in best/, too


@dataclass(frozen=True)
class Compute:
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    rows_per_forward: PositiveInt | Literal["auto"] = "auto"
    prompts_at_once: PositiveInt | None = None  # sampled together, while those before are judged; null = all of a step
    checkpointing: bool = False
    threads: PositiveInt | None = None


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. `model` and `algorithm` are of the classes that MODELS and ALGORITHMS have under their names."""

    run: Annotated[str, AfterValidator(_folder)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: PositiveInt
    model_name: Annotated[str, known_in(MODELS), Field(alias=ALIASES["model_name"])]
    model: Annotated[Any, by_name(MODELS, "model_name")]
    lora: Annotated[Annotated[Any, Block(BLOCKS, "lora")] | None, Field(alias=ALIASES["lora"])] = None
    data: Data
    sampler: Annotated[Any, Block(BLOCKS, "sampler")] = field(default_factory=Block(BLOCKS, "sampler"))
    rewards: Rewards
    credit: Annotated[Any, Block(BLOCKS, "credit")] = field(default_factory=Block(BLOCKS, "credit"))
    algorithm_name: Annotated[str, known_in(ALGORITHMS), Field(alias=ALIASES["algorithm_name"])]
    algorithm: Annotated[Any, by_name(ALGORITHMS, "algorithm_name")]
    regularise: Annotated[
        dict[Annotated[str, known_in(REGULARISERS)], NonNegativeFloat],
        AfterValidator(lambda charges: {name: c for name, c in charges.items() if c}),
    ] = field(default_factory=dict)
    policy: Annotated[Any, Block(BLOCKS, "policy")] = field(default_factory=Block(BLOCKS, "policy"))
    optimiser: Optimiser
    watch: Annotated[Any, Block(BLOCKS, "watch")] | None = field(default_factory=Block(BLOCKS, "watch"))
    evaluate: Evaluate = Evaluate()
    save: Save = Save()
    compute: Compute = Compute()
    track: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)

    @property
    def folder(self) -> Path:
        """Where the run is kept: runs/<run>, or `run` itself where it has a slash."""
        return Path(self.run) if "/" in self.run else Path("runs", self.run)

    def dump(self) -> dict[str, Any]:
        """Every key with its value, as plain data; `resolve` makes an equal Config of it."""
        return nested(_schema().dump_python(self, mode="json", by_alias=True), ALIASES.values())

    def to_yaml(self) -> str:
        return write(self.dump())


@cache
def _schema() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The run of a config file (see `config_file.read`) with `key=value` overrides.

    ConfigError: anything in it that cannot be used, all at once.
    """
    return resolve(override(read(path), overrides), shown(str(path)))


def resolve(raw: Mapping[str, Any], source: str = "the config") -> Config:
    """The run that plain data describes. ConfigError: as for `load`; `source` names the data in it."""
    refuse(source, (f"{ascii(key)}: unknown key; nest it as a block with keys" for key in raw if "." in key))
    flat = lifted(raw, ALIASES.values())
    try:
        return _schema().validate_json(json.dumps(flat), strict=True)
    except ValidationError as error:
        refuse(source, config_errors.lines(error, flat, list(dict.fromkeys(_known(flat)))))
        raise


def _known(flat: Mapping[str, Any]) -> Iterator[str]:
    """The dotted names of all keys."""
    yield from names(Config, ALIASES)
    for block, registry in (("model", MODELS), ("algorithm", ALGORITHMS)):
        with suppress(ValueError):  # a wrong name has its own line
            yield from names(Block(registry, str(flat.get(f"{block}.name"))), {}, f"{block}.")
