"""The lines of a prompt file -> numbered rows, whatever its format. What makes a good prompt is not decided here."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flowrl.prompt_source import BLANK, MAX_ROWS, Line, PromptFileError, Tell, named, read_lines, shown, visible

MAX_DEPTH = 100  # of nested JSON
KINDS = {dict: "an object", list: "an array", str: "text", bool: "a boolean", int: "a number", float: "a number"}


@dataclass(frozen=True)
class Row:
    """A candidate prompt. `number` counts lines (text, JSON lines) or data rows (JSON, tables) from 1."""

    number: int
    place: str
    value: Any = None
    fault: str = ""
    blank: bool = False


def kind(value: object) -> str:
    return KINDS.get(type(value), "null")


def read_rows(path: Path, tell: Tell) -> Iterator[Row]:
    """The rows of a file, broken and blank ones included; `tell` hears how an oddly formed file was read."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.is_file() and suffix not in READERS:
        raise PromptFileError(
            f"{named(path)}: unknown kind of file, use {', '.join(READERS)} (or one of them with .gz)"
        )
    lines = read_lines(path, tell)
    return READERS[suffix](lines, tell)


def _text_rows(lines: list[Line], tell: Tell) -> Iterator[Row]:
    for line in lines:
        text = line.text.strip(BLANK)
        fault = line.fault or ("a carriage return inside: save the file with LF or CRLF line ends" * ("\r" in text))
        yield Row(line.number, f"line {line.number}", {"prompt": text}, fault, blank=not fault and not visible(text))


def _json_line_rows(lines: list[Line], tell: Tell) -> Iterator[Row]:
    if _is_array(lines):
        tell("this is a JSON array, not JSON lines: read as .json")
        yield from _json_rows(lines, tell)
        return
    for line in lines:
        text, place = line.text.strip(BLANK), f"line {line.number}"
        if line.fault or not text:
            yield Row(line.number, place, fault=line.fault, blank=not line.fault)
        else:
            yield _json_row(line.number, place, *_parse(text, line.number))


def _is_array(lines: list[Line]) -> bool:
    """A text that opens an array is JSON lines only if that array ends on its line and rows follow."""
    full = [text for line in lines if (text := line.text.strip(BLANK))]
    return bool(full) and full[0].startswith("[") and (len(full) == 1 or bool(_parse(full[0], 1)[1]))


def _json_rows(lines: list[Line], tell: Tell) -> Iterator[Row]:
    broken = [Row(line.number, f"line {line.number}", fault=line.fault) for line in lines if line.fault]
    text = "\n".join(line.text for line in lines)
    if broken:
        yield from broken
        return
    value, fault = _parse(text, 1)
    if isinstance(value, dict) and all(isinstance(prompts, list) for prompts in value.values()):
        tell(f"read as {{style: [prompt, ...]}}, the style kept as metadata; styles: {shown(', '.join(value))}")
        styled = ((style, text) for style, prompts in value.items() for text in prompts)
        items = [{"prompt": text, "metadata": {"style": style}} for style, text in islice(styled, MAX_ROWS + 1)]
    elif isinstance(value, list):
        items = [{"prompt": item} if isinstance(item, str) else item for item in value[: MAX_ROWS + 1]]
    else:
        yield Row(0, "file", fault=fault or f"the top level is {kind(value)}, wanted an array of rows")
        return
    if len(items) > MAX_ROWS:
        yield Row(0, "file", fault=f"more than {MAX_ROWS:,} rows: split the file")
        return
    for number, item in enumerate(items, 1):
        yield _json_row(number, f"row {number}", item)


def _parse(text: str, first_line: int) -> tuple[Any, str]:
    """The JSON value and "", or None and why it is none."""
    try:
        return DECODER.decode(text), ""
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} (line {first_line + error.lineno - 1}, column {error.colno})"
    except RecursionError:
        return None, f"nested too deep, at most {MAX_DEPTH} levels are read"
    except ValueError as error:
        return None, str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {shown(twice)} appears twice in one object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not a finite number")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
ENCODER = json.JSONEncoder(ensure_ascii=False)


def _json_row(number: int, place: str, value: Any, fault: str = "") -> Row:
    if not fault and _deeper(value, MAX_DEPTH):
        fault = f"nested too deep, at most {MAX_DEPTH} levels are read"
    elif not fault:
        try:
            ENCODER.encode(value).encode()
        except UnicodeEncodeError:
            fault = "half a surrogate pair (\\ud800 to \\udfff) is not a character"
    return Row(number, place, value, fault)


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (levels == 0 or any(_deeper(each, levels - 1) for each in inner))


def _csv_rows(lines: list[Line], tell: Tell) -> Iterator[Row]:
    semicolons = ";" in lines[0].text and "," not in lines[0].text
    if semicolons:
        tell("columns are separated by semicolons")
    return _table_rows(lines, ";" if semicolons else ",", csv.QUOTE_MINIMAL)


def _tsv_rows(lines: list[Line], tell: Tell) -> Iterator[Row]:
    return _table_rows(lines, "\t", csv.QUOTE_NONE)


def _table_rows(lines: list[Line], delimiter: str, quoting: Any) -> Iterator[Row]:
    reader = csv.reader((line.text + "\n" for line in lines), delimiter=delimiter, quoting=quoting, strict=True)
    records = _records(reader)
    header, fault = next(records)
    names = [name.strip(BLANK) for name in header]
    prompts = [i for i, name in enumerate(names) if name.lower() in ("prompt", "prompts")]
    if fault or lines[0].fault or len(prompts) != 1 or len(set(names)) < len(names):
        fault = fault or lines[0].fault or "wanted exactly one column named prompt and no name twice"
        yield Row(0, "header", fault=f"{fault}; the first row is {shown(delimiter.join(names))}")
        return
    faults, start = {line.number: line.fault for line in lines if line.fault}, reader.line_num
    for number, (cells, fault) in enumerate(records, 1):
        span, start = range(start + 1, reader.line_num + 1), reader.line_num
        fault = fault or next(filter(None, map(faults.get, span)), "")
        if not fault and cells and len(cells) != len(names):
            fault = f"fields: {len(cells)}, columns: {len(names)} (a text with {shown(delimiter)} inside needs quotes)"
        value = _table_value(names, cells, prompts[0]) if cells and not fault else {"prompt": ""}
        blank = not fault and not visible(value["prompt"])
        yield Row(number, f"row {number} (line {reader.line_num})", value, fault, blank)


def _records(reader: Any) -> Iterator[tuple[list[str], str]]:
    """(cells, fault) of each record: a broken one does not end the file."""
    while True:
        try:
            yield next(reader), ""
        except csv.Error as error:
            yield [], str(error)
        except StopIteration:
            return


def _table_value(names: list[str], cells: list[str], prompt: int) -> Mapping[str, Any]:
    rest = {name: cell for i, (name, cell) in enumerate(zip(names, cells, strict=True)) if i != prompt}
    own = next((name for name in names if name.lower() == "id"), None)
    return {"prompt": cells[prompt], "id": rest.pop(own) if own else "", "metadata": rest}


READERS = {".txt": _text_rows, ".jsonl": _json_line_rows, ".json": _json_rows, ".csv": _csv_rows, ".tsv": _tsv_rows}
