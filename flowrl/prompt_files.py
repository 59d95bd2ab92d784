"""Prompt files -> Prompt rows. Every problem of a file is found and told at once, none is repaired in silence.

A file is .txt (a prompt a line), .jsonl, .json, .csv or .tsv, or one of these gzipped. Limits: 64 MiB decompressed,
1,000,000 rows, 100,000 characters a prompt, 100 levels of JSON.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.pictures import Picture
from flowrl.prompt_source import BLANK, MAX_LISTED, PromptFileError, count, listed, named, shown, visible
from flowrl.prompt_tables import Row, kind, read_rows
from flowrl.types import Prompt

__all__ = ["BadRow", "PromptFile", "PromptFileError", "read_prompts"]

MAX_CHARS = 100_000  # of one prompt
LONG_CHARS = 1_000  # beyond this every text encoder in use cuts
ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200b\u2060\ufeff]")
TYPES = {
    "prompt": ((str,), "text"),
    "id": ((str, int), "text or an integer"),
    "metadata": ((dict,), "an object"),
    "seed": ((int,), "an integer"),
}
OWN_KEYS = ("prompt", "id", "metadata")
KNOWN_KEYS = [*TYPES, "image", "images", "negative_prompt", "target"]


@dataclass(frozen=True)
class BadRow:
    """A row that was not used: its number, its place in the file, its own id ("" if none) and the reason."""

    number: int
    place: str
    key: str
    reason: str


@dataclass(frozen=True)
class PromptFile:
    """What a file holds: the prompts in file order, what the user should be told, the bad rows left out.

    A file of pairs has the (chosen, rejected) picture of each prompt id, too.
    """

    prompts: list[Prompt]
    notices: list[str]
    skipped: list[BadRow]
    pairs: Mapping[int, tuple[Picture, Picture]] = field(default_factory=dict)


def read_prompts(path: str | Path, skip_bad: bool = False, dedupe: bool = False) -> PromptFile:
    """The prompts of a file; `Prompt.id` is the line (.txt, .jsonl) or data row (.json, .csv, .tsv), counted from 1.

    Rows of equal text stay separate prompts; `dedupe` keeps the first of those whose metadata are equal too.
    `skip_bad` leaves bad rows out and records them; otherwise any bad row refuses the file.
    JSON keys: prompt, id and metadata; any other key joins the metadata.

    Raises PromptFileError (a ValueError) listing all bad rows with their places.
    """
    path, notices = Path(path), list[str]()
    return taken(path, list(read_rows(path, notices.append)), notices, skip_bad, dedupe)


def taken(path: Path, rows: list[Row], notices: list[str], skip_bad: bool, dedupe: bool = False) -> PromptFile:
    """What the rows of a file hold, as `read_prompts` has it; `notices` is what the user is told already."""
    good, bad = _sorted_out(rows)
    if bad and not (skip_bad and good):
        raise PromptFileError(_report(path, bad, notices))
    if not good:
        raise PromptFileError(f"no prompts in {named(path)}: no row has text")
    kept = _distinct(good) if dedupe else good
    told = _notices(rows, good, bad, len(good) - len(kept))
    return PromptFile([prompt for _, prompt in kept], [*notices, *told], bad)


def _sorted_out(rows: list[Row]) -> tuple[list[tuple[Row, Prompt]], list[BadRow]]:
    good: list[tuple[Row, Prompt]] = []
    bad: list[BadRow] = []
    place_of: dict[str, str] = {}
    for row in rows:
        if row.blank:
            continue
        key = _key(row.value)
        reason = row.fault or "; ".join(_faults(row.value))
        if not reason and key in place_of:
            reason = f"id {shown(key)} is already the id of {place_of[key]}"
        if reason:
            bad.append(BadRow(row.number, row.place, key, reason))
            continue
        if key:
            place_of[key] = row.place
        good.append((row, Prompt(row.number, row.value["prompt"].strip(BLANK), _metadata(row.value), key)))
    return good, bad


def _key(value: Any) -> str:
    key = value.get("id", "") if isinstance(value, Mapping) else ""
    return str(key).strip(BLANK) if type(key) in TYPES["id"][0] else ""


def _extras(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in OWN_KEYS}


def _metadata(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**_extras(value), **value.get("metadata", {})}


def _faults(value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"the row is {kind(value)}, wanted an object with a prompt"]
    faults = [
        f"{key} is {kind(value[key])}, wanted {wanted}"
        for key, (types, wanted) in TYPES.items()
        if key in value and type(value[key]) not in types
    ]
    if "prompt" not in value:
        near = _nearest("prompt", value)
        faults.append("no prompt" + (f" (is {shown(near)} meant to be it?)" if near else ""))
    elif isinstance(value["prompt"], str):
        faults += _text_faults(value["prompt"])
    if isinstance(value.get("metadata"), dict):
        faults += [f"{shown(key)} is both a key and in metadata" for key in _extras(value) if key in value["metadata"]]
    return faults


def _nearest(key: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[close[0]] if close else ""


def _text_faults(text: str) -> list[str]:
    if len(text) > MAX_CHARS:
        return [f"the prompt has {len(text):,} characters, at most {MAX_CHARS:,} are read"]
    if not visible(text):
        return ["the prompt is empty"]
    return ["a NUL character in the prompt"] if "\0" in text else []


def _report(path: Path, bad: list[BadRow], notices: list[str]) -> str:
    faults = "".join(f"\n  {row.place}: {row.reason}" for row in bad[:MAX_LISTED])
    more = f"\n  and {len(bad) - MAX_LISTED:,} more" if len(bad) > MAX_LISTED else ""
    also = "".join(f"\n  besides: {notice}" for notice in notices)
    return f"{named(path)}: {count(len(bad), 'bad row')}; correct the file or skip bad rows{faults}{more}{also}"


def _distinct(good: list[tuple[Row, Prompt]]) -> list[tuple[Row, Prompt]]:
    first: dict[tuple[str, str], tuple[Row, Prompt]] = {}
    for row, prompt in good:
        first.setdefault((prompt.text, json.dumps(prompt.metadata, sort_keys=True)), (row, prompt))
    return list(first.values())


def _notices(rows: list[Row], good: list[tuple[Row, Prompt]], bad: list[BadRow], dropped: int) -> list[str]:
    notices = []
    if blank := [row.place for row in rows if row.blank]:
        notices.append(f"{count(len(blank), 'row')} without text skipped: {listed(blank)}")
    if bad:
        notices.append(f"{count(len(bad), 'bad row')} skipped: {listed([row.place for row in bad])}")
    if repeats := len(good) - len({prompt.text for _, prompt in good}):
        fate = f"{dropped} with the same metadata dropped" if dropped else "each stays a prompt of its own"
        notices.append(f"{count(repeats, 'row')} repeating the text of an earlier row: {fate}")
    for row, prompt in good:
        if len(prompt.text) > LONG_CHARS:
            notices.append(f"{row.place}: {len(prompt.text):,} characters, text encoders cut so long a prompt")
    if odd := [row.place for row, prompt in good if ODD.search(prompt.text)]:
        notices.append(f"control, line-separator or zero-width characters kept inside: {listed(odd)}")
    return notices + _key_notices(good)


def _key_notices(good: list[tuple[Row, Prompt]]) -> list[str]:
    extras = Counter(key for row, _ in good for key in _extras(row.value))
    first = {key: row.place for row, _ in reversed(good) for key in _extras(row.value)}
    notices = []
    if extras:
        notices.append(
            "kept as metadata: " + listed([f"{shown(key)} ({count(n, 'row')})" for key, n in extras.items()])
        )
    for key in extras:
        near = "" if key in KNOWN_KEYS else _nearest(key, KNOWN_KEYS)
        if near:
            notices.append(f"{first[key]}: {shown(key)} is kept as metadata, is {shown(near)} meant?")
    return notices
