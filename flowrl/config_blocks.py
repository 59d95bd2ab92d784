"""Types for a config whose classes are found by name, and imported when the first config is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, PlainValidator, TypeAdapter, ValidationInfo

from flowrl.registry import Registry

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)  # dataclasses inside inherit it


@dataclass(frozen=True)
class Block:
    """Marks a type that is the dataclass of a name; called, it is the block of a file that leaves it out."""

    registry: Registry
    name: str

    def __call__(self) -> Any:
        return self.kind()

    @property
    def kind(self) -> type:
        kind = self.registry[self.name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ValueError(f"{self.registry.kind} {self.name!r} is no dataclass; name the class of its settings")
        return kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(self.kind)


def by_name(registry: Registry, field: str) -> PlainValidator:
    """Marks a type whose class has the name that `field`, which is read before, holds."""

    def build(value: Any, info: ValidationInfo) -> Any:
        if field not in info.data:  # it is wrong, which is told
            return value
        return _adapter(Block(registry, info.data[field])).validate_json(json.dumps(value), strict=True)

    return PlainValidator(build)


@cache
def _adapter(block: Block) -> TypeAdapter:
    return TypeAdapter(Annotated[Any, block], config=STRICT)


def known_in(registry: Registry) -> AfterValidator:
    """Marks a name that the registry must have."""

    def check(name: str) -> str:
        registry[name]
        return name

    return AfterValidator(check)


def names(kind: Any, aliases: Mapping[str, str], at: str = "") -> Iterator[str]:
    """The dotted names of all keys below a type; `aliases` rename the outermost."""
    if isinstance(kind, Block):
        kind = kind.kind
    if not isinstance(kind, type):
        for part in get_args(kind):
            yield from names(part, aliases, at)
    elif is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        for one in fields(kind):
            name = f"{at}{aliases.get(one.name, one.name)}"
            yield name
            yield from names(hints[one.name], {}, f"{name}.")


def lifted(raw: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """raw with each of the keys `block.name`, which are not settings of the block's class, beside its block."""
    flat = dict(raw)
    for key in keys:
        block, _, name = key.partition(".")
        if isinstance(flat.get(block), dict) and name in flat[block]:
            flat[block] = dict(flat[block])
            flat[key] = flat[block].pop(name)
    return flat


def nested(flat: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The inverse of `lifted`; such keys come first in their block."""
    raw = {key: value for key, value in flat.items() if key not in keys}
    for key in reversed(list(keys)):
        block, _, name = key.partition(".")
        raw[block] = {name: flat[key], **raw[block]}
    return raw
