"""The text of a config: a YAML file -> plain data, and plain data -> text that reads back equal.

YAML 1.1 with fewer surprises: 1e-4 is a number, 1:30 and 007 are text; a key stands once in its block; tags, anchors
and aliases are refused, so nothing in a file runs or expands.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PACKAGED = Path(__file__).with_name("configs")
MAX_PROBLEMS = 50  # of one file that are listed

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlevel = 3

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {  # tag: (pattern, first characters); the first that fits decides, everything else is text
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"(?i:yes|no|true|false|on|off)", list("yYnNtTfFoO")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]{0,4000})", list("-+0123456789")),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class ConfigError(ValueError):
    """A config that cannot be used; the message has one line for each problem."""


def shown(value: Any) -> str:
    """A value as it may be printed: short, never expanded, its control characters escaped."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _short.repr(value)


def refuse(source: str, problems: Iterable[str]) -> None:
    """ConfigError if there are any problems."""
    lines = list(dict.fromkeys(problems))
    if not lines:
        return
    if len(lines) == 1:
        raise ConfigError(f"{source}: {lines[0]}")
    more = [f"and {len(lines) - MAX_PROBLEMS} more"] if len(lines) > MAX_PROBLEMS else []
    raise ConfigError("\n  ".join([f"{source} has {len(lines)} problems:", *lines[:MAX_PROBLEMS], *more]))


class _Loader(yaml.SafeLoader):
    """Notes what it refuses in `problems` as (line, text), so that one reading finds all of it."""

    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[tuple[int, str]] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if event.anchor is not None:
            self.problems.append((line, "anchors (&) and aliases (*) are not read; write the value out"))
        elif event.tag is not None:
            tag = event.tag.replace(_PREFIX, "!!")
            self.problems.append((line, f"the tag {shown(tag)} is not read; write a plain value"))
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag != f"{_PREFIX}str":
                kind = key.tag.removeprefix(_PREFIX)
                self.problems.append((line, f"the key {shown(key.value)} is read as {kind}; put it in quotes"))
            elif key.value in first:
                where = f"stands in line {first[key.value]} and in line {line}"
                self.problems.append((line, f"the key {shown(key.value)} {where} of one block; keep one"))
            else:
                first[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict = {}  # those of the loader, so that it quotes what would not be read as text


for _tag, (_pattern, _first) in _PLAIN.items():
    for _end in (_Loader, _Dumper):
        _end.add_implicit_resolver(f"{_PREFIX}{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a config file, looked up from the current folder, then among the packaged ones (shapes/demo).

    ConfigError: no such file, not UTF-8, not YAML as above, not a mapping, empty.
    """
    file = _find(path)
    source = shown(str(file))
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; give a config file, such as shapes/demo") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    raw = _parse(text, source)
    if raw is None:
        raise ConfigError(f"empty config: {source} has no keys; start from a copy of {PACKAGED / 'shapes/demo.yaml'}")
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: the top level is {shown(raw)}; write keys, such as steps: 60")
    return raw


def override(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of raw in which each `dotted.key=value` is set, the value read as YAML; blocks on the way are made.

    ConfigError: no "=", an empty name, a way that leads through something else than a block.
    """
    result = copy.deepcopy(dict(raw))
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        *way, last = dotted.split(".")
        if not equals or not all((*way, last)):
            raise ConfigError(f"override {shown(assignment)}: write key=value, such as optimiser.lr=1e-4")
        value, block = _parse(text, f"override {shown(assignment)}"), result
        for name in way:
            if block.get(name) is None:
                block[name] = {}
            block = block[name]
            if not isinstance(block, dict):
                whole = f"give all of it: {name}=..."
                raise ConfigError(f"override {shown(assignment)}: {name} = {shown(block)} is no block of keys; {whole}")
        block[last] = value
    return result


def write(raw: Mapping[str, Any]) -> str:
    """YAML text that `read` gives back equal."""
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, width=120)


def _parse(text: str, source: str) -> Any:
    refuse(source, (f"line {line}: a tab before the text; indent with spaces" for line in _tabs(text)))
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{source}: {where}not YAML: {error.problem}; correct this line or the one above") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = shown(str(error).splitlines()[0])
        raise ConfigError(f"{source}: not YAML: {reason}; write plain keys and values") from error
    refuse(source, (f"line {line}: {problem}" for line, problem in sorted(loader.problems)))
    return None if node is None else loader.construct_document(node)


def _tabs(text: str) -> Iterator[int]:
    """The numbers of the lines that a tab indents."""
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r" *\t", line):
            yield number


def _find(path: str | Path) -> Path:
    given = Path(path)
    plain = Path(*given.parts[1:]) if given.parts[:1] == ("configs",) else given
    named = plain if plain.suffix in (".yaml", ".yml") else plain.with_name(f"{plain.name}.yaml")
    tried = [given]
    if not given.is_absolute() and ".." not in given.parts:
        tried.append(PACKAGED / named)
    for file in tried:
        if file.exists():
            return file
    known = [str(file.relative_to(PACKAGED).with_suffix("")) for file in sorted(PACKAGED.rglob("*.yaml"))]
    beside = [str(given.with_name(file.name)) for file in given.absolute().parent.glob("*.y*ml")]
    near = difflib.get_close_matches(str(given), beside, 2) + difflib.get_close_matches(
        str(plain.with_suffix("")), known, 2
    )
    fix = f"did you mean {' or '.join(map(shown, near))}?" if near else f"the packaged ones are {', '.join(known)}"
    raise ConfigError(f"there is no config {shown(str(given.absolute()))}; {fix}")
