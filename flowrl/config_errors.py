"""What pydantic found wrong with a config -> one line a key: `key = value: what is wrong; a fix`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from flowrl.config_file import shown

Path = tuple[str | int, ...]

WANTED = {
    "dataclass_type": "a block of keys",
    "dict_type": "a block of names and values",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "text that is not empty",
}
NUMBERS = {"int_type", "float_type"}


def lines(error: ValidationError, raw: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """The problems of raw, in pydantic's order; `known` are the dotted names of all keys there are."""
    return [_line(path, value, faults, known) for path, value, faults in _by_key(error, raw)]


def _by_key(error: ValidationError, raw: Mapping[str, Any]) -> Iterator[tuple[Path, Any, list[Any]]]:
    """(path, value, errors) of each key: the alternatives of a union have an error each."""
    found: dict[tuple[Path, bool], tuple[Any, list[Any]]] = {}
    for fault in error.errors(include_url=False):
        path, value = _placed(raw, fault["loc"])
        path = fault["loc"] if fault["type"] == "missing" else path
        found.setdefault((path, fault["type"] == "value_error"), (value, []))[1].append(fault)
    for (path, _), (value, faults) in found.items():
        yield path, value, faults


def _placed(raw: Any, loc: Path) -> tuple[Path, Any]:
    """The part of loc that leads through raw, and what is there; pydantic goes on with names of its own."""
    value: Any = raw
    for depth, step in enumerate(loc):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return loc[:depth], value
    return loc, value


def _line(path: Path, value: Any, faults: list[Any], known: Sequence[str]) -> str:
    key, (fault, *_) = dotted(path), faults
    if fault["type"] == "missing":
        return f"{key} is missing; add it"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{key} = {shown(value)}: unknown key; {_meant(path, known)}"
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"])
        return message if message.startswith(key) else f"{key} = {shown(value)}: {message}"
    wanted = dict.fromkeys(_wanted(fault) for fault in faults)
    return (
        f"{key} = {shown(value)}: it must be {' or '.join(wanted)}{_hint(value, {fault['type'] for fault in faults})}"
    )


def dotted(path: Path) -> str:
    """The key as it is given to an override; a name with characters that hide or look alike is escaped."""
    return ".".join(
        step if isinstance(step, str) and re.fullmatch(r"[A-Za-z0-9_.]+", step) else ascii(step)[:80] for step in path
    )


def _wanted(fault: Any) -> str:
    wanted = WANTED.get(fault["type"]) or fault["msg"].removeprefix("Input should be ")
    return wanted.format(**fault.get("ctx", {}))


def _hint(value: Any, types: set[str]) -> str:
    if value is None:
        return "; give a value or remove the line"
    if isinstance(value, bool):
        return "; unquoted yes, no, on and off are read as booleans"
    if isinstance(value, str) and types <= NUMBERS:
        return "; write a plain number without quotes, such as 8 or 1e-4"
    if isinstance(value, int | float) and "string_type" in types:
        return "; put it in quotes"
    return ""


def _meant(path: Path, known: Sequence[str]) -> str:
    """The key that an unknown one may stand for: the same name in another block, else the nearest."""
    *way, key = (str(step) for step in path if isinstance(step, str))
    block = ".".join(way)
    ends = {name: name.rpartition(".")[2] for name in known}
    here = [end for name, end in ends.items() if name.rpartition(".")[0] == block]
    same = [name for name, end in ends.items() if end == key]
    near = difflib.get_close_matches(key, here, 1) or difflib.get_close_matches(key, ends.values(), 1)
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    if near:
        names = [name for name, end in ends.items() if end == near[0]]
        return f"did you mean {f'{block}.{near[0]}'.lstrip('.') if near[0] in here else names[0]}?"
    return f"the keys of {block or 'a config'} are {', '.join(here)}"
