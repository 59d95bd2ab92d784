"""Files of given preferences -> prompts with a chosen and a rejected picture each, every problem told at once.

A file is .jsonl or .json (also gzipped); its pictures lie in its folder or below. A row has one of four layouts:

    {prompt, chosen, rejected}
    {prompt or caption, jpg_0, jpg_1, label_0}                            Pick-a-Pic; label 1: jpg_0 is better, 0: jpg_1
    {prompt, image_path: [...], human_preference: [...] or rank: [...]}   HPDv2; more is better, and a lower rank
    {schema_version: 2, input: {prompt}, supervision: {type: preference, chosen: {media}, rejected: {media}}}

the last of Flow-Factory. Any other key is metadata. Of more than two pictures the first best and the first worst are
taken. A tie teaches nothing and is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.pictures import Picture, Unfit, by, examine
from flowrl.prompt_files import PromptFile, taken
from flowrl.prompt_source import PromptFileError, count, listed, named, shown
from flowrl.prompt_tables import Row, kind, read_rows

SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True)
class Given:
    """A row as one of a prompt file, and the names of its pictures, the chosen one first; a tie has none."""

    row: Row
    names: tuple[str, ...] = ()
    tie: bool = False
    conditioned: bool = False  # there is a picture to start from, too


def read_pairs(path: str | Path, skip_bad: bool = False) -> PromptFile:
    """The prompts of a file of pairs, and their pictures by prompt id; `skip_bad` as for `read_prompts`.

    Raises PromptFileError listing all bad rows with their places, be it the row or a picture of it that is at fault.
    """
    path, notices = Path(path), list[str]()
    if path.is_file() and Path(path.name.lower().removesuffix(".gz")).suffix not in SUFFIXES:
        raise PromptFileError(f"{named(path)}: a file of pairs is {' or '.join(SUFFIXES)} (or one of them with .gz)")
    rows = [_given(row) for row in read_rows(path, notices.append)]
    found = examine(path.parent, (name for given in rows for name in given.names))
    rows = [replace(given, row=_looked_at(given, found)) for given in rows]
    notices += _notices(rows, found)
    decided = [given.row for given in rows if not given.tie]
    if all(row.blank for row in decided):
        raise PromptFileError(f"no pairs in {named(path)}: {'; '.join(notices)}")
    file = taken(path, decided, notices, skip_bad)
    names = {given.row.number: given.names for given in rows}
    return replace(file, pairs={p.id: tuple(found[name] for name in names[p.id]) for p in file.prompts})


def _given(row: Row) -> Given:
    if row.blank or row.fault:
        return Given(row)
    try:
        return _by_layout(row, row.value)
    except Unfit as error:
        return Given(replace(row, fault=str(error)))


def _by_layout(row: Row, value: Any) -> Given:
    match value:
        case {"supervision": _} | {"schema_version": _}:
            return _nested(row, value)
        case {"jpg_0": _} | {"jpg_1": _}:
            return _labelled(row, value)
        case {"image_path": _}:
            return _ranked(row, value)
        case {"chosen": _} | {"rejected": _}:
            rest = _without(value, "chosen", "rejected")
            return Given(replace(row, value=rest), (_name(value, "chosen"), _name(value, "rejected")))
        case {}:
            wanted = "chosen and rejected, jpg_0 and jpg_1, image_path, or supervision"
            raise Unfit(f"no pair of pictures: wanted {wanted}, the keys are {shown(', '.join(value))}")
    raise Unfit(f"the row is {kind(value)}, wanted an object with a pair of pictures")


def _labelled(row: Row, value: Mapping[str, Any]) -> Given:
    text = "prompt" if "prompt" in value else "caption"
    rest = {"prompt" if key == text else key: item for key, item in value.items()}
    row = replace(row, value=_without(rest, "jpg_0", "jpg_1", "label_0"))
    names = _name(value, "jpg_0"), _name(value, "jpg_1")
    match value.get("label_0"):
        case 0.5:
            return Given(row, tie=True)
        case 1:
            return Given(row, names)
        case 0:
            return Given(row, names[::-1])
    raise Unfit("label_0 is wanted as 1 (jpg_0 is better), 0 (jpg_1 is better) or 0.5 (a tie)")


def _ranked(row: Row, value: Mapping[str, Any]) -> Given:
    key = "human_preference" if "human_preference" in value else "rank"
    match value["image_path"], value.get(key):
        case [str(), *_] as names, [*worth] if len(names) == len(worth) and _names_and_numbers(names, worth):
            row = replace(row, value=_without(value, "image_path", key))
        case _:
            raise Unfit(f"wanted image_path as a list of paths and {key} as a list of as many numbers")
    if len(names) < 2:
        raise Unfit("one picture only")
    if max(worth) == min(worth):
        return Given(row, tie=True)
    most, least = names[worth.index(max(worth))], names[worth.index(min(worth))]
    return Given(row, (most, least) if key == "human_preference" else (least, most))


def _nested(row: Row, value: Mapping[str, Any]) -> Given:
    if (version := value.get("schema_version")) != 2:
        raise Unfit(f"schema_version is {shown(str(version))}, 2 is read")
    match value:
        case {"input": {"prompt": text, **given}, "supervision": {"type": "preference"} as supervision}:
            rest = {"prompt": text, **_without(value, "schema_version", "input", "supervision")}
            names = _medium(supervision, "chosen"), _medium(supervision, "rejected")
            return Given(replace(row, value=rest), names, conditioned=bool(given.get("media")))
    raise Unfit("wanted input with a prompt, and supervision of type preference")


def _medium(supervision: Mapping[str, Any], key: str) -> str:
    match supervision.get(key):
        case {"media": [{"type": "image", "path": str(path)}]}:
            return path
    raise Unfit(f"wanted supervision.{key}.media as a list of one object of type image with a path")


def _name(value: Mapping[str, Any], key: str) -> str:
    if key not in value:
        raise Unfit(f"one picture only, {key} is missing")
    if not isinstance(value[key], str):
        raise Unfit(f"{key} is {kind(value[key])}, wanted the path of a picture")
    return value[key]


def _without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _names_and_numbers(names: Sequence[Any], numbers: Sequence[Any]) -> bool:
    return all(isinstance(one, str) for one in names) and all(type(one) in (int, float) for one in numbers)


def _looked_at(given: Given, found: Mapping[str, Picture | Unfit]) -> Row:
    """The row, at fault where one of its pictures is, or where both are one."""
    pair = [found[name] for name in given.names]
    faults = [f"{shown(name)}: {one}" for name, one in zip(given.names, pair, strict=True) if isinstance(one, Unfit)]
    if not faults and len({one.digest for one in pair if isinstance(one, Picture)}) == 1:
        faults = ["chosen and rejected are the same picture"]
    return replace(given.row, fault="; ".join(faults) or given.row.fault)


def _notices(rows: Sequence[Given], found: Mapping[str, Picture | Unfit]) -> Iterator[str]:
    if ties := [given.row.place for given in rows if given.tie]:
        yield f"{count(len(ties), 'tie')} skipped: {listed(ties)}"
    if conditioned := [given.row.place for given in rows if given.conditioned]:
        yield f"{count(len(conditioned), 'row')} with a picture to start from, which is not used: {listed(conditioned)}"
    good = {name: picture for name, picture in found.items() if isinstance(picture, Picture)}
    by_note = defaultdict(list[str])
    for name, picture in good.items():
        for note in picture.notes:
            by_note[note].append(shown(name))
    yield from (f"{note}: {listed(names)}" for note, names in by_note.items())
    if good:
        sizes = Counter(by(*picture.size) for picture in good.values()).most_common()
        each = listed([f"{size} ({n:,})" for size, n in sizes])
        yield f"each picture is scaled to cover the model's size and cut to its middle; they are {each}"
    pairs = [(given.row.place, {good[n].size for n in given.names if n in good}) for given in rows]
    if uneven := [place for place, sizes in pairs if len(sizes) > 1]:
        yield f"{count(len(uneven), 'pair')} of different sizes: {listed(uneven)}"
