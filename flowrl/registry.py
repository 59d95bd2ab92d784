"""Names in a config -> objects, imported only when they are asked for.

A name is registered by a decorator, written down as a lazy target, or declared by an installed package as an entry
point. A name with a colon is itself a target: "package.module:attribute" or "path/file.py:attribute".
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, PlainValidator, TypeAdapter

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)  # dataclasses inside inherit it


class Named(Protocol):
    __module__: str
    __qualname__: str


T = TypeVar("T", bound=Named)


class Registry:
    """The objects of one kind by name; a name has one meaning, whoever gives it.

    `lazy` maps names to "package.module:attribute"; `entry_points` is the group in which other packages add theirs.
    """

    def __init__(self, kind: str, lazy: Mapping[str, str] | None = None, *, entry_points: str | None = None) -> None:
        self.kind = kind
        self._group = entry_points
        self._targets = dict(lazy or {})
        self._objects: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that gives `name` to a class or a function; the lazy target of the same object is no collision."""

        def add(item: T) -> T:
            target = f"{item.__module__}:{item.__qualname__}"
            taken = self._known().get(name, target)
            if taken != target:
                raise ValueError(f"{self.kind} {name!r} is {taken} already; register {target} under another name")
            self._targets[name] = target
            self._objects[name] = item
            return item

        return add

    def names(self) -> tuple[str, ...]:
        """Every name, sorted; nothing is imported."""
        return tuple(sorted(self._known()))

    def __getitem__(self, name: str) -> Any:
        """The object of a name, or of a target.

        ValueError: unknown name (with the nearest one), missing file or attribute, an import that fails.
        """
        if name not in self._objects:
            known = self._known()
            if name not in known and ":" not in name:
                raise ValueError(self._unknown(name, tuple(known)))
            self._objects[name] = self._load(name, known.get(name, name))
        return self._objects[name]

    def extras(self, name: str) -> str:
        """The extras of a distribution that an entry point asks for."""
        return ", ".join(extra for point in self._points() if point.name == name for extra in point.extras)

    def _points(self) -> Iterable[EntryPoint]:
        return entry_points(group=self._group) if self._group else ()

    def _known(self) -> dict[str, str]:
        known = dict(self._targets)
        for point in self._points():
            target = f"{point.module}:{point.attr}"
            if known.setdefault(point.name, target) != target:
                both = f"{known[point.name]} and {target}"
                raise ValueError(f"{self.kind} {point.name!r} is both {both}; uninstall one of the two packages")
        return known

    def _unknown(self, name: str, known: tuple[str, ...]) -> str:
        odd = ", ".join(f"U+{ord(c):04X} {unicodedata.name(c, '(no name)')}" for c in name if not c.isascii())
        near = difflib.get_close_matches(name, known, n=1)
        return (
            f"unknown {self.kind} {name!a}"
            + (f" (it holds {odd})" if odd else "")
            + (f"; did you mean {near[0]!r}?" if near else ";")
            + f" available: {', '.join(sorted(known)) or 'none'}, or give package.module:name or path/file.py:name"
        )

    def _load(self, name: str, target: str) -> Any:
        place, _, attribute = target.rpartition(":")
        try:
            module = _file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
        except Exception as error:  # of anybody's module
            what = error if isinstance(error, ImportError | OSError | SyntaxError) else repr(error)
            fix = "correct the name or install what is missing"
            raise ValueError(f"{self.kind} {name!r} cannot be imported: {what}; {fix}") from error
        if attribute not in vars(module):
            found = ", ".join(n for n, item in vars(module).items() if callable(item) and not n.startswith("_"))
            raise ValueError(f"{self.kind} {name!r}: {place} has no {attribute!r}; it has: {found or 'no function'}")
        return vars(module)[attribute]


@cache
def _file(path: Path) -> ModuleType:
    """The module of a file, run once; its name is its path, so that it cannot shadow an installed module."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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

    @property
    def keys(self) -> list[str]:
        return [one.name for one in fields(self.kind)]

    def read(self, value: Any) -> Any:
        """The block that plain data describes."""
        return _adapter(self).validate_json(json.dumps(value), strict=True)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(self.kind)


@cache
def _adapter(block: Block) -> TypeAdapter:
    return TypeAdapter(Annotated[Any, block], config=STRICT)


@dataclass(frozen=True)
class OneOf:
    """Marks a type that is the dataclass of the name in its own field `name`; a block without one means `default`."""

    registry: Registry
    default: str

    def read(self, value: Any) -> Any:
        given = value if isinstance(value, dict) else {}
        name = str(given.get("name", self.default))
        keys = {one: Block(self.registry, one).keys for one in (*self.registry.names(), name)}
        for key in given:
            if key not in keys[name] and (others := [one for one in keys if key in keys[one]]):
                fix = f"those of {name} are {', '.join(keys[name])}"
                raise ValueError(f"{key} is a key of {' and '.join(others)}; {fix}")
        return Block(self.registry, name).read(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[Any, PlainValidator(self.read)])


CLASSES = {
    "flow_grpo": "FlowGRPO", "nft": "NFT", "awm": "AWM", "ram": "RAM", "dpo": "DPO", "dgpo": "DGPO", "crd": "CRD",
    "paired": "Paired",
}  # fmt: skip
ALGORITHMS = Registry("algorithm", {name: f"flowrl.algorithms.{name}:{kind}" for name, kind in CLASSES.items()})
ADAPTERS = {"sd3": "SD3", "sana": "Sana", "sd15": "SD15", "gaussian": "Gaussian"}
MODELS = Registry("model", {name: f"flowrl.models.{name}:{kind}" for name, kind in ADAPTERS.items()})
REGULARISERS = Registry("regulariser", {
    name: f"flowrl.regularise:{name}" for name in ("velocity_kl", "norm_hinge", "path_kl", "step_kl")
})  # fmt: skip
REWARDS = Registry("reward", entry_points="flowrl.rewards")
SURROGATES = Registry("surrogate", {
    "ppo": "flowrl.algorithms._surrogates:PPO", "p3o": "flowrl.algorithms._surveyed:P3O",
    "spo": "flowrl.algorithms._surrogates:SPO", "m2po": "flowrl.algorithms._surveyed:M2PO",
    "pspo": "flowrl.algorithms._surrogates:PSPO", "lpo": "flowrl.algorithms._surveyed:LPO",
})  # fmt: skip
