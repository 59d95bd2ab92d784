"""Types for a config whose classes are found by name, and imported when the first config is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import AfterValidator, PlainValidator, ValidationInfo

from flowrl.registry import Block, OneOf, Registry


def by_name(registry: Registry, field: str) -> PlainValidator:
    """Marks a type whose class has the name that `field`, which is read before, holds."""

    def build(value: Any, info: ValidationInfo) -> Any:
        if field not in info.data:  # it is wrong, which is told
            return value
        return Block(registry, info.data[field]).read(value)

    return PlainValidator(build)


def known_in(registry: Registry) -> AfterValidator:
    """Marks a name that the registry must have."""

    def check(name: str) -> str:
        registry[name]
        return name

    return AfterValidator(check)


def names(kind: Any, aliases: Mapping[str, str], at: str = "") -> Iterator[str]:
    """The dotted names of all keys below a type; `aliases` rename the outermost."""
    if isinstance(kind, OneOf):
        for name in kind.registry.names():
            yield from names(Block(kind.registry, name), {}, at)
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
