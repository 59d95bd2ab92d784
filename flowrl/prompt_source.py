"""A prompt file on disk -> its lines: found, decompressed, decoded, within limits. Their meaning is not read here."""

from __future__ import annotations

import codecs
import gzip
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 64 * 2**20  # of one file, after decompression
MAX_ROWS = 1_000_000
MAX_LISTED = 50  # of the places of a message
BLANK = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + "\ufeff"
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that print nothing

Tell = Callable[[str], None]


class PromptFileError(ValueError):
    """A prompt file that cannot be used; the message names the file and every problem found in it."""


@dataclass(frozen=True)
class Line:
    number: int
    text: str
    fault: str = ""


def shown(text: str, width: int = 80) -> str:
    """The text in quotes, its control and other unprintable characters escaped, cut to `width` characters."""
    return repr(text if len(text) <= width else text[:width] + "...")


def named(path: Path) -> str:
    return shown(str(path), 4096)


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + "s" * (n != 1)


def listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - MAX_LISTED:,} more" if len(places) > MAX_LISTED else ""
    return ", ".join(places[:MAX_LISTED]) + more


def visible(text: str) -> bool:
    """Whether any character prints something: not a blank, a mark alone, a zero-width or a control character."""
    return any(c not in FILLERS and _prints(unicodedata.category(c)) for c in text)


def _prints(category: str) -> bool:
    return category[0] in "LNPS" or category in ("Co", "Cn")


def read_lines(path: Path, tell: Tell) -> list[Line]:
    """The lines of a file, those that are not UTF-8 with a fault; `tell` hears how an oddly packed file was read.

    Raises PromptFileError for a folder, a missing, empty, damaged or too large file, and UTF-16 without its mark.
    """
    data = _utf8(path, _unpacked(path, tell), tell)
    if data.count(0) * 4 > len(data):
        raise PromptFileError(
            f"{named(path)}: full of NUL bytes, it looks like UTF-16 without a mark: save it as UTF-8"
        )
    if len(data) > MAX_BYTES or data.count(b"\n") > MAX_ROWS:
        raise PromptFileError(f"{named(path)} has over {MAX_BYTES // 2**20} MiB or {MAX_ROWS:,} lines: split the file")
    lines = list(_lines(data))
    if not any(line.fault or visible(line.text) for line in lines):
        raise PromptFileError(f"no prompts in {named(path)}: {'every line is blank' if data else 'the file is empty'}")
    return lines


def _unpacked(path: Path, tell: Tell) -> bytes:
    if path.is_dir():
        raise PromptFileError(f"{named(path)} is a folder: give the prompt file inside it")
    if not path.is_file():
        origin = "" if path.is_absolute() else f", looked up in the current folder as {named(path)}"
        raise PromptFileError(f"there is no prompt file {named(path.absolute())}{origin}")
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2).startswith(b"\x1f\x8b")
            data = (gzip.GzipFile(fileobj=raw) if zipped else raw).read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PromptFileError(f"{named(path)}: the gzip data is incomplete or damaged, make the file again") from error
    except OSError as error:
        raise PromptFileError(f"{named(path)}: {error.strerror}") from error
    if zipped != (path.suffix.lower() == ".gz"):
        tell(
            "gzip data without a .gz name, read decompressed" if zipped else "not gzip data, whatever its .gz name says"
        )
    return data


def _utf8(path: Path, data: bytes, tell: Tell) -> bytes:
    if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data
    tell("read as UTF-16")
    try:
        return data.decode("utf-16").encode()
    except UnicodeDecodeError as error:
        raise PromptFileError(
            f"{named(path)}: marked as UTF-16 but byte {error.start} is not: save as UTF-8"
        ) from error


def _lines(data: bytes) -> Iterator[Line]:
    """Only LF and CRLF end a line. A line that is not UTF-8 has a fault and does not touch the others."""
    offset = 0
    for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            text, fault = raw.removesuffix(b"\r").decode(), ""
        except UnicodeDecodeError as error:
            text = raw.removesuffix(b"\r").decode(errors="replace")  # its quotes still count in a table
            fault = (f"byte {offset + error.start} of the file ({raw[error.start]:#04x}) is not UTF-8; "
                     "is it Latin-1 or Windows-1252? Save the file as UTF-8")  # fmt: skip
        yield Line(number, text.removeprefix("\ufeff") if number == 1 else text, fault)
        offset += len(raw) + 1
