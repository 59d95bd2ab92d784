"""How samples travel to a reward server and scores back: JSON, pictures as base64 PNG, both ways.

    POST /score  {"version": 1, "items": [{"id", "prompt", "image", "metadata", "group"}]}
              -> {"scores": [{"id", "score": number or {column: number}}]}      null = no verdict

`group` is an integer, given where a scorer judges whole groups. A picture among the metadata values is {"png": base64}.
This file is also read by its path, in the interpreter of a scorer that has no flowrl.

Shape letters: n items of a request, C columns of the scorer.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from flowrl.png import from_png_base64, png_base64

VERSION = 1
MOST_PIXELS = 2**30  # of one request: 1024 pictures of 1024 x 1024
Id = int | str


@dataclass(frozen=True)
class Item:
    """One sample of a request."""

    id: Id
    prompt: str
    image: Image.Image
    metadata: Mapping[str, Any]
    group: int | None = None


# requests


def encode_request(items: Iterable[Item]) -> dict[str, Any]:
    """The body of POST /score. ValueError: a metadata value that JSON cannot hold."""
    return {"version": VERSION, "items": [_encoded(item) for item in items]}


def decode_request(body: Any) -> list[Item]:
    """The items of a body. ValueError: it is not what the format says; names the item and the value."""
    match body:
        case {"version": 1, "items": [_, *_] as raw}:
            items = list(_bounded(raw))
        case _:
            raise ValueError(f'the request is {show(body)}, wanted {{"version": 1, "items": [...]}}')
    ids = [item.id for item in items]
    if len(set(ids)) < len(ids):
        raise ValueError(f"ids {[id for id in dict.fromkeys(ids) if ids.count(id) > 1]} are given more than once")
    return items


def _bounded(raw: Iterable[Any]) -> Iterator[Item]:
    """Items, decoded one after the other while they are not too large together."""
    pixels = 0
    for one in raw:
        item = _decoded(one)
        pixels += item.image.width * item.image.height
        if pixels > MOST_PIXELS:
            raise ValueError(f"the pictures have more than {MOST_PIXELS} pixels together; send fewer at once")
        yield item


def _encoded(item: Item) -> dict[str, Any]:
    metadata = {key: _value(item.id, key, value) for key, value in item.metadata.items()}
    group = {} if item.group is None else {"group": item.group}
    return {"id": item.id, "prompt": item.prompt, "image": png_base64(item.image), "metadata": metadata, **group}


def _value(id: Id, key: str, value: Any) -> Any:
    if isinstance(value, Image.Image):
        return {"png": png_base64(value)}
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"item {id}: metadata {key} = {show(value)} cannot travel as JSON: {error}") from error
    return value


def _decoded(raw: Any) -> Item:
    match raw:
        case {"id": int() | str() as id, "prompt": str(prompt), "image": str(text), "metadata": dict(metadata), **rest}:
            group = rest.pop("group", None)
            if rest or isinstance(id, bool) or type(group) not in (int, type(None)):
                raise ValueError(f"item {id!r} has {show({'group': group, **rest})}, wanted an integer `group` at most")
        case _:
            raise ValueError(f"an item is {show(raw)}, wanted texts `prompt` and `image`, an `id` and `metadata`")
    try:
        image = from_png_base64(text)
        if image.mode != "RGB":
            raise ValueError(f"its picture is of mode {image.mode}, RGB is wanted")
        return Item(id, prompt, image, {key: _picture(value) for key, value in metadata.items()}, group)
    except ValueError as error:
        raise ValueError(f"item {id!r}: {error}") from error


def _picture(value: Any) -> Any:
    match value:
        case {"png": str(text), **rest} if not rest:
            return from_png_base64(text)
    return value


# answers


def encode_scores(ids: Sequence[Id], value: Any, columns: Sequence[str]) -> dict[str, Any]:
    """The answer with what a scorer returned: arrays or lists, [n] or [n, C].

    ValueError: there is not one row for each id, or a row is not of C finite numbers or NaN.
    """
    rows = plain(value)
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise ValueError(f"the scorer returned {show(rows)} for {len(ids)} items, wanted one score for each")
    return {"scores": [{"id": id, "score": _score(id, row, columns)} for id, row in zip(ids, rows, strict=True)]}


def decode_scores(answer: Any, ids: Sequence[Id], columns: Sequence[str]) -> list[list[float]]:
    """Scores [n, C] in the order of `ids`, whatever that of the answer; NaN = no verdict.

    ValueError: an id is missing, unknown or repeated, or what it has is no score.
    """
    if not isinstance(answer, dict) or "error" in answer or not isinstance(answer.get("scores"), list):
        raise ValueError(f'the server answered {show(answer)}, wanted {{"scores": [...]}}')
    found: dict[Id, list[float]] = {}
    for entry in answer["scores"]:
        match entry:
            case {"id": int() | str() as id, "score": score} if not isinstance(id, bool) and id in ids:
                if id in found:
                    raise ValueError(f"the server answered twice for id {id!r}, the second time {show(score)}")
                found[id] = _row(id, score, columns)
            case _:
                raise ValueError(f"the server answered with {show(entry)}, wanted a score for an id that was asked")
    if missing := [id for id in ids if id not in found]:
        raise ValueError(f"the server gave {len(found)} scores for {len(ids)} items, none for the ids {missing}")
    return [found[id] for id in ids]


@runtime_checkable
class _Array(Protocol):
    """torch on any device, numpy, and whatever else copies itself into plain numbers."""

    def tolist(self) -> Any: ...


def plain(value: Any) -> Any:
    """Arrays and sequences as nested lists of Python objects."""
    if isinstance(value, _Array):
        value = value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _score(id: Id, row: Any, columns: Sequence[str]) -> Any:
    numbers = [math.nan if cell is None else _number(cell) for cell in (row if isinstance(row, list) else [row])]
    if len(numbers) != len(columns) or any(map(math.isinf, numbers)):
        raise ValueError(f"the scorer returned {show(row)} for item {id!r}, wanted {_wanted(columns)}")
    values = [None if math.isnan(number) else number for number in numbers]
    return values[0] if len(columns) == 1 else dict(zip(columns, values, strict=True))


def _row(id: Id, score: Any, columns: Sequence[str]) -> list[float]:
    cells = score if isinstance(score, dict) else dict.fromkeys(columns[:1], score)
    numbers = {column: math.nan if cell is None else _number(cell) for column, cell in cells.items()}
    if set(numbers) != set(columns) or any(map(math.isinf, numbers.values())):
        raise ValueError(f"the server answered {show(score)} for id {id!r}, wanted {_wanted(columns)}")
    return [numbers[column] for column in columns]


def _number(value: Any) -> float:
    """A number or NaN as it is, inf for anything else; a bool is no number."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.inf
    except OverflowError:
        return math.inf


def _wanted(columns: Sequence[str]) -> str:
    return "a finite number" if len(columns) == 1 else f"finite numbers for {', '.join(columns)}"


def show(value: Any) -> str:
    """A value, shortened, and its type."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"
